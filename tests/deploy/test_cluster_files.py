"""Configuration files of the servers, loaded by the embedded engine."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.store.cluster import REPLICA_PATH
from tests.deploy.files import CLUSTER_XML, KEEPER_XML, SERVER_XML, xml

if TYPE_CHECKING:
    from pathlib import Path

LOADER = """
import sys
import clickhouse_connect
client = clickhouse_connect.get_client(
    interface="chdb", path=sys.argv[1], chdb_options={"config-file": sys.argv[2]}
)
print(client.command(
    "SELECT shard_num, replica_num, host_name, port FROM system.clusters"
    " WHERE cluster = 'rankscope' ORDER BY shard_num, replica_num FORMAT CSV"
))
print(client.command("SELECT macro, substitution FROM system.macros ORDER BY macro FORMAT CSV"))
"""


def load(tmp_path: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Load server.xml and cluster.xml as a server does."""
    (tmp_path / "config.xml").write_text("<clickhouse/>")
    (tmp_path / "config.d").mkdir()
    (tmp_path / "config.d" / "cluster.xml").write_bytes(CLUSTER_XML.read_bytes())
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOADER, str(tmp_path / "store"),
         str(tmp_path / "config.xml")],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.multiproc
def test_the_engine_finds_two_shards_of_two_replicas_and_its_own_place(
    tmp_path: Path,
) -> None:
    done = load(tmp_path, {"SHARD": "2", "REPLICA": "1", "RANKSCOPE_CLUSTER_SECRET": "s"})

    assert done.stdout.split() == [
        '1,1,"clickhouse-1-1",9000', '1,2,"clickhouse-1-2",9000',
        '2,1,"clickhouse-2-1",9000', '2,2,"clickhouse-2-2",9000',
        '"cluster","rankscope"', '"replica","1"', '"shard","2"',
    ], done.stderr  # fmt: skip


def test_the_macros_of_the_tables_paths_are_set_on_each_server() -> None:
    macros = xml(CLUSTER_XML).find("macros")
    assert macros is not None

    assert {"shard", "replica"} <= {macro.tag for macro in macros}
    assert "{shard}" in REPLICA_PATH


@pytest.mark.parametrize("path", [SERVER_XML, CLUSTER_XML, KEEPER_XML], ids=lambda path: path.name)
def test_no_file_contains_a_secret(path: Path) -> None:
    for element in xml(path).iter():
        if element.tag in {"secret", "password"}:
            assert set(element.attrib) == {"from_env"}
            assert not (element.text or "").strip()
