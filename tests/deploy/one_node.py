"""Cluster of one server in this process: Distributed tables of the engine, without a keeper.

The statements are those of a cluster, without ``ON CLUSTER`` and ``Replicated``, which need a
keeper. Queries take the same path as on a cluster.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.collector.store import store
from rankscope.collector.store.cluster import CLUSTER_SETTINGS, ClusterStatements, Statement
from rankscope.collector.store.store import Store, migrate

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

CLUSTER = "rankscope"

CONFIGURATION = """
<clickhouse>
    <tcp_port>9000</tcp_port>
    <remote_servers>
        <rankscope>
            <shard>
                <internal_replication>true</internal_replication>
                <replica><host>127.0.0.1</host><port>9000</port></replica>
            </shard>
        </rankscope>
    </remote_servers>
    <macros><shard>01</shard><replica>a</replica></macros>
</clickhouse>
"""


class WithoutKeeper(ClusterStatements):
    """Cluster statements, changed so that a server without a keeper can run them."""

    def rewrite(
        self, sql: str, parameters: Mapping[str, Any] | None = None
    ) -> tuple[Statement, ...]:
        statements = super().rewrite(sql, parameters)
        return tuple(
            replace(statement, sql=without_keeper(statement.sql)) for statement in statements
        )


class OneNodeCluster(Store):
    """Embedded store whose tables are created and changed as on a cluster."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._statements = WithoutKeeper(cluster=CLUSTER, database="default")


def without_keeper(statement: str) -> str:
    """Return a statement in a form that a server without a keeper can run."""
    alone = statement.replace(f" ON CLUSTER `{CLUSTER}`", "")
    return re.sub(r"Replicated(\w*MergeTree)\('[^']*', '[^']*'(?:, )?", r"\1(", alone)


@contextmanager
def one_node_cluster(folder: Path) -> Iterator[Store]:
    """Open an empty store at ``folder`` as a cluster of one."""
    configuration = folder / "config.xml"
    configuration.write_text(CONFIGURATION)
    with pytest.MonkeyPatch.context() as patch:
        options = store.ENGINE_OPTIONS | {"config-file": str(configuration)}
        patch.setattr(store, "ENGINE_OPTIONS", options)
        # The embedded server has no port for queries of other servers.
        settings = CLUSTER_SETTINGS | {"prefer_localhost_replica": 1}
        patch.setattr(store, "SETTINGS", store.SETTINGS | settings)
        with OneNodeCluster(f"chdb://{folder / 'store'}") as opened:
            migrate(opened)
            yield opened
