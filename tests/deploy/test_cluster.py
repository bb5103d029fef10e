"""Statements for clusters, checked by text, by the engine's parser and by Distributed tables."""

from __future__ import annotations

import importlib
import pkgutil
import re
from typing import TYPE_CHECKING

import pytest

import rankscope
from rankscope import collector
from rankscope.collector.read.runs import list_runs, read_run
from rankscope.collector.read.spans import read_spans
from rankscope.collector.read.steps import read_steps
from rankscope.collector.retention.deletion import Deletions
from rankscope.collector.retention.removal import apply_deleted_masks, apply_large_deleted_masks
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.cluster import (
    ClusterStatementError,
    ClusterStatements,
    cluster_settings,
    sharding_key,
)
from rankscope.collector.store.location import ServerLocation, parse_store_url
from rankscope.collector.store.migrations import CREATE_VERSION_TABLE, known_migrations
from rankscope.collector.store.writer import StoreWriter
from tests.collector.store.test_sql_page import RUN, ready_queries
from tests.deploy.one_node import one_node_cluster
from tests.support.collector.spool_builder import SpoolBuilder
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rankscope.collector.store.store import Store

pytestmark = pytest.mark.slow

STATEMENTS = ClusterStatements(cluster="c1", database="db")


def said(sql: str) -> list[str]:
    return [re.sub(r"\s+", " ", statement.sql) for statement in STATEMENTS.rewrite(sql)]


@pytest.fixture(scope="module")
def cluster_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with one_node_cluster(tmp_path_factory.mktemp("cluster")) as opened:
        yield opened


def test_a_table_becomes_a_replicated_one_and_one_over_all_shards() -> None:
    local, over = said(
        "CREATE TABLE IF NOT EXISTS t (\n run_id String,\n rank Int32,\n revision UInt8\n)"
        " ENGINE = ReplacingMergeTree(revision)\nORDER BY (run_id, rank)\nSETTINGS a = 1"
    )

    assert local == (
        "CREATE TABLE IF NOT EXISTS `db`.`t_local` ON CLUSTER `c1`"
        " ( run_id String, rank Int32, revision UInt8 )"
        " ENGINE = ReplicatedReplacingMergeTree("
        "'/clickhouse/tables/{shard}/{database}/{table}', '{replica}', revision)"
        " ORDER BY (run_id, rank) SETTINGS a = 1"
    )
    assert over == (
        "CREATE TABLE IF NOT EXISTS `db`.`t` ON CLUSTER `c1` AS `db`.`t_local`"
        " ENGINE = Distributed('c1', 'db', 't_local', cityHash64(run_id, rank))"
    )


@pytest.mark.parametrize(
    ("order", "key"),
    [
        ("(run_id, epoch, step, rank, start_ns)", "cityHash64(run_id, rank)"),
        ("(run_id, name, host, at_ns)", "cityHash64(run_id, host)"),
        ("(host, boot_id, at_ns)", "cityHash64(host)"),
        ("run_id", "cityHash64(run_id)"),
        ("version", "0"),
    ],
)
def test_the_shard_of_a_row_depends_on_its_sort_key(order: str, key: str) -> None:
    assert sharding_key(order) == key


