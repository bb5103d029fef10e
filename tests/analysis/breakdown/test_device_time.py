"""Means of a profile's device time and kernels."""

from __future__ import annotations

from typing import Any

import pytest

from rankscope.analysis.breakdown import device_time
from rankscope.analysis.breakdown.device_time import average_kernels, summarize_profile
from rankscope.analysis.breakdown.kernel_changes import compare_kernels
from rankscope.analysis.report.device_time import Kernel
from rankscope.analysis.trace.context import EventRecord, KernelRecord, RunContext

H100 = "NVIDIA H100 80GB HBM3"
MS = 1_000_000


def step_event(rank: int, step: int, **data: Any) -> EventRecord:  # noqa: ANN401
    return EventRecord(
        epoch=0, rank=rank, at_ns=0, kind="device-time", text="", data={"step": step, **data}
    )


def kernel(name: str, **values: Any) -> KernelRecord:  # noqa: ANN401
    known: dict[str, Any] = {
        "step": 1, "phase": "forward", "stream": "compute", "num": 1, "num_names": 1,
        "total_ns": MS, "max_ns": MS, "flops": None, "num_bytes": None, "dtype": "",
    }  # fmt: skip
    return KernelRecord(name=name, **(known | values))


def mean_kernel(name: str, num: float, seconds: float) -> Kernel:
    return Kernel(
        phase="forward", stream="compute", name=name, num=num, seconds=seconds, longest_s=seconds
    )


def test_parts_are_means_of_the_steps_that_count() -> None:
    idle = {"launch": 4 * MS, "input": 0}
    context = RunContext(
        events=(
            step_event(0, 0, step_ns=900 * MS, compute_ns=900 * MS),  # start-up
            step_event(0, 1, compute_ns=6 * MS, exposed_ns={"dp-comm": 2 * MS}, idle_ns=idle),
            step_event(0, 2, compute_ns=8 * MS, exposed_ns={"tp-comm": 4 * MS}, copy_ns=2 * MS),
            step_event(1, 1, compute_ns=10 * MS, exposed_ns="?", idle_ns={"input": None}),
        ),
        kernels=(kernel("gemm", total_ns=9 * MS, num=3), kernel("start", step=0)),
    )

    found, kernels = summarize_profile(context, (1, 2), {H100})

    assert found is not None
    assert (found.steps, found.ranks) == ((1, 2), (0, 1))
    assert found.of_rank(0) == pytest.approx(
        {
            "compute": 0.007, "exposed dp-comm": 0.001, "exposed tp-comm": 0.002, "copies": 0.001,
            "idle, input": 0.0, "idle, launch": 0.002,
        }
    )  # fmt: skip
    assert sum(found.of_rank(1).values()) == pytest.approx(0.010)
    assert found.mean_s["compute"] == pytest.approx(0.0085)
    assert found.of_rank(7) == {}
    assert [(one.name, one.num, one.seconds) for one in kernels] == [("gemm", 1.0, 0.003)]


def test_a_run_of_the_tracer_has_none() -> None:
    other = EventRecord(epoch=0, rank=0, at_ns=0, kind="exit", text="", data={"step": 1})

    assert summarize_profile(RunContext(events=(other,)), (1,), {H100}) == (None, ())


@pytest.mark.parametrize(
    ("devices", "values", "rates"),
    [
        # 2e12 FLOPs and 1e9 bytes in 10 ms, of 989.4 TFLOP/s and 3,350 GB/s
        ({H100}, {"dtype": "bfloat16"}, (2e14, 2e14 / 989.4e12, 1e11, 1e11 / 3350e9)),
        ({H100}, {"dtype": "float32"}, (2e14, None, 1e11, 1e11 / 3350e9)),  # perhaps TF32
        ({"a new one"}, {"dtype": "bfloat16"}, (2e14, None, 1e11, None)),
        ({H100, "a new one"}, {"dtype": "bfloat16"}, (2e14, None, 1e11, None)),
        ({H100}, {"flops": None, "num_bytes": None}, (None, None, None, None)),
        ({H100}, {"total_ns": 0}, (None, None, None, None)),
    ],
)
def test_rates_are_compared_with_peaks_that_are_known(
    devices: set[str], values: dict[str, Any], rates: tuple[float | None, ...]
) -> None:
    cost = {"total_ns": 10 * MS, "flops": 2 * 10**12, "num_bytes": 10**9}
    record = kernel("gemm", **(cost | values))

    (found,) = average_kernels([record], num_rank_steps=1, device_names=devices)

    ratios = found.flops_per_s, found.flops_ratio, found.bytes_per_s, found.bytes_ratio
    assert list(ratios) == [rate and pytest.approx(rate, rel=1e-3) for rate in rates]


def test_flops_that_are_unknown_in_one_step_are_unknown() -> None:
    records = [kernel("gemm", flops=5), kernel("gemm", step=2)]

    (found,) = average_kernels(records, num_rank_steps=2, device_names={H100})

    assert found.flops_per_s is None


def test_kernels_beyond_the_busiest_are_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_time, "MAX_KERNELS", 1)
    records = [
        kernel("c", total_ns=3), kernel("a", total_ns=2), kernel("other", total_ns=1, num_names=4),
    ]  # fmt: skip

    first, rest = average_kernels(records, num_rank_steps=1, device_names={H100})

    assert (first.name, rest.name, rest.num_names) == ("c", "other", 5)
    assert rest.seconds == pytest.approx(3e-9)


def test_a_fusion_shows_as_new_gone_and_fewer_launches() -> None:
    before = [
        mean_kernel("add", 4, 0.004), mean_kernel("copy", 8, 0.002), mean_kernel("gemm", 2, 0.5),
        mean_kernel("norm", 2, 0.010), mean_kernel("idle", 0.25, 0.001),
    ]  # fmt: skip
    after = [
        mean_kernel("fused", 1, 0.003), mean_kernel("copy", 2, 0.0005),
        mean_kernel("gemm", 2, 0.505), mean_kernel("norm", 2, 0.009),
        mean_kernel("idle", 0.25, 0.001),
    ]  # fmt: skip

    changes = compare_kernels(before, after)

    assert [(each.kernel.name, each.change) for each in changes] == [
        ("add", "gone"), ("fused", "new"), ("copy", "fewer launches"), ("norm", "less time"),
    ]  # fmt: skip
    assert changes[2].difference_s == pytest.approx(-0.0015)
    assert changes[2].cells[3:] == ("8 -> 2", "2.00 ms -> 500 us", "-1.50 ms")


def test_kernels_are_not_compared_with_a_run_without_any() -> None:
    assert compare_kernels([], [mean_kernel("add", 1, 1.0)]) == ()
