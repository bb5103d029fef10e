"""docs/sql.md: its tables are those of the store, and its queries answer."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.collector.gateway import QueryEngine, QueryRequest
from rankscope.collector.read.alerts import StoredAlert, write_alert, write_resolution
from rankscope.commands.simulate import simulate_run
from rankscope.run import open_run
from rankscope.server.finding_tracker import LiveFindings
from rankscope.simulation import SimulateOptions
from tests.support.paths import ROOT
from tests.support.rankscope.rollup_runs import untimed_rollups

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store

    Rows = list[dict[str, Any]]

PAGE = ROOT / "docs" / "sql.md"

QUERY = re.compile(r"^### ([^\n]*)\n.*?^```sql\n(.*?)^```", re.MULTILINE | re.DOTALL)
RUN = {"run": "slow", "other": "before"}
SLOW_RANK = 1

SELECT_TABLES = """
SELECT name, comment FROM system.tables
WHERE database = currentDatabase() AND engine != 'MaterializedView' ORDER BY name
"""
SELECT_COLUMNS = """
SELECT table, name, type, comment FROM system.columns
WHERE database = currentDatabase() AND table NOT LIKE '%\\_to\\_%'
ORDER BY table, position
"""


def tables_text(store: Store) -> str:
    """Return the part of the page on tables and columns, as the comments in the store say."""
    columns = store.rows(SELECT_COLUMNS)
    parts = []
    for table in store.rows(SELECT_TABLES):
        lines = [f"### {table['name']}", "", f"{table['comment']}.", ""]
        lines += ["| column | type | meaning |", "| --- | --- | --- |"]
        lines += [
            f"| `{one['name']}` | `{short_type(one['type'])}` | {one['comment']} |"
            for one in columns
            if one["table"] == table["name"]
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def short_type(name: str) -> str:
    """Return a type without the way in which it is stored."""
    return re.sub(r"LowCardinality\((\w+)\)", r"\1", name)


@pytest.mark.slow
def test_the_page_has_each_table_and_column_as_the_store_describes_it(store: Store) -> None:
    described = [*store.rows(SELECT_TABLES), *store.rows(SELECT_COLUMNS)]
    assert [one for one in described if not one["comment"]] == []

    text = PAGE.read_text(encoding="utf-8").split("\n## Tables\n\n", 1)[1]
    assert text == tables_text(store)


def ready_queries() -> dict[str, str]:
    return dict(QUERY.findall(PAGE.read_text(encoding="utf-8").split("\n## Tables\n")[0]))


@pytest.fixture(scope="module")
def run_store(store: Store) -> Store:
    """Return the store with a run of 8 ranks, of which rank 1 is slow, and its rollups."""
    simulate_run(
        SimulateOptions(
            scenario="healthy",
            run_id="slow",
            num_ranks=8,
            num_steps=6,
            seed=1,
            faults=(f"slow-compute:rank={SLOW_RANK},factor=1.6",),
            store_url=store.url,
        )
    )
    untimed_rollups(store).turn()
    store.insert_rows(
        "manifests",
        [
            {"run_id": run_id, "manifest_hash": str(k), "settings": {"NCCL_ALGO": algo, "A": "b"}}
            for k, (run_id, algo) in enumerate(
                (("slow", "Tree"), ("slow", "Ring"), ("before", "Ring"))
            )
        ],
    )
    with open_run("slow", store=store.url) as run:
        LiveFindings(store).update(run.report, is_over=False, cost=None)
    alerts = [
        StoredAlert(
            run_id="slow", at_ns=1_000 + k, rule="loss", key=str(k), severity="warning",
            first_step=2, last_step=3, text="the loss is no number",
        )
        for k in range(2)
    ]  # fmt: skip
    for alert in alerts:
        write_alert(store, alert)
    write_resolution(store, replace(alerts[0], resolved_ns=2_000))
    return store


@pytest.fixture(scope="module")
def answers(run_store: Store) -> dict[str, Rows]:
    return {title: run_store.rows(sql, RUN) for title, sql in ready_queries().items()}


@pytest.mark.slow
def test_the_ready_queries_agree_with_the_report(
    run_store: Store, answers: dict[str, Rows]
) -> None:
    assert len(answers) == 15
    with open_run("slow", store=run_store.url) as run:
        steps = run.steps().to_pylist()
        waits = run.kind_times(3).to_pylist()
        known = {one.kind: one for one in run.report.bandwidth}

    times = [row["step_s"] for row in answers["How long is each step of the job?"]]
    assert times == pytest.approx([row["actual_s"] for row in steps])
    progress = answers["How do loss and throughput develop?"]
    assert [row["num_tokens"] for row in progress] == [row["num_tokens"] for row in steps]
    slow, second = answers["Which ranks compute longer than the others of their stage?"][:2]
    assert slow["rank"] == SLOW_RANK
    assert slow["ratio"] > 1.3 > second["ratio"]
    assert answers["For which rank do the others wait?"][0]["last_rank"] == SLOW_RANK
    costs = answers["What does communication cost each rank?"]
    assert {row["kind"] for row in costs} == {row["kind"] for row in waits if "-" in row["kind"]}
    assert len(answers["Did a device clock fall while the run trained?"]) == 8
    speeds = answers["How fast is each link and group?"]
    assert {row["src_rank"] >= 0 for row in speeds} == {True, False}
    p2p = [row["median_gb_per_s"] for row in speeds if row["src_rank"] >= 0]
    assert fmean(p2p) == pytest.approx(known["pp-send"].algorithm_bytes_per_s / 1e9, rel=0.1)
    (host,) = answers["Which hosts were named most often, over all runs?"]
    assert (host["host"], host["times"], host["causes"]) == ("sim-00000", 1, ["slow-compute"])
    alerts = answers["Which alerts were raised, and which are active?"]
    assert [(row["alert_key"], row["is_active"]) for row in alerts] == [("1", 1), ("0", 0)]
    settings = {
        row["setting"]: row for row in answers["Which settings differ from those of another run?"]
    }
    assert settings["NCCL_ALGO"]["before"] == ["Ring"]
    assert settings["NCCL_ALGO"]["now"] == ["Ring", "Tree"]
    assert "A" not in settings  # it is equal


@pytest.mark.slow
def test_the_gateway_answers_each_ready_query(run_store: Store) -> None:
    if run_store.path is None:
        pytest.skip("the gateway serves the embedded store only")
    engine = QueryEngine(run_store.path)
    try:
        for sql in ready_queries().values():
            request = QueryRequest(text=sql, parameters=RUN)
            assert asyncio.run(engine.answer(request)).view is not None
    finally:
        engine.close()