@pytest.mark.parametrize(
    "added",
    [
        "ADD COLUMN IF NOT EXISTS a Map(String, Int8), ADD COLUMN IF NOT EXISTS b Int8",
        "MODIFY COMMENT 'a table, with a ('' in it', COMMENT COLUMN a 'one, two'",
    ],
)
def test_columns_change_in_local_tables_first(added: str) -> None:
    assert said(f"ALTER TABLE t {added}") == [
        f"ALTER TABLE `db`.`t_local` ON CLUSTER `c1` {added}",
        f"ALTER TABLE `db`.`t` ON CLUSTER `c1` {added}",
    ]


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("DELETE FROM t WHERE a = 1", "DELETE FROM `db`.`t_local` ON CLUSTER `c1` WHERE a = 1"),
        (
            "DELETE FROM t WHERE a = 1 SETTINGS lightweight_deletes_sync = 0",
            "DELETE FROM `db`.`t_local` ON CLUSTER `c1` WHERE a = 1",
        ),
        (
            "ALTER TABLE t MODIFY TTL d + INTERVAL 1 DAY",
            "ALTER TABLE `db`.`t_local` ON CLUSTER `c1` MODIFY TTL d + INTERVAL 1 DAY",
        ),
        (
            "ALTER TABLE t REPLACE PARTITION 5 FROM u",
            "ALTER TABLE `db`.`t_local` ON CLUSTER `c1` REPLACE PARTITION 5 FROM `db`.`u_local`",
        ),
        (
            "EXCHANGE TABLES t AND u",
            "EXCHANGE TABLES `db`.`t_local` AND `db`.`u_local` ON CLUSTER `c1`",
        ),
        (
            "CREATE MATERIALIZED VIEW IF NOT EXISTS v TO u AS SELECT a FROM t WHERE a > 1",
            (
                "CREATE MATERIALIZED VIEW IF NOT EXISTS `db`.`v_local` ON CLUSTER `c1` TO"
                " `db`.`u_local` AS SELECT a FROM `db`.`t_local` AS t WHERE a > 1"
            ),
        ),
        ("OPTIMIZE TABLE t FINAL", "OPTIMIZE TABLE `db`.`t_local` ON CLUSTER `c1` FINAL"),
        ("TRUNCATE TABLE t", "TRUNCATE TABLE `db`.`t_local` ON CLUSTER `c1`"),
    ],
)
def test_rows_change_in_local_tables(sql: str, expected: str) -> None:
    assert said(sql) == [expected]


def test_a_bound_table_name_gets_its_suffix() -> None:
    sql = "DELETE FROM {table:Identifier} WHERE run_id = {run_id:String}"

    for given in ("spans", "spans_local"):
        (found,) = STATEMENTS.rewrite(sql, {"table": given, "run_id": "r"})
        assert found.sql == (
            "DELETE FROM `db`.{table:Identifier} ON CLUSTER `c1` WHERE run_id = {run_id:String}"
        )
        assert found.parameters == {"table": "spans_local", "run_id": "r"}


@pytest.mark.parametrize("sql", ["SELECT 1", "  select 1", "SET final = 1", "INSERT INTO t x"])
def test_statements_that_change_no_table_stay_unchanged(sql: str) -> None:
    assert [statement.sql for statement in STATEMENTS.rewrite(sql)] == [sql]


@pytest.mark.parametrize(
    "sql",
    [
        "CREATE TABLE t AS u",
        "CREATE MATERIALIZED VIEW v TO t AS SELECT 1",
        "CREATE TABLE IF NOT EXISTS t (a Int8) ENGINE = Memory",
        "RENAME TABLE t TO u",
        "ALTER TABLE t ADD COLUMN a Int8, DELETE WHERE b = 1",
        "ALTER TABLE {t:Identifier} ADD COLUMN a Int8",
    ],
)
def test_an_unknown_form_of_statement_is_refused(sql: str) -> None:
    with pytest.raises(ClusterStatementError, match=re.escape(sql[:20])):
        STATEMENTS.rewrite(sql, {"t": "t"})


def test_only_a_cluster_has_settings_and_a_quorum_on_request() -> None:
    def settings(url: str) -> dict[str, str | int]:
        location = parse_store_url(url)
        assert isinstance(location, ServerLocation)
        return cluster_settings(location)

    assert settings("clickhouse://db/x") == {}
    assert settings("clickhouse://db/x?cluster=c")["distributed_foreground_insert"] == 1
    assert "insert_quorum" not in settings("clickhouse://db/x?cluster=c")
    assert settings("clickhouse://db/x?cluster=c&quorum=2")["insert_quorum"] == 2


def test_the_engine_knows_every_setting(cluster_store: Store) -> None:
    names = {row["name"] for row in cluster_store.rows("SELECT name FROM system.settings")}

    location = ServerLocation(
        host="h", port=1, user="u", password="", database="d", secure=False, cluster="c", quorum=2
    )
    assert set(cluster_settings(location)) <= names


