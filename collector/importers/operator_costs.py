"""FLOPs and bytes of an operator of `torch.profiler`, where its trace has shapes or the numbers."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

OPERANDS = {
    "aten::mm": (0, 1),
    "aten::bmm": (0, 1),
    "aten::_scaled_mm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::baddbmm": (1, 2),
}
"""Places of the two matrices, or batches of them, among the inputs of an operator."""

NUMBER_TYPES = {
    "double": ("float64", 8),
    "float": ("float32", 4),
    "c10::Half": ("float16", 2),
    "c10::BFloat16": ("bfloat16", 2),
    "c10::Float8_e4m3fn": ("float8_e4m3fn", 1),
    "c10::Float8_e5m2": ("float8_e5m2", 1),
}
"""Name and bytes of a number by its C++ type, as ``Input type`` has it."""

MAX_COST = 1 << 60


class Cost(NamedTuple):
    """The work of one call of an operator."""

    flops: int | None
    num_bytes: int | None
    """To and from the device's memory, each operand and the result once."""

    dtype: str
    """Type of its numbers, ``bfloat16``; "" if it is unknown."""


def find_cost(name: str, args: Mapping[str, Any]) -> Cost | None:
    """Return the work of an operator; None if the trace does not say it.

    A matrix product of (m, k) and (k, n) takes ``2 m n k`` FLOPs; its smallest number of bytes is
    that of ``m k + k n + m n`` elements. Shapes are there with ``record_shapes``. The compiler of
    torch writes its own numbers, ``kernel_flop`` and ``kernel_num_gb`` (10^9 bytes).

    Source: torch.utils.flop_counter; torch/_inductor/runtime/triton_heuristics.py.
    """
    if "kernel_flop" in args or "kernel_num_gb" in args:
        flops, num_bytes = (
            _count(args.get("kernel_flop"), 1),
            _count(args.get("kernel_num_gb"), 1e9),
        )
        return None if flops is num_bytes is None else Cost(flops, num_bytes, "")
    if name not in OPERANDS:
        return None
    left, right = (_shape(args.get("Input Dims"), place) for place in OPERANDS[name])
    if len(left) < 2 or len(left) != len(right) or left[-1] != right[-2]:  # noqa: PLR2004  # matrices
        return None
    result = (*left[:-1], right[-1])
    flops = 2 * prod(result) * left[-1]
    types = args.get("Input type")
    first = types[OPERANDS[name][0]] if isinstance(types, list) and len(types) == _num(args) else ""
    dtype, element = NUMBER_TYPES.get(first, ("", 0)) if isinstance(first, str) else ("", 0)
    num_bytes = element * (prod(left) + prod(right) + prod(result))
    if not 0 < flops < MAX_COST:
        return None
    return Cost(flops, num_bytes or None, dtype)


def _num(args: Mapping[str, Any]) -> int:
    return len(args["Input Dims"])


def _shape(dims: object, place: int) -> tuple[int, ...]:
    """Return the shape of an input; () if it has none, or one that is no list of sizes."""
    shape = dims[place] if isinstance(dims, list) and place < len(dims) else None
    if not isinstance(shape, list) or not all(type(size) is int and size > 0 for size in shape):
        return ()
    return tuple(shape)


def _count(value: object, unit: float) -> int | None:
    """Return a positive number in units of one; None if it is none."""
    if not isinstance(value, int | float) or not 0 < value * unit < MAX_COST:
        return None
    return round(value * unit)
