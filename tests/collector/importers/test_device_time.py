"""Parts of a step's time on a device: what covers it, and why it is idle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.collector.importers.device_time import DEVICE_TIME, split_steps
from rankscope.collector.importers.intervals import Intervals, unite
from rankscope.collector.importers.kineto import read_traces
from rankscope.collector.importers.kineto_events import Work
from rankscope.collector.importers.kineto_reader import RankTrace, WorkTable
from rankscope.tracer.span import NS_PER_MS
from tests.support.collector.kineto_builder import MAIN, TraceBuilder


def window_times(trace: TraceBuilder, folder: Path) -> list[dict[str, Any]]:
    """Return the parts of each step, and of the whole file, in ms."""
    (process,) = read_traces([trace.write(folder)], "run")
    assert {event["kind"] for event in process.events} == {DEVICE_TIME}
    return [_in_ms(event["data"]) for event in process.events]


def step_times(trace: TraceBuilder, folder: Path) -> list[dict[str, Any]]:
    """Return the parts of each step in ms."""
    return window_times(trace, folder)[:-1]


def _in_ms(data: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {part: ns / NS_PER_MS for part, ns in value.items() if ns}
        if isinstance(value, dict)
        else value / NS_PER_MS if name.endswith("_ns") else value
        for name, value in data.items()
    }  # fmt: skip


def sum_of_parts(data: dict[str, Any]) -> float:
    inner = sum(data["exposed_ns"].values()) + sum(data["idle_ns"].values())
    return data["compute_ns"] + data["copy_ns"] + inner  # type: ignore[no-any-return]


def test_compute_covers_communication_and_both_cover_copies(tmp_path: Path) -> None:
    trace = TraceBuilder(0, 2)
    trace.step(3, 0, 100)
    trace.kernel("gemm", 0, 40, launch=-0.005)
    trace.kernel("gemm", 30, 50, launch=1, stream=8)  # beside the first: counts once
    trace.comm("allreduce", 40, 70, launch=2)
    trace.add("Memcpy HtoD", "gpu_memcpy", 65, 80, tid=9, stream=9)

    assert step_times(trace, tmp_path) == [
        {
            "step": 3,
            "step_ns": 100,
            "compute_ns": 50,
            "exposed_ns": {"dp-comm": 20},
            "copy_ns": 10,
            "idle_ns": {"launch": 20},  # after the last kernel the host launched nothing
        }
    ]


@pytest.mark.parametrize(
    ("annotation", "idle"),
    [
        # Idle from 10 to 50. The next kernel is launched at 45 and begins at 50.
        (None, {"launch": 35.02, "unknown": 4.98}),
        (("enumerate(DataLoader)#_Iter.__next__", "user_annotation", 20, 30),
         {"input": 10, "launch": 25.02, "unknown": 4.98}),
        # Blocked for 8 ms until the device was done: that much later it launched the next one.
        (("cudaStreamSynchronize", "cuda_runtime", 2, 10),
         {"synchronisation": 8, "launch": 27.02, "unknown": 4.98}),
        (("cudaStreamWaitEvent", "cuda_runtime", 2, 10), {"launch": 35.02, "unknown": 4.98}),
        # Another 60 ms of blocking were before the last launch: they delayed others.
        (("hipDeviceSynchronize", "hip_runtime", -61, -1), {"launch": 35.02, "unknown": 4.98}),
    ],
)  # fmt: skip
def test_idle_time_has_the_reason_that_the_host_shows(
    annotation: tuple[str, str, float, float] | None, idle: dict[str, float], tmp_path: Path
) -> None:
    trace = TraceBuilder(0, 1)
    trace.step(0, 0, 60)
    trace.kernel("gemm", 0, 10, launch=-0.005)
    trace.kernel("gemm", 50, 60, launch=45)
    if annotation is not None:
        name, cat, begin, end = annotation
        trace.add(name, cat, begin, end, tid=MAIN)

    (step,) = step_times(trace, tmp_path)

    assert step["idle_ns"] == pytest.approx(idle)


def test_a_kernel_without_a_launch_leaves_the_reason_unknown(tmp_path: Path) -> None:
    trace = TraceBuilder(0, 1)
    trace.step(0, 0, 60)
    trace.kernel("gemm", 0, 10, launch=-0.005)
    trace.add("gemm", "kernel", 50, 60, tid=7, stream=7)

    (step,) = step_times(trace, tmp_path)

    assert step["idle_ns"] == {"unknown": 40}


def test_a_step_begins_on_the_device_when_the_work_of_the_one_before_is_done(
    tmp_path: Path,
) -> None:
    trace = TraceBuilder(0, 1)
    trace.step(0, 0, 10)  # the host launches both steps in 20 ms
    trace.step(1, 10, 20)
    trace.kernel("gemm", 1, 50, launch=0.99)
    trace.kernel("gemm", 50, 90, launch=11)

    first, second = step_times(trace, tmp_path)

    assert (first["step_ns"], first["compute_ns"]) == (50, 49)
    assert (second["step_ns"], second["compute_ns"]) == (40, 40)


def test_a_processor_without_a_device_has_no_launches(tmp_path: Path) -> None:
    trace = TraceBuilder(0, 1)
    trace.backend = "gloo"
    trace.step(0, 0, 60)
    trace.add("aten::mm", "cpu_op", 0, 40, tid=MAIN)
    trace.add("enumerate(DataLoader)#_Iter.__next__", "user_annotation", 45, 50, tid=MAIN)
    document = trace.document() | {"deviceProperties": []}
    document["distributedInfo"]["backend"] = "gloo"
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(document))

    (process,) = read_traces([path], "run")
    step = _in_ms(process.events[0]["data"])

    assert step["compute_ns"] == 40
    assert step["idle_ns"] == {"input": 5, "unknown": 15}


def test_the_whole_file_lasts_from_its_first_work_to_its_last(tmp_path: Path) -> None:
    trace = TraceBuilder(0, 2)
    trace.step(3, 100, 200)
    trace.kernel("gemm", 10, 20)  # before the step, as in a window that warms up
    trace.comm("allreduce", 15, 50, launch=12)
    trace.kernel("gemm", 110, 160, launch=105)

    step, whole = window_times(trace, tmp_path)

    assert (step["step"], step["step_ns"], step["compute_ns"]) == (3, 100, 50)
    assert whole == {
        "step": None,
        "step_ns": 150,
        "compute_ns": 60,
        "exposed_ns": {"dp-comm": 30},
        "copy_ns": 0,
        "idle_ns": pytest.approx({"launch": 55.02, "unknown": 4.98}),
    }


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_parts_of_a_step_sum_to_its_time(data: st.DataObject) -> None:
    moment = st.integers(0, 3_000)
    length = st.integers(1, 900)
    spans = st.lists(st.tuples(moment, length), max_size=12)
    names = ("gpu_memcpy", "kernel")
    steps = [(at * 1_000, (at + 1) * 1_000, at) for at in range(3)]
    trace = RankTrace(Path(), 0, 1, "", "", 0, steps=steps)
    trace.is_of_device = data.draw(st.booleans())
    trace.compute = [
        Work(at, at + took, max(0, at - data.draw(length)), "1",
             {"cat": data.draw(st.sampled_from(names))})
        for at, took in data.draw(spans)
    ]  # fmt: skip
    comm = [(at, at + took, data.draw(st.sampled_from("ab"))) for at, took in data.draw(spans)]
    trace.comm = [Work(begin, end, begin, "1", {"cat": "kernel"}) for begin, end, _ in comm]
    blocked = [(at, at + took) for at, took in data.draw(spans)]
    trace.synchronizations = {"1": unite(Intervals.of(blocked)).to_rows()}
    trace.loader = [(at, at + took) for at, took in data.draw(spans)]

    for _, parts in split_steps(trace, WorkTable.of(trace), comm):
        assert sum_of_parts(parts) == parts["step_ns"]
        assert min(parts["exposed_ns"].values(), default=0) >= 0
        assert min(parts["idle_ns"].values()) >= 0
