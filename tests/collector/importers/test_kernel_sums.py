"""Sums of kernels by step, phase and name: counts, names, FLOPs and bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rankscope.collector.importers import kernel_sums
from rankscope.collector.importers.kernel_sums import MAX_CHARS, OTHER, shorten_name
from rankscope.collector.importers.kineto import read_traces
from rankscope.collector.importers.operator_costs import Cost, find_cost
from rankscope.tracer.span import NS_PER_MS
from tests.support.collector.kineto_builder import AUTOGRAD, MAIN, TraceBuilder

if TYPE_CHECKING:
    from pathlib import Path

ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>,"
    " std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)"
)


def sums(trace: TraceBuilder, folder: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return the sums of a trace of one step by phase, stream and name."""
    (process,) = read_traces([trace.write(folder)], "run")
    return {(row["phase"], row["stream"], row["name"]): row for row in process.kernels}


def test_launches_of_one_kernel_are_summed_by_phase(tmp_path: Path) -> None:
    trace = TraceBuilder(0, 2)
    trace.step(7, 0, 100)
    trace.backward(20, 40)
    trace.kernel("gemm", 5, 15)
    trace.kernel("gemm", 15, 19)
    trace.kernel("gemm", 30, 50, tid=AUTOGRAD)
    trace.comm("allreduce", 35, 60)
    trace.kernel("adamw", 60, 63)
    trace.add("Memcpy DtoH (Device -> Pageable)", "gpu_memcpy", 70, 71, tid=7, stream=7)
    trace.kernel("outside of any step", 200, 210)

    rows = sums(trace, tmp_path)

    assert {key: (row["step"], row["num"], row["total_ns"], row["max_ns"])
            for key, row in rows.items()} == {
        ("forward", "compute", "gemm"): (7, 2, 14 * NS_PER_MS, 10 * NS_PER_MS),
        ("backward", "compute", "gemm"): (7, 1, 20 * NS_PER_MS, 20 * NS_PER_MS),
        ("optimizer", "communication", "ncclDevKernel_allreduce"): (
            7, 1, 25 * NS_PER_MS, 25 * NS_PER_MS),
        ("optimizer", "compute", "adamw"): (7, 1, 3 * NS_PER_MS, 3 * NS_PER_MS),
        ("optimizer", "copy", "Memcpy DtoH (Device -> Pageable)"): (
            7, 1, NS_PER_MS, NS_PER_MS),
    }  # fmt: skip


def test_flops_of_an_operator_count_for_its_longest_kernel(tmp_path: Path) -> None:
    trace = TraceBuilder(0, 1)
    trace.step(0, 0, 100)
    shapes = {"Input Dims": [[8], [16, 32], [32, 8]], "Input type": ["c10::BFloat16"] * 3}
    for at in (1, 2):
        trace.add("aten::addmm", "cpu_op", at, at + 0.5, tid=MAIN, **shapes)
        trace.kernel("bias", 10 * at, 10 * at + 1, launch=at + 0.1)
        trace.kernel("gemm", 10 * at + 1, 10 * at + 5, launch=at + 0.2)
        trace.kernel("other thread", 10 * at + 5, 10 * at + 6, launch=at + 0.3, tid=AUTOGRAD)
    trace.kernel("no operator", 50, 51, launch=1.7)

    rows = sums(trace, tmp_path)

    gemm = rows["forward", "compute", "gemm"]
    assert (gemm["flops"], gemm["num_bytes"], gemm["dtype"]) == (
        2 * 2 * 16 * 32 * 8, 2 * 2 * (16 * 32 + 32 * 8 + 16 * 8), "bfloat16",
    )  # fmt: skip
    for name in ("bias", "no operator", "other thread"):
        row = rows["forward", "compute", name]
        assert (row["flops"], row["num_bytes"], row["dtype"]) == (None, None, "")


@pytest.mark.parametrize(
    ("name", "args", "cost"),
    [
        ("aten::mm", {"Input Dims": [[2, 3], [3, 5]]}, Cost(60, None, "")),
        ("aten::bmm", {"Input Dims": [[4, 2, 3], [4, 3, 5]], "Input type": ["float", "float"]},
         Cost(240, 4 * (24 + 60 + 40), "float32")),
        ("triton_poi_fused_add_0", {"kernel_flop": 9, "kernel_num_gb": 2e-6},
         Cost(9, 2_000, "")),
        ("triton_poi_fused_add_0", {"kernel_num_gb": None}, None),
        ("aten::mm", {}, None),
        ("aten::mm", {"Input Dims": [[2, 3], [4, 5]]}, None),  # no product of matrices
        ("aten::mm", {"Input Dims": [[2, -3], [3, 5]]}, None),
        ("aten::mm", {"Input Dims": [[1 << 40, 1 << 40], [1 << 40, 5]]}, None),
        ("aten::mm", {"Input Dims": "[[2, 3], [3, 5]]"}, None),
        ("aten::add", {"Input Dims": [[2, 3], [3, 5]]}, None),
    ],
)  # fmt: skip
def test_the_cost_of_an_operator_is_what_its_trace_says(
    name: str, args: dict[str, Any], cost: Cost | None
) -> None:
    assert find_cost(name, args) == cost


@pytest.mark.parametrize(
    ("full", "short"),
    [
        ("gemm", "gemm"),
        (ADD, "vectorized_elementwise_kernel<4, CUDAFunctor_add<float>, std::array<char*, 3ul> >"),
        ("void (anonymous namespace)::fill<int>(int*)", "fill<int>"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
         "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"),
        ("Memset (Device)", "Memset (Device)"),
        ("", ""),
    ],
)  # fmt: skip
def test_a_name_loses_what_does_not_name_the_kernel(full: str, short: str) -> None:
    assert shorten_name(full) == short


def test_a_long_name_loses_its_innermost_templates_and_stays_distinct() -> None:
    deep = ["void cutlass::device_kernel<flash::Sm90<" + f"Mainloop<cute::tuple<{'Int, ' * 60}{n}>>"
            ", Epilogue>>(Params)" for n in range(2)]  # fmt: skip
    short = [shorten_name(name) for name in deep]

    assert short[0].startswith("cutlass::device_kernel<flash::Sm90<Mainloop<cute::tuple<…>>,")
    assert max(map(len, short)) <= MAX_CHARS
    assert short[0] != short[1]
    assert len(shorten_name("x" * 1_000)) == MAX_CHARS


def test_further_names_are_one_row_that_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_sums, "MAX_NAMES", 2)
    trace = TraceBuilder(0, 1)
    trace.step(0, 0, 100)
    for number in range(5):
        trace.kernel(f"kernel {number}", 10 * number, 10 * number + 5 - number)

    rows = sums(trace, tmp_path)

    assert [name for *_, name in rows] == ["kernel 0", "kernel 1", OTHER]
    other = rows["forward", "compute", OTHER]
    assert (other["num"], other["num_names"], other["total_ns"]) == (3, 3, 6 * NS_PER_MS)
