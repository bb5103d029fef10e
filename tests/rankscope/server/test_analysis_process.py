from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.report.exchange import write_report
from rankscope.analysis.trace.errors import EmptyRunError
from rankscope.collector.store.store import open_store
from rankscope.commands.simulate import simulate_run
from rankscope.dashboard.records.progress import Activity, Progress
from rankscope.errors import FailedError
from rankscope.server import analysis_process
from rankscope.server import reports as reports_module
from rankscope.server.analysis_process import analyze_elsewhere
from rankscope.server.reports import Reports
from rankscope.simulation import SimulateOptions
from rankscope.sources.store_source import StoreSource
from tests.integration.programs import serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from rankscope.analysis.report.report import RunReport

pytestmark = pytest.mark.multiproc
STEPS = 3
SIMULATED = SimulateOptions(scenario="slow-compute", run_id="slow", pp=2, tp=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a store with a small run and one of 300,000 spans."""
    store = tmp_path_factory.mktemp("served") / "store"
    options = replace(SIMULATED, store_url=f"chdb://{store}")
    simulate_run(replace(options, num_ranks=16, num_steps=STEPS))
    simulate_run(replace(options, run_id="large", num_ranks=64, num_steps=60))
    return store


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[RunReport]:
    """Serve the store; return the report that this process made of it before."""
    with open_store(f"chdb://{folder}") as store:
        expected = analyze_run(StoreSource(store), "slow", first=1)
    with serving(store=folder):
        yield expected


def test_what_the_other_process_raises_is_raised_here(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EmptyRunError):
        analyze_elsewhere(f"chdb://{folder}", "slow", first=STEPS, show=lambda _: None)
    with pytest.raises(FailedError, match="no run 'other'"):
        analyze_elsewhere(f"chdb://{folder}", "other", first=None, show=lambda _: None)


def test_only_large_runs_are_analysed_by_another_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[tuple[str, int | None]] = []

    with open_store(f"chdb://{folder}") as store:
        source = StoreSource(store)

        def analyze(
            run_id: str, *, first: int | None, show: Callable[[Progress], None]
        ) -> RunReport:
            show(Progress(activity=Activity.COMPARING, num_spans=7))
            progress.append(reports.progress(run_id))
            others.append((run_id, first))
            return analyze_run(source, run_id, first=first)

        progress: list[Progress | None] = []
        Reports(source, analyze_elsewhere=analyze).get("slow")
        assert others == []
        monkeypatch.setattr(reports_module, "MAX_OWN_SPANS", 100)
        reports = Reports(source, analyze_elsewhere=analyze)
        report = reports.get("slow")

    assert others == [("slow", None)]
    assert report is not None
    assert report.top_finding.cause == "slow-compute"
    assert progress == [Progress(activity=Activity.COMPARING, num_spans=7)]


def test_another_process_makes_the_same_report_of_a_store_that_is_served(
    folder: Path, served: RunReport
) -> None:
    shown: list[Progress] = []

    found = analyze_elsewhere(f"chdb://{folder}", "slow", first=1, show=shown.append)

    assert write_report(found) == write_report(served)
    assert found.steps == (1, 2)
    assert [each.activity for each in shown] == [Activity.READING, Activity.COMPARING]
    assert shown[-1].num_spans == found.num_spans


@pytest.mark.usefixtures("served")
def test_an_analysis_that_needs_too_much_memory_is_ended_and_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of 300,000 spans, an analysis takes some 240 MB beside the program's own 150.
    monkeypatch.setattr(analysis_process, "limit_bytes", lambda: 256 << 20)

    small = analyze_elsewhere(f"chdb://{folder}", "slow", first=None, show=lambda _: None)
    with pytest.raises(FailedError, match=r"large needs more than 0.2 GiB of memory, and was"):
        analyze_elsewhere(f"chdb://{folder}", "large", first=None, show=lambda _: None)

    assert len(small.steps) == STEPS
