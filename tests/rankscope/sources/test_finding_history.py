"""Recurrence of findings over simulated runs in one store whose hosts are exchanged."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.collector.store.store import open_store
from rankscope.commands.analyze import AnalyzeOptions, analyze_stored
from rankscope.commands.runs import list_findings
from rankscope.server.finding_tracker import LiveFindings
from rankscope.simulation import store_simulation
from rankscope.sources.store_source import StoreSource
from rankscope.tracer.span import NONE
from rankscope.trainer.faults.spec import parse_simulated_faults
from rankscope.trainer.simulator.scenario import Scenario
from rankscope.trainer.simulator.simulation import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from rankscope.collector.store.store import Store

RANKS_PER_HOST = 2
SCENARIO = Scenario(dp=8, pp=1, tp=1, num_steps=8, ranks_per_host=RANKS_PER_HOST)
"""Four hosts, sim-00000 to sim-00003, of two data-parallel positions each."""


def forget_layout(store: Store, run_id: str) -> None:
    """Turn a run into one whose job declared no layout."""
    unknown = dict.fromkeys(("dp", "tp", "pp", "cp", "ep"), NONE)
    replace_rows(store, "runs", run_id, lambda row: row | {"layout": {}})
    replace_rows(store, "ranks", run_id, lambda row: row | unknown)


def replace_rows(
    store: Store, table: str, run_id: str, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    sql = f"SELECT * FROM {table} FINAL WHERE run_id = {{run_id:String}}"
    rows = store.rows(sql, {"run_id": run_id})
    store.insert_rows(table, [change(row) | {"revision": row["revision"] + 1} for row in rows])


def store_run_with_findings(
    store: Store, run_id: str, *, slow: int, moved: Mapping[str, str], has_layout: bool = True
) -> list[str]:
    """Simulate a run with a slow rank and renamed hosts, and store its findings.

    Returns:
        The logged lines.
    """
    faults = parse_simulated_faults([f"slow-compute:rank={slow},factor=1.5"])
    simulation = simulate(replace(SCENARIO, faults=faults), run_id=run_id)
    store_simulation(store, simulation, simulation.tables())
    replace_rows(
        store, "ranks", run_id, lambda row: row | {"host": moved.get(row["host"], row["host"])}
    )
    if not has_layout:
        forget_layout(store, run_id)
    report = analyze_run(StoreSource(store), run_id)
    assert [(finding.cause, finding.ranks) for finding in report.findings] == [
        ("slow-compute", (slow,))
    ]
    lines: list[str] = []
    LiveFindings(store, say=lines.append).update(report, is_over=True, cost=None)
    return lines


EXCHANGED = {"sim-00001": "sim-00003", "sim-00003": "sim-00001"}


def follows(url: str, run_id: str) -> dict[str, str | None] | None:
    text = analyze_stored(AnalyzeOptions(run_id=run_id, as_json=True, store_url=url))
    (finding,) = json.loads(text)["findings"]
    found: dict[str, str | None] | None = finding["follows"]
    return found


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a store with the run ``first``, whose rank 2, on host 1, is slow."""
    folder = tmp_path_factory.mktemp("kept") / "store"
    with open_store(f"chdb://{folder}") as store:
        (_,) = store_run_with_findings(store, "first", slow=2, moved={})
    return folder


@pytest.fixture
def url(kept: Path, tmp_path: Path) -> str:
    """Return the URL of a copy of `kept`."""
    return f"chdb://{shutil.copytree(kept, tmp_path / 'store', symlinks=True)}"


@pytest.mark.slow
@pytest.mark.parametrize("slow", [5, pytest.param(2, marks=pytest.mark.nightly)])
def test_without_a_layout_nothing_is_known_about_recurrence(url: str, slow: int) -> None:
    with open_store(url) as store:
        forget_layout(store, "first")
        store_run_with_findings(
            store, "second", slow=slow, moved={"sim-00001": "new"}, has_layout=False
        )

    assert follows(url, "second") is None


@pytest.mark.slow
def test_slowness_that_moved_with_its_host_follows_the_host(url: str) -> None:
    # GIVEN rank 2 slow on host 1, and in the next run rank 6, which host 1 now has
    with open_store(url) as store:
        _, line = store_run_with_findings(store, "second", slow=6, moved=EXCHANGED)

    assert line.startswith(
        "second: slow-compute on rank 6 since step 0: it follows the host: host sim-00001 was also"
        " named"
    )
    assert follows(url, "second") == {
        "what": "host",
        "evidence": "host sim-00001 was also named in run first (epoch 0), at another position:"
        " (dp 2, pp 0, tp 0) there, (dp 6, pp 0, tp 0) here, on the same device (local rank 0)",
    }
    text = analyze_stored(AnalyzeOptions(run_id="second", as_json=False, store_url=url))
    assert "it follows the host: host sim-00001 was also named in run first" in text
    listed = list_findings("second", as_json=False, store_url=url)
    assert listed.splitlines()[1].endswith("the host")


@pytest.mark.slow
def test_slowness_that_stayed_while_the_host_moved_follows_the_position(url: str) -> None:
    with open_store(url) as store:
        store_run_with_findings(store, "second", slow=2, moved=EXCHANGED)

    found = follows(url, "second")

    assert found is not None
    assert found["what"] == "position"
    documents = json.loads(list_findings(None, as_json=True, store_url=url))["findings"]
    assert {document["follows"]["what"] for document in documents} == {"position"}


@pytest.mark.slow
def test_a_first_finding_has_no_recurrence(url: str) -> None:
    assert follows(url, "first") is None
