"""Kernels and device time of an imported profile: in the store, reports, comparisons, pages."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import rankscope
from rankscope.analysis.report.document import to_document
from rankscope.analysis.report.exchange import read_report, write_report
from rankscope.collector.importers.spool_folder import Process, Record, write_process
from rankscope.commands.analyze import AnalyzeOptions, analyze_stored
from rankscope.commands.compare import compare_stored, format_comparison
from rankscope.commands.import_trace import import_files
from rankscope.dashboard.address import View
from rankscope.dashboard.pages import compare, overview
from rankscope.server.around_runs import compare_finished
from rankscope.server.rank_view import RankView
from rankscope.sources.store_source import StoreSource
from tests.support.collector.kineto_builder import TraceBuilder
from tests.support.dashboard.builders import FakeProvider
from tests.support.dashboard.page_text import rendered, words

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.analysis.report.report import RunReport
    from rankscope.collector.store.store import Store

SHAPES = {
    "Input Dims": [[1024, 1024], [1024, 1024]],
    "Input type": ["c10::BFloat16", "c10::BFloat16"],
}
EVERY_STEP = ((None, None), (None, None))


def profile(folder: Path, *, world_size: int, is_fused: bool) -> Path:
    """Write traces of one rank with a matrix product, and three small kernels or one."""
    folder.mkdir()
    trace = TraceBuilder(0, world_size)
    for step in range(4):
        begin = 20 * step
        trace.step(step, begin, begin + 19.9)
        trace.add("aten::mm", "cpu_op", begin + 0.1, begin + 0.2, tid=100, **SHAPES)
        trace.kernel("gemm", begin + 1, begin + 5, launch=begin + 0.15)
        for number in range(1 if is_fused else 3):
            at = begin + 5 + number
            trace.kernel("fused" if is_fused else "add", at, at + 1, launch=begin + 0.3)
        trace.backward(begin + 0.5, begin + 0.9)
        trace.kernel("gemm_backward", begin + 8, begin + 14, launch=begin + 0.6, tid=200)
        trace.comm("allreduce", begin + 13, begin + 15, launch=begin + 0.8, tid=200)
        trace.kernel("adamw", begin + 15, begin + 17, launch=begin + 0.95)
    trace.write(folder)
    return folder


@pytest.fixture(scope="module")
def profiles(store: Store, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the URL of a store with a job before and after a fusion, of one rank each.

    The others of run ``alone`` are missing, so it has no step that can be replayed.
    """
    folder = tmp_path_factory.mktemp("profiles")
    for name, world_size, is_fused in (
        ("eager", 1, False),
        ("fused", 1, True),
        ("alone", 4, False),
    ):
        path = profile(folder / name, world_size=world_size, is_fused=is_fused)
        for _ in range(2):  # the second time, nothing is written
            import_files([path], file_format="kineto", run_id=name, meta=None, store_url=store.url)
    return store.url


def document(url: str, run_id: str) -> dict[str, Any]:
    text = analyze_stored(AnalyzeOptions(run_id=run_id, as_json=True, store_url=url))
    found: dict[str, Any] = json.loads(text)
    return found


def report_of(url: str, run_id: str) -> RunReport:
    with rankscope.open_run(run_id, store=url) as run:
        return run.report


def test_each_kernel_is_stored_once_by_step_and_phase(profiles: str) -> None:
    with rankscope.open_run("eager", store=profiles) as run:
        kernels = run.kernels()

    own = [row for row in kernels.to_pylist() if row["step"] == 2]
    assert [(row["phase"], row["name"], row["num"], row["total_ns"] / 1e6) for row in own] == [
        ("backward", "gemm_backward", 1, 6), ("forward", "gemm", 1, 4), ("forward", "add", 3, 3),
        ("backward", "ncclDevKernel_allreduce", 1, 2), ("optimizer", "adamw", 1, 2),
    ]  # fmt: skip
    assert kernels.num_rows == 4 * len(own)


