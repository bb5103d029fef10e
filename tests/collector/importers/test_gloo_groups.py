"""Groups of gloo's communication in profiles, by the threads that it runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.collector.importers.kineto import read_traces
from rankscope.tracer.span import SpanKind
from tests.support.collector.kineto_builder import MAIN, TraceBuilder

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.collector.importers.spool_folder import Process

NUM_STEPS, LENGTH = 6, 10.0
TP_END = {0: 1.2, 1: 1.2, 2: 3.2, 3: 3.2}
DP_END = {0: 3.5, 2: 3.5, 1: 4.2, 3: 4.2}


def job(folder: Path, *, is_clear: bool = True) -> list[Process]:
    """Return the processes of 4 ranks, dp 2 x tp 2; rank 2 computes 3 ms in a step, the others 1.

    Each group has two threads, which take turns. That of all ranks communicates nothing.

    Args:
        folder: Of the files.
        is_clear: Whether the two data-parallel groups communicate at different times.
    """
    folder.mkdir()
    for rank in range(4):
        dp, tp = (rank % 2, rank % 2 + 2), (rank // 2 * 2, rank // 2 * 2 + 1)
        groups = {
            "0": ("default_pg", (0, 1, 2, 3)),
            f"{dp}": ("mesh_dp", dp),
            f"{tp}": ("mesh_tp", tp),
        }
        trace = TraceBuilder(rank, 4, groups=groups)
        trace.backend = "gloo"
        for step in range(NUM_STEPS):
            at, turn, computed = LENGTH * step, step % 2, 3.0 if rank == 2 else 1.0
            tp_end = TP_END[rank]
            dp_begin, dp_end = tp_end + 0.1, DP_END[rank] if is_clear else 3.5
            if is_clear and rank % 2:
                dp_begin = 4.0
            thread = 1000 + 10 * rank + turn
            trace.add("aten::mm", "cpu_op", at, at + computed, tid=MAIN)
            # GIVEN an operator of the job's own that waits for what it calls
            trace.add("Reduce", "cpu_op", at + computed, at + tp_end, tid=MAIN)
            call = at + computed
            trace.add("c10d::allreduce_", "cpu_op", call, call + 0.01, tid=MAIN)
            trace.add(
                "gloo:all_reduce", "user_annotation", call + 0.005, at + tp_end, tid=thread + 2
            )
            trace.add("aten::add", "cpu_op", at + tp_end, at + dp_begin, tid=MAIN)
            trace.add("gloo:all_reduce", "user_annotation", at + dp_begin, at + dp_end, tid=thread)
            trace.add("aten::div", "cpu_op", at + dp_end, at + dp_end + 0.1, tid=MAIN)
            trace.step(step, at, at + 9.9)
        trace.write(folder)
    return list(read_traces(sorted(folder.iterdir()), "run"))


def axes(process: Process) -> list[str]:
    calls = [
        each for each in process.records if each.comm is not None and each.kind is not SpanKind.WAIT
    ]
    return [each.comm.axis for each in sorted(calls, key=lambda each: each.start_ns) if each.comm]


def test_the_group_of_a_thread_follows_from_the_other_members(tmp_path: Path) -> None:
    processes = job(tmp_path / "traces")

    for process in processes:
        assert axes(process) == ["tp", "dp"] * NUM_STEPS
        assert not process.notes


def test_groups_that_several_assignments_explain_stay_unknown(tmp_path: Path) -> None:
    # GIVEN data-parallel groups that communicate at once, which may be one group of all ranks
    processes = job(tmp_path / "traces", is_clear=False)

    for process in processes:
        assert set(axes(process)) == {""}
        (note,) = process.notes
        assert "the process group of communication is unknown" in note


def test_an_operator_that_waits_for_its_communication_does_not_compute(tmp_path: Path) -> None:
    third = job(tmp_path / "traces")[3]

    forwards = sorted(
        (each for each in third.records if each.kind is SpanKind.FORWARD),
        key=lambda each: each.start_ns,
    )
    origin_ns = forwards[0].start_ns
    waits = [
        ((each.start_ns - origin_ns) / 1e6, (each.end_ns - origin_ns) / 1e6, each.comm.axis)
        for each in third.records
        if each.kind is SpanKind.WAIT and each.comm and each.start_ns - origin_ns < LENGTH * 1e6
    ]
    # It called the all-reduce of its tensor-parallel group at 1.0, and rank 2 did at 3.0.
    assert waits == [(1.01, 3.2, "tp"), (4.0, 4.2, "dp")]