def test_the_engine_parses_every_migrations_statements_for_a_cluster(cluster_store: Store) -> None:
    shipped = [
        sql
        for known in known_migrations()
        if not known.is_embedded_only
        for sql in known.statements()
    ]
    statements = [
        statement.sql
        for sql in [CREATE_VERSION_TABLE, *shipped]
        for statement in STATEMENTS.rewrite(sql)
    ]

    for sql in statements:
        (parsed,) = cluster_store.rows("SELECT formatQuery({sql:String}) AS text", {"sql": sql})
        assert "ON CLUSTER c1" in parsed["text"] or sql.startswith("INSERT")
    # Rows are in local tables only, so what changes them, and not the columns, is one statement.
    of_rows = ("TRUNCATE", "INSERT", "EXCHANGE", "CREATE MATERIALIZED")
    num_single = sum(
        sql.startswith(of_rows) or " UPDATE " in sql or " MODIFY TTL " in sql for sql in shipped
    )
    assert len(statements) == 2 * (1 + len(shipped)) - num_single


CHANGING = ("CREATE ", "ALTER ", "DELETE ", "OPTIMIZE ", "TRUNCATE ", "DROP ", "RENAME ")


AGENT = "rankscope.collector.agent"
"""Modules with statements for SQLite, for the journal."""


def changing_statements() -> dict[str, str]:
    """Return all constants of our packages that change tables, by module and name."""
    found: dict[str, str] = {}
    for package in (collector, rankscope):
        for entry in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if entry.name.endswith("__main__") or entry.name.startswith(AGENT):
                continue
            for name, value in vars(importlib.import_module(entry.name)).items():
                several = value.values() if isinstance(value, dict) else [value]
                for text in several:
                    if isinstance(text, str) and text.strip().startswith(CHANGING):
                        found[f"{entry.name}.{name} {text[:40]!r}"] = text
    return found


def test_every_statement_that_changes_tables_has_a_form_for_clusters() -> None:
    found = changing_statements()

    assert {
        "rankscope.collector.retention.deletion",
        "rankscope.collector.retention.removal",
        "rankscope.collector.retention.retention",
    } <= {where.rpartition(".")[0] for where in (key.split()[0] for key in found)}
    for text in found.values():
        bound = dict.fromkeys(re.findall(r"\{(\w+):Identifier\}", text), "spans")
        assert all("ON CLUSTER `c1`" in said.sql for said in STATEMENTS.rewrite(text, bound))


def test_every_table_of_every_migration_is_local_and_distributed(cluster_store: Store) -> None:
    rows = cluster_store.rows("SELECT name, engine FROM system.tables WHERE database = 'default'")
    engines = {row["name"]: row["engine"] for row in rows if row["engine"] != "MaterializedView"}
    over = {name for name, engine in engines.items() if engine == "Distributed"}

    assert {f"{name}_local" for name in over} == engines.keys() - over
    assert all(engines[f"{name}_local"].endswith("MergeTree") for name in over)
    assert {"spans", "ledger", "attempts", "schema_version"} <= over


def test_the_ready_queries_of_the_documents_are_valid(cluster_store: Store) -> None:
    queries = ready_queries().values()
    assert [cluster_store.rows(sql, RUN) for sql in queries] == [[]] * len(queries)


COPY_SPANS = "SELECT * FROM spans WHERE run_id = {run_id:String}"
COUNT_COPIES = """
SELECT count() AS num_rows FROM spans_local WHERE run_id = {run_id:String} SETTINGS final = 0
"""


def store_run(store: Store, spool: Path, run_id: str) -> None:
    """Store 2 ranks of 3 steps with one span each."""
    for rank in range(2):
        builder = SpoolBuilder(spool, run_id=run_id, rank=rank)
        for step in range(3):
            builder.span("forward", step=step, start_ns=step * 1000)
            builder.step(step, start_ns=step * 1000, duration_ns=900)
        builder.end()
    SpoolTail(spool, StoreWriter(store)).poll()


