from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.collector.errors import StoreUrlError
from rankscope.collector.store.location import (
    EmbeddedLocation,
    ServerFile,
    ServerLocation,
    default_store_url,
    parse_store_url,
    printable_url,
    read_server_file,
    remove_server_file,
    write_server_file,
)


def test_an_embedded_url_names_a_folder() -> None:
    assert parse_store_url("chdb:///data/my%20store") == EmbeddedLocation(
        path=Path("/data/my store")
    )


def test_a_server_url_names_account_host_and_database() -> None:
    assert parse_store_url("clickhouse://ann:p%40ss@db.example:9123/spans?secure=1") == (
        ServerLocation(
            host="db.example", port=9123, user="ann", password="p@ss", database="spans", secure=True
        )
    )


def test_a_server_url_may_name_a_cluster_and_its_quorum() -> None:
    found = parse_store_url("clickhouse://db/spans?cluster=rankscope&quorum=2")

    assert isinstance(found, ServerLocation)
    assert (found.cluster, found.quorum, found.database) == ("rankscope", 2, "spans")


@pytest.mark.parametrize(
    ("query", "what"),
    [
        ("clutser=a", "unknown parameter 'clutser'"),
        ("cluster=a`b", "cluster 'a`b'"),
        ("cluster=a&quorum=0", "quorum '0'"),
        ("cluster=a&quorum=auto", "quorum 'auto'"),
        ("quorum=2", "a quorum needs a cluster"),
    ],
)
def test_an_invalid_parameter_of_a_server_url_is_named(query: str, what: str) -> None:
    with pytest.raises(StoreUrlError, match=what) as caught:
        parse_store_url(f"clickhouse://ann:secret@db/spans?{query}")

    assert "secret" not in str(caught.value)


def test_a_cluster_needs_a_database_name_that_is_an_identifier() -> None:
    with pytest.raises(StoreUrlError, match="database 'a b'"):
        parse_store_url("clickhouse://db/a%20b?cluster=c")
    alone = parse_store_url("clickhouse://db/a%20b")
    assert isinstance(alone, ServerLocation)
    assert alone.database == "a b"


def test_a_server_url_has_clickhouses_defaults() -> None:
    assert parse_store_url("clickhouse://db") == ServerLocation(
        host="db", port=8123, user="default", password="", database="default", secure=False
    )


@pytest.mark.parametrize(
    "url",
    ["", "store", "/a/path", "chdb://relative/path", "chdb:", "http://host", "clickhouse:///db",
     "clickhouse://host:port/db", "clickhouse://host:99999/db"],
)  # fmt: skip
def test_the_error_for_any_other_url_names_both_forms(url: str) -> None:
    with pytest.raises(StoreUrlError, match=r"chdb:///absolute/path or clickhouse://"):
        parse_store_url(url)


def test_a_password_is_never_printed() -> None:
    assert printable_url("clickhouse://ann:secret@db:1/x") == "clickhouse://ann@db:1/x"
    with pytest.raises(StoreUrlError) as caught:
        parse_store_url("clickhouse://ann:secret@db:port/x")
    assert "secret" not in str(caught.value)


def test_the_default_store_follows_the_environment(tmp_path: Path) -> None:
    assert default_store_url({"RANKSCOPE_STORE": "chdb:///x"}) == "chdb:///x"
    assert (
        default_store_url({"XDG_DATA_HOME": str(tmp_path)}) == f"chdb://{tmp_path}/rankscope/store"
    )
    assert default_store_url({}) == f"chdb://{Path.home()}/.local/share/rankscope/store"


def test_the_server_file_is_read_until_it_is_removed(tmp_path: Path) -> None:
    write_server_file(tmp_path, url="http://127.0.0.1:8050", token="t")

    assert read_server_file(tmp_path) == ServerFile(
        pid=os.getpid(), url="http://127.0.0.1:8050", token="t"
    )
    remove_server_file(tmp_path)
    remove_server_file(tmp_path)
    assert read_server_file(tmp_path) is None


def test_the_server_file_is_not_written_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in ("server.json", f"server.{os.getpid()}.tmp"):
        (tmp_path / name).symlink_to(victim)

    write_server_file(tmp_path, url="http://127.0.0.1:8050", token="t")

    assert victim.read_text() == "precious"
    assert read_server_file(tmp_path) is not None


@pytest.mark.multiproc
def test_a_server_file_of_a_dead_process_is_ignored(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    document = {"pid": process.pid, "url": "http://x", "token": None}
    (tmp_path / "server.json").write_text(json.dumps(document))

    assert read_server_file(tmp_path) is None


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"pid": "x", "url": 1}'])
def test_a_broken_server_file_is_ignored(tmp_path: Path, content: str) -> None:
    (tmp_path / "server.json").write_text(content)

    assert read_server_file(tmp_path) is None
