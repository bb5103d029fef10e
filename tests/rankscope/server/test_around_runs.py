from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.report.report import Severity
from rankscope.analysis.trace.account import RecordAccount
from rankscope.analysis.trace.errors import EmptyRunError
from rankscope.collector.http.metrics import Metrics, Reading
from rankscope.commands.simulate import simulate_run
from rankscope.server.around_runs import compare_finished, read_startup, write_step_trace
from rankscope.server.health import HealthReader
from rankscope.simulation import SimulateOptions
from rankscope.sources.store_source import StoreSource
from tests.support.dashboard.builders import report
from tests.support.rankscope.rollup_runs import describe

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from rankscope.collector.store.store import Store

S = 1_000_000_000


def span(rank: int, name: str, *, start_s: int, seconds: int, step: int = -1) -> dict[str, object]:
    return {
        "run_id": "r", "epoch": 0, "step": step, "rank": rank, "start_ns": start_s * S,
        "duration_ns": seconds * S, "kind": "other", "name": name, "track": "main",
        "group_id": 0, "seq": -1, "src_rank": -1, "dst_rank": -1, "microbatch": -1, "chunk": -1,
        "depth": 0, "segment": 1, "row": start_s,
    }  # fmt: skip


def test_the_start_up_is_what_a_rank_did_before_its_first_step(empty_store: Store) -> None:
    # GIVEN rank 1 compiling for 30 s where rank 0 takes 5 s, and a save after the steps
    empty_store.insert_rows(
        "spans",
        [
            span(0, "import torch", start_s=1, seconds=4),
            span(0, "compile", start_s=6, seconds=5),
            span(0, "compile", start_s=9, seconds=1) | {"kind": "host"},  # still one rank
            span(1, "compile", start_s=6, seconds=30),
            span(1, "compile", start_s=6, seconds=30),  # sent twice
            span(1, "forward", start_s=50, seconds=1, step=0),
            span(1, "save", start_s=60, seconds=9),
        ],
    )
    empty_store.insert_rows(
        "steps",
        [{"run_id": "r", "epoch": 0, "step": 0, "rank": 1, "start_ns": 50 * S, "end_ns": 51 * S}],
    )
    empty_store.insert_rows("ranks", [{"run_id": "r", "epoch": 0, "rank": 1, "host": "node-1"}])

    found = read_startup(empty_store, "r")

    assert found is not None
    assert [
        (part.name, part.num_ranks, part.num_calls, part.longest_ns) for part in found.parts
    ] == [("compile", 2, 2, 30 * S), ("import torch", 1, 1, 4 * S)]
    slowest = found.slowest[0]
    assert (slowest.rank, slowest.host, slowest.total_ns) == (1, "node-1", 30 * S)
    assert found.slowest[1].total_ns == 10 * S
    assert read_startup(empty_store, "unknown") is None
    describe(empty_store, "r")
    assert '"name":"forward"' in write_step_trace(empty_store, "r", epoch=0, step=0, ranks=(1,))
    inside = write_step_trace(empty_store, "r", epoch=0, step=0, ranks=(), window_ns=(0, S // 2))
    assert '"name":"forward"' in inside
    with pytest.raises(EmptyRunError, match="no spans of these ranks and time"):
        write_step_trace(empty_store, "r", epoch=0, step=0, ranks=(), window_ns=(2 * S, 3 * S))


def test_two_reports_are_compared_with_what_appeared_and_disappeared(empty_store: Store) -> None:
    for run_id in ("a", "b"):
        describe(empty_store, run_id)

    found = compare_finished(
        StoreSource(empty_store), report(run="a", slow_rank=None), report(run="b")
    )

    assert [each.cause for each in found.appeared] == ["slow-compute", "stage-imbalance"]
    assert [each.cause for each in found.disappeared] == ["healthy"]
    assert found.remained == ()
    assert found.numbers[0].name == "step time, s"


def test_a_finding_that_became_minor_is_gone(empty_store: Store) -> None:
    for run_id in ("a", "b"):
        describe(empty_store, run_id)
    first = report(run="a")
    second = replace(
        first,
        run="b",
        findings=tuple(replace(one, severity=Severity.MINOR) for one in first.findings),
    )
    matters = {one.cause for one in first.findings if one.severity is not Severity.MINOR}

    found = compare_finished(StoreSource(empty_store), first, second)

    assert {one.cause for one in found.disappeared} == matters != set()
    assert {one.cause for one in found.remained}.isdisjoint(matters)


@pytest.mark.parametrize(("up", "problems"), [(1.0, 0), (0.0, 1)])
def test_a_loop_that_fails_is_a_problem_of_the_server(
    empty_store: Store, up: float, problems: int
) -> None:
    def readings() -> Iterable[Reading]:
        for name, value in (
            ("loop_up", up), ("loop_turns_total", 3.0), ("loop_failures_total", 0.0),
            ("loop_busy_seconds_total", 1.5),
        ):  # fmt: skip
            yield Reading(name=name, text="", label="loop", values={"tail": value})

    reader = HealthReader(
        empty_store, Metrics([readings]), read_account=RecordAccount, read_queue=lambda: 2
    )

    health = reader.read()

    loops, intake = health.sections[:2]
    assert loops.rows == (("tail", "works" if up else "fails", "3", "0", "1.50 s"),)
    assert ("analyses and drawings under way", "2") in intake.rows
    assert len([each for each in health.problems if "tail" in each]) == problems


@pytest.mark.multiproc
def test_the_tiles_of_a_large_step_load_no_pandas() -> None:
    # Plotly fails in a thread that draws while another one imports it.
    program = (
        "import sys, numpy as np; from rankscope.collector.read import pictures as p;"
        " cells = np.zeros((3, 8), np.int8);"
        " key = p.StepRevision(step_id=p.StepId(run_id='r', epoch=0, step=3), revision=7);"
        " level = p.PictureLevel(ordering='pp', line_ranks=2, zoom=1, depth=1);"
        " pixels = p.Pixels(first_line=0, rank_blocks=((0, 1), (2, 3), (4,)), compute_kind=cells,"
        " compute_ratio=cells.astype(np.float32), comm_kind=cells,"
        " comm_ratio=cells.astype(np.float32));"
        " rows = p.tile_rows(key, level, pixels, num_tiles=2);"
        " print(rows['ranks'].to_pylist(), {len(one) for one in rows['compute_kind'].to_pylist()});"
        " print('pandas' in sys.modules)"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout == "[[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]] {12}\nFalse\n"


@pytest.mark.multiproc
def test_a_comparison_of_a_page_loads_no_pandas(tmp_path: Path) -> None:
    # Plotly fails in a thread that draws while another one imports it.
    store = tmp_path / "store"
    for run, seed in (("one", 1), ("two", 2)):
        options = SimulateOptions(
            scenario="healthy", run_id=run, seed=seed, num_ranks=8, num_steps=4
        )
        simulate_run(replace(options, store_url=f"chdb://{store}"))
    program = (
        "import sys; from rankscope.analysis.analyze import analyze_run;"
        " from rankscope.collector.store.store import open_store;"
        " from rankscope.server.around_runs import compare_finished;"
        " from rankscope.sources.store_source import StoreSource;"
        f" source = StoreSource(open_store({f'chdb://{store}'!r}));"
        " found = compare_finished(source, *(analyze_run(source, run) for run in ('one', 'two')));"
        " print(len(found.numbers) > 5, 'pandas' in sys.modules)"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout == "True False\n"