def test_a_run_is_written_and_read_through_the_distributed_tables(
    cluster_store: Store, tmp_path: Path
) -> None:
    store_run(cluster_store, tmp_path, "once")

    (listed,) = [row for row in list_runs(cluster_store) if row["run_id"] == "once"]
    assert (listed["num_spans"], listed["num_steps"], listed["world_size"]) == (6, 3, 2)
    assert [row["rank"] for row in read_run(cluster_store, "once").ranks] == [0, 1]
    spans = read_spans(cluster_store, "once").select(["step", "rank"]).to_pylist()
    assert [(row["step"], row["rank"]) for row in spans] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)
    ]  # fmt: skip
    assert read_steps(cluster_store, "once", first=1, last=1).num_rows == 2


def test_rows_that_are_stored_twice_in_a_shard_are_read_once(
    cluster_store: Store, tmp_path: Path
) -> None:
    # GIVEN a run of six spans
    store_run(cluster_store, tmp_path, "twice")
    bound = {"run_id": "twice"}

    # WHEN they are inserted again, without an entry in the ledger
    cluster_store.insert_arrow("spans", cluster_store.arrow(COPY_SPANS, bound))

    # THEN the shard stores both copies, and queries return one
    assert cluster_store.rows(COUNT_COPIES, bound) == [{"num_rows": 12}]
    assert read_spans(cluster_store, "twice").num_rows == 6


def test_a_writer_finds_the_rows_that_another_stored_on_a_cluster(
    cluster_store: Store, tmp_path: Path
) -> None:
    store_run(cluster_store, tmp_path, "found")

    resumed = StoreWriter(cluster_store).resume("found")

    assert sorted(resumed.end_rows.values()) == [6, 6]
    assert resumed.unanswered == ()


def test_a_run_is_deleted_on_every_shard(cluster_store: Store, tmp_path: Path) -> None:
    store_run(cluster_store, tmp_path, "gone")

    Deletions(cluster_store).delete("gone")

    assert cluster_store.rows(COUNT_COPIES, {"run_id": "gone"}) == [{"num_rows": 0}]
    assert "gone" not in [row["run_id"] for row in list_runs(cluster_store)]


COUNT_FREED = """
SELECT count() AS n FROM system.mutations
WHERE table = 'spans_local' AND position(command, 'APPLY DELETED MASK') > 0
"""


def test_parts_are_rewritten_if_many_of_a_servers_rows_are_hidden(
    cluster_store: Store, tmp_path: Path
) -> None:
    # GIVEN a run whose rows are stored twice, with none hidden: there is nothing to do
    store_run(cluster_store, tmp_path, "hidden")
    cluster_store.insert_arrow("spans", cluster_store.arrow(COPY_SPANS, {"run_id": "hidden"}))
    apply_deleted_masks(cluster_store, ["spans"])  # of earlier tests
    wait_until_none_is_hidden(cluster_store)
    (before,) = cluster_store.rows(COUNT_FREED)
    apply_large_deleted_masks(cluster_store, ["spans"])
    assert cluster_store.rows(COUNT_FREED) == [before]

    # WHEN half of them are removed
    cluster_store.command("DELETE FROM spans WHERE run_id = 'hidden' AND rank = 1")
    apply_large_deleted_masks(cluster_store, ["spans"])

    (after,) = cluster_store.rows(COUNT_FREED)
    # A merge may have rewritten them already, so that nothing is hidden.
    assert after["n"] == before["n"] + 1 or num_hidden(cluster_store) == 0


def num_hidden(store: Store) -> int:
    (found,) = store.rows(
        "SELECT (SELECT sum(rows) FROM system.parts"
        " WHERE active AND database = currentDatabase() AND table = 'spans_local')"
        " - (SELECT count() FROM spans_local) AS n SETTINGS final = 0"
    )
    return int(found["n"])


def wait_until_none_is_hidden(store: Store) -> None:
    """Wait until no mutation is running and the parts show the freed rows."""
    running = "SELECT count() AS n FROM system.mutations WHERE NOT is_done"
    wait_until(lambda: store.rows(running) == [{"n": 0}] and num_hidden(store) == 0)