@pytest.mark.parametrize("run_id", ["eager", "alone"])
def test_a_rank_alone_has_its_breakdown_without_a_replay(run_id: str, profiles: str) -> None:
    found = document(profiles, run_id)

    parts = found["device_time"]["by_rank_s"]["0"]
    whole_s = {name: round(1e3 * seconds, 3) for name, seconds in parts.items() if seconds}
    assert whole_s == {
        "compute": 15.0, "exposed dp-comm": 1.0, "idle, launch": 3.07, "idle, unknown": 0.83,
    }  # fmt: skip
    busiest = found["kernels"][0]
    assert (busiest["name"], busiest["seconds"]) == ("gemm_backward", pytest.approx(0.006))
    gemm = next(kernel for kernel in found["kernels"] if kernel["name"] == "gemm")
    assert gemm["flops_per_s"] == pytest.approx(2 * 1024**3 / 0.004)
    assert gemm["flops_ratio"] == pytest.approx(gemm["flops_per_s"] / 989.4e12, rel=1e-3)


def test_a_long_list_of_kernels_is_stored_whole(store: Store, tmp_path: Path) -> None:
    names = [f"kernel {number}" for number in range(2_000)]  # a poll takes some 200 lines
    row = {
        "step": 0, "phase": "forward", "stream": "compute", "num": 1, "num_names": 1,
        "total_ns": 5, "max_ns": 5, "flops": None, "num_bytes": None, "dtype": "",
    }  # fmt: skip
    process = Process(run_id="long", rank=0, world_size=1, host="", manifest={}, groups={})
    process.records.append(Record(None, "", "compute", 0, 10**18, 10**18 + 60))
    process.kernels += [{"name": name, **row} for name in names]
    process.events += [
        {"at_ns": 10**18, "kind": "other", "text": str(number)} for number in range(2_000)
    ]
    write_process(tmp_path, process)

    import_files([tmp_path], file_format="rankscope", run_id="long", meta=None, store_url=store.url)

    with rankscope.open_run("long", store=store.url) as run:
        assert {row["name"] for row in run.kernels().to_pylist()} == set(names)
        assert run.events().num_rows == 2_001  # and its exit
    (found,) = store.rows("SELECT state FROM runs FINAL WHERE run_id = 'long'")
    assert found["state"] == "ended"


def test_the_text_has_device_time_and_kernels(profiles: str) -> None:
    text = analyze_stored(AnalyzeOptions(run_id="alone", store_url=profiles))

    lines = [line.split() for line in text.splitlines()]
    assert ["compute", "15.0", "ms", "75.4", "%", "78.9", "%"] in lines
    assert ["gemm_backward", "backward", "1", "6.00", "ms"] in lines


def test_a_report_with_kernels_reads_back_equal(profiles: str) -> None:
    report = report_of(profiles, "eager")

    assert to_document(read_report(write_report(report))) == to_document(report)


def test_a_comparison_lists_what_a_fusion_changed(profiles: str) -> None:
    comparison = compare_stored(("eager", "fused"), EVERY_STEP, store_url=profiles)
    text = format_comparison(comparison, as_json=False)
    table = rankscope.compare("eager", "fused", store=profiles).kernels().to_pylist()

    assert [(row["name"], row["change"], row["first_num"], row["second_num"]) for row in table] == [
        ("add", "gone", 3.0, None),
        ("fused", "new", None, 1.0),
    ]
    lines = [line.split() for line in text.splitlines()]
    changed = next(line for line in lines if line[:2] == ["forward", "gone"])
    row = lines.index(changed)
    assert changed[2:] == ["3", "->", "0", "3.00", "ms", "->", "0", "ns", "-3.00", "ms"]
    assert lines[row + 1] == ["add"]


def test_pages_show_device_time_kernels_and_what_differs(profiles: str, store: Store) -> None:
    eager, fused = (report_of(profiles, name) for name in ("eager", "fused"))
    source = StoreSource(store)
    provider = FakeProvider(
        reports={"eager": eager, "fused": fused}, compared=compare_finished(source, eager, fused)
    )

    page = words(rendered(overview.PAGE, provider, View(run="eager")))
    both = words(rendered(compare.PAGE, provider, View(page="compare", run="fused")))
    details = RankView(source, store).rank_details(eager, 0)

    assert "compute | 75.4 % | 15.0 ms" in page
    assert "gemm_backward | backward | 1 | 6.00 ms | n/a" in page
    assert "add | forward | gone | 3 -> 0 | 3.00 ms -> 0 ns | -3.00 ms" in both
    assert details is not None
    assert details.kernels == eager.kernels
