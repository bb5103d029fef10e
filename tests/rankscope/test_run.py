from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest

import rankscope
from rankscope import Part, compare
from rankscope.analysis.trace.errors import EmptyRunError
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.store import open_store
from rankscope.collector.store.writer import StoreWriter
from rankscope.run import Run, open_run
from rankscope.sources.result_tables import table_html, with_steps
from rankscope.tracer.span import NONE, SpanFlag, SpanKind
from tests.support.collector.spool_builder import SpoolBuilder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

MS = 1_000_000
GROUP = 7


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the URL of a store that holds the runs of this module."""
    spool_dir, folder = tmp_path_factory.mktemp("spool"), tmp_path_factory.mktemp("store")
    for rank, compute in ((0, 60 * MS), (1, 100 * MS)):
        write_rank(spool_dir, rank, compute)
    write_ahead(spool_dir)
    with open_store(f"chdb://{folder}") as store:
        tail = SpoolTail(spool_dir, StoreWriter(store), grace_ns=0)
        tail.poll()
        tail.poll()
    return f"chdb://{folder}"


@pytest.fixture(scope="module")
def run(stored: str) -> Iterator[Run]:
    """Two ranks that compute 60 and 100 ms and then all-reduce for 10 ms, in each of two steps."""
    with open_run("r", store=stored) as opened:
        yield opened


def write_rank(spool_dir: Path, rank: int, compute: int) -> None:
    spool = SpoolBuilder(spool_dir, run_id="r", rank=rank)
    for step in (0, 1):
        begin = step * 200 * MS
        spool.span("forward", step=step, start_ns=begin, duration_ns=compute, chunk=0)
        spool.span(
            "all_reduce", step=step, kind=SpanKind.DP_COMM,
            start_ns=begin + compute, duration_ns=110 * MS - compute,
            comm=(GROUP, step, NONE, NONE, 1024, 0),
        )  # fmt: skip
        spool.step(step, start_ns=begin, duration_ns=110 * MS, num_tokens=8, loss=1.0)
    spool.group(GROUP, kind="dp-comm", name="dp", members=[0, 1])
    spool.end(at_ns=500 * MS)


def write_ahead(spool_dir: Path) -> None:
    """Write run ``ahead``: 60 ms of forward and 2 of optimizer a step, issued in 1 ms."""
    device = SpanFlag.DEVICE_BEGIN_KNOWN | SpanFlag.DEVICE_END_KNOWN
    spool = SpoolBuilder(spool_dir, run_id="ahead", world_size=1)
    for step in (0, 1):
        begin = (1 + 62 * step) * MS
        for kind, start, duration in (
            (SpanKind.FORWARD, begin, 60 * MS),
            (SpanKind.OPTIMIZER, begin + 60 * MS, 2 * MS),
        ):
            spool.span(
                kind.value, kind=kind, step=step, start_ns=start, duration_ns=duration, chunk=0,
                flags=device,
            )  # fmt: skip
        spool.step(step, start_ns=step * MS, duration_ns=MS)
    spool.end(at_ns=500 * MS)


def test_the_critical_path_runs_through_the_slow_rank(run: Run) -> None:
    path = run.critical_path(1)

    assert (path.step.tolist(), path.rank[0], path.end_ns.tolist()) == ([1, 1], 1, [1e8, 1.1e8])


def test_the_slack_of_the_fast_rank_is_its_wait(run: Run) -> None:
    found = run.slack(0)

    forward = found.kinds.index("forward")
    by_rank = {
        rank: found.slack_ns[(found.rank == rank) & (found.kind == forward)].tolist()
        for rank in (0, 1)
    }
    assert by_rank == {0: [40 * MS], 1: [0]}


def test_the_waterfall_is_that_of_the_report(run: Run) -> None:
    waterfall = run.waterfall()
    assert waterfall["rank"].to_pylist() == [0, 0, 1, 1]
    assert waterfall["waiting_ns"].to_pylist() == [40 * MS, 40 * MS, 0, 0]
    parts = [name for name in waterfall.column_names if name.endswith("_ns")][1:]
    total = np.sum([np.array(waterfall[name]) for name in parts], axis=0)
    assert total.tolist() == waterfall["total_ns"].to_pylist() == [110 * MS] * 4
    assert run.report.waterfall is not None
    assert run.report.waterfall.mean_ratio["waiting"] == 80 / 440


def test_the_waterfall_of_a_host_that_runs_ahead_covers_the_steps_of_the_device(
    run: Run, stored: str
) -> None:
    # GIVEN a host that issues each step in 1 ms, and a device that takes 62 (`write_ahead`)
    with open_run("ahead", store=stored) as opened:
        waterfall = opened.waterfall()

    # THEN each step has the time of the device, and all of it is compute
    assert waterfall["total_ns"].to_pylist() == [62 * MS, 62 * MS]
    assert waterfall["useful_compute_ns"].to_pylist() == [62 * MS, 62 * MS]


def test_the_tables_are_data_frames_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run.df.waits().equals(run.waits().to_pandas())
    assert run.df.spans(1, ranks=0)["rank"].tolist() == [0, 0]
    assert {"steps", "communications", "waits"} < set(dir(run.df))
    with pytest.raises(
        AttributeError, match="'report' is no table of a run: findings, spans, steps, "
    ):
        run.df.report  # noqa: B018

    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "rankscope\[notebook\]"'):
        run.df.steps()


def test_communications_of_several_steps_are_those_of_each(run: Run) -> None:
    both = run.communications((0, 9))

    assert both.equals(pa.concat_tables([run.communications(0), run.communications(1)]))
    assert both["step"].to_pylist() == [0, 0, 1, 1]
    with pytest.raises(EmptyRunError, match=r"no spans of steps \(7, 9\)"):
        run.communications((7, 9))


def test_the_figures_are_those_of_the_pages_or_none(run: Run) -> None:
    names = [name for name in dir(run) if name.startswith("figure_")]
    needed = dict.fromkeys(("figure_rank", "figure_place", "figure_waits", "figure_timeline"), (1,))
    drawn = {name: getattr(run, name)(*needed.get(name, ())) for name in names}

    # No pair sends, no span is outside of the steps, and no finding of the two ranks has a proof.
    assert {name for name, figure in drawn.items() if figure is None} <= {
        "figure_links",
        "figure_proof",
        "figure_start_up",
    }
    assert all(figure.data for figure in drawn.values() if figure is not None)
    assert "heatmap" in {one.type for one in drawn["figure_ranks"].data}
    bars = [one for one in drawn["figure_timeline"].data if one.orientation == "h"]
    assert sum(len(trace.x) for trace in bars) >= len(run.timeline(1).spans)
    assert run.figure_rank(7) is None


def test_fixing_the_slow_rank_recovers_all_lost_time(run: Run) -> None:
    picked = run.what_if(Part(rank=1))
    masked = run.what_if(run.reading.model.rank == 1)

    # The ideal forward takes the mean of both ranks, 80 ms.
    assert picked.step_ns.tolist() == [90 * MS, 90 * MS]
    assert picked.recoverable_ratio == masked.recoverable_ratio == 1.0
    assert run.what_if(Part(group=GROUP)).recoverable_ratio == 0.0


def test_the_ideal_timeline_has_recorded_and_ideal_times(run: Run) -> None:
    found = run.ideal_timeline(1)

    assert (found.actual_ns, found.ideal_ns) == (110 * MS, 90 * MS)
    forward = found.kind == found.kinds.index("forward")
    assert found.end_ns[forward].tolist() == [60 * MS, 100 * MS]
    assert found.ideal_end_ns[forward].tolist() == [80 * MS, 80 * MS]


def test_a_graph_holds_the_requested_steps_and_ranks(run: Run) -> None:
    graph = run.graph([0, 1], ranks=[1])

    nodes = [node for _, node in graph.nodes(data=True)]
    assert {node["rank"] for node in nodes} == {1}
    assert np.unique([node["step"] for node in nodes]).tolist() == [0, 1]


def test_the_slow_rank_has_the_largest_slowdown(run: Run) -> None:
    # The ideal step takes 80 + 10 ms; with the recorded rank 1 it takes 100 + 10 ms.
    assert run.slowdown_by_rank == {0: 1.0, 1: 110 / 90}
    assert list(run.slowdown_by_tp) == [0]
    assert set(run.slowdown_by_host.values()) == {110 / 90}


def test_the_spans_of_one_rank_and_kind_are_one_line(run: Run) -> None:
    spans = run.spans(1, ranks=1, kinds="forward")

    assert spans.select(["step", "rank", "kind", "duration_ns"]).to_pylist() == [
        {"step": 1, "rank": 1, "kind": "forward", "duration_ns": 100 * MS}
    ]
    found = run.spans(), run.spans((0, 1)), run.spans(ranks=(0, 7))
    assert [table.num_rows for table in found] == [8, 8, 4]


def test_steps_have_their_times_tokens_and_loss(run: Run) -> None:
    steps = run.steps().to_pylist()

    assert [row["actual_s"] for row in steps] == [0.11, 0.11]
    assert [(row["ideal_s"], row["loss"]) for row in steps] == [(0.09, 1.0)] * 2
    assert [row["slowdown"] for row in steps] == pytest.approx([11 / 9] * 2)
    # A step begins with its first rank.
    begins = run.rank_steps()["start_ns"].to_pylist()
    assert ([row["start_ns"] for row in steps], len(begins)) == (begins[::2], 4)
    # Both ranks are positions of their own: 8 tokens each.
    assert steps[0]["num_tokens"] == 16


def test_ranks_and_waits_name_the_rank_that_others_wait_for(run: Run) -> None:
    slowest = run.ranks().sort_by([("slowdown", "descending")]).to_pylist()[0]
    assert (slowest["rank"], slowest["dp"]) == (1, 1)

    assert run.waits().to_pylist() == [
        {"rank": 0, "on_rank": 1, "on_link": None, "ratio": 40 / 110}
    ]


def test_the_times_of_a_step_by_kind(run: Run) -> None:
    rows = {(row["rank"], row["kind"]): row for row in run.kind_times(0).to_pylist()}

    assert rows[0, "forward"]["busy_ns"] == 60 * MS
    assert (rows[0, "dp-comm"]["wait_ns"], rows[0, "dp-comm"]["transfer_ns"]) == (40 * MS, 10 * MS)


def test_the_communications_of_a_step_have_their_waits_and_who_came_last(run: Run) -> None:
    rows = run.communications(0).to_pylist()

    columns = ("rank", "kind", "seq", "wait_ns", "transfer_ns", "last_rank")
    assert [tuple(row[name] for name in columns) for row in rows] == [
        (0, "dp-comm", 0, 40 * MS, 10 * MS, 1),
        (1, "dp-comm", 0, 0, 10 * MS, 1),
    ]


def test_findings_events_settings_and_samples_are_tables(run: Run) -> None:
    assert run.findings()["cause"].to_pylist() == [each.cause for each in run.report.findings]
    assert {row["kind"] for row in run.events().to_pylist()} == {"exit"}
    assert {row["num_ranks"] for row in run.settings().to_pylist()} <= {1, 2}
    assert run.samples().column_names == run.samples("gpu-clock-hz").column_names


def test_a_query_has_parameters_and_returns_a_table(stored: str) -> None:
    sql = "SELECT uniqExact(rank) AS ranks FROM spans WHERE run_id = {run:String}"

    assert rankscope.query(sql, store=stored, run="r").to_pylist() == [{"ranks": 2}]


def test_a_sample_has_the_step_that_had_begun_last(run: Run) -> None:
    steps = run._source.steps("r")
    at_ns = [int(steps.start_ns.min()) - 1, int(steps.start_ns.min()), int(steps.end_ns.max())]

    found = with_steps(pa.table({"at_ns": at_ns}), steps)

    assert found["step"].to_pylist() == [None, 0, 1]


def test_a_cell_of_a_notebook_shows_the_verdict_and_escapes_names(run: Run) -> None:
    html = run._repr_html_()

    assert run.report.findings[0].cause in html
    assert "<script" not in html


def test_tables_and_comparisons_are_shown_as_escaped_html(stored: str) -> None:
    html = table_html(pa.table({"<b>": ["<script>", None], "value": [1 / 3, 2.0]}))

    assert html == (
        "<table><tr><th>&lt;b&gt;</th><th>value</th></tr>"
        "<tr><td>&lt;script&gt;</td><td>0.3333</td></tr><tr><td></td><td>2</td></tr></table>"
        "<p>2 rows, 2 columns</p>"
    )
    html = compare("r", "ahead", store=stored)._repr_html_()
    assert "ahead against r: a step is 44 % faster" in html


def test_runs_are_listed(stored: str) -> None:
    found = rankscope.runs(store=stored)

    rows = {row["run"]: row for row in found.to_pylist()}
    assert {*rows} == {"ahead", "r"}
    assert (rows["r"]["num_steps"], rows["r"]["world_size"]) == (2, 2)


def test_two_runs_are_compared_by_number_and_finding(stored: str) -> None:
    found = compare("r", "ahead", store=stored)

    numbers = {row["quantity"]: row for row in found.numbers().to_pylist()}
    assert numbers["step time, s"]["first"] == 0.11
    assert numbers["step time, s"]["second"] == 0.062
    assert numbers["ranks"]["ratio"] == 0.5
    assert {row["of"] for row in found.findings().to_pylist()} == {"first", "second"}
    assert "a step is 44 % faster" in repr(found)


def test_the_package_names_its_entry_points_and_no_others() -> None:
    assert {name for name in dir(rankscope) if name in rankscope.__all__} == {*rankscope.__all__}
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = rankscope.no_such_thing


def test_each_table_is_a_frame_of_polars_with_the_same_rows(run: Run, stored: str) -> None:
    polars = pytest.importorskip("polars", reason="polars is not installed: 180 MB for one test")
    needed = {"kind_times": (1,), "communications": (1,)}
    tables = {name: getattr(run, name)(*needed.get(name, ())) for name in dir(run.df)}
    tables |= {
        "runs": rankscope.runs(store=stored),
        "query": rankscope.query("SELECT * FROM spans FINAL", store=stored),
        "numbers": compare("r", "ahead", store=stored).numbers(),
    }

    for name, table in tables.items():
        frame = polars.from_arrow(table)
        assert frame.to_dicts() == table.to_pylist(), name
        assert frame.columns == table.column_names, name
