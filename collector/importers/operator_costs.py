"""FLOPs and bytes of an operator of `torch.profiler`, where its trace has shapes or the numbers."""

from __future__ import annotations

import json
import re
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Arguments = Mapping[str, Any]

NUMBER_TYPES = {
    "double": ("float64", 8),
    "float": ("float32", 4),
    "half": ("float16", 2),
    "bfloat16": ("bfloat16", 2),
    "float8_e4m3fn": ("float8_e4m3fn", 1),
    "float8_e5m2": ("float8_e5m2", 1),
    "float8_e4m3fnuz": ("float8_e4m3fn", 1),
    "float8_e5m2fnuz": ("float8_e5m2", 1),
}
"""Name and bytes of a number by its C++ type, as ``Input type`` has it, without ``c10::``. Those of
AMD that end in ``uz`` have the same size and speed."""

MAX_COST = 1 << 60
MAX_CHARS = 256
"""Of an input that is no tensor."""

FLAGS = {"True": True, "False": False}
FRACTION = re.compile(r"\d{1,20}\.\d{0,20}(?:e-?\d{1,3})?")
WHOLE_NUMBER = re.compile(r"-?\d{1,20}")


class Cost(NamedTuple):
    """The work of one call of an operator."""

    flops: int | None
    num_bytes: int | None
    """To and from the device's memory, each operand and the result once."""

    dtype: str
    """Type of its numbers, ``bfloat16``; "" if it is unknown."""

    is_shared: bool = False
    """Whether several of its kernels do the work, each a part; else the longest one does it."""

    def share(self, part: int, whole: int) -> Cost:
        """Return a part of the work."""
        flops, num_bytes = (
            None if total is None else total * part // whole
            for total in (self.flops, self.num_bytes)
        )
        return Cost(flops, num_bytes, self.dtype)


class Work(NamedTuple):
    """FLOPs of an operator, and how many numbers it moves to and from the memory; 0: unknown."""

    flops: int
    numbers: int


UNKNOWN = Work(0, 0)


def find_cost(name: str, args: Arguments) -> Cost | None:
    """Return the work of an operator; None if the trace does not say it.

    Shapes are there with ``record_shapes``, and flags and sizes from torch 2.1 on. The compiler of
    torch writes its own numbers, ``kernel_flop`` and ``kernel_num_gb`` (10^9 bytes).

    Source: torch.utils.flop_counter; torch/_inductor/runtime/triton_heuristics.py.
    """
    if "kernel_flop" in args or "kernel_num_gb" in args:
        flops, num_bytes = (
            _count(args.get("kernel_flop"), 1),
            _count(args.get("kernel_num_gb"), 1e9),
        )
        return None if flops is num_bytes is None else Cost(flops, num_bytes, "")
    if name not in OPERATORS:
        return None
    count, places = OPERATORS[name]
    work = count(args, *places)
    if not 0 < work.flops < MAX_COST:
        return None
    types, num = args.get("Input type"), len(args["Input Dims"])
    first = types[places[0]] if isinstance(types, list) and len(types) == num else ""
    first = first.removeprefix("c10::").lower() if isinstance(first, str) else ""
    dtype, element = NUMBER_TYPES.get(first, ("", 0))
    return Cost(work.flops, element * work.numbers or None, dtype, name.endswith("_backward"))


def _multiply(args: Arguments, left_place: int, right_place: int) -> Work:
    """Count ``2 m n k`` FLOPs of the product of (m, k) and (k, n), or of each of a batch."""
    left, right = _shape(args, left_place), _shape(args, right_place)
    if len(left) < 2 or len(left) != len(right) or left[-1] != right[-2]:  # noqa: PLR2004  # matrices
        return UNKNOWN
    result = (*left[:-1], right[-1])
    return Work(2 * prod(result) * left[-1], prod(left) + prod(right) + prod(result))


def _attend(
    args: Arguments, query_place: int, length_axis: int = 2, *, num_qk: int = 1, num_v: int = 1
) -> Work:
    """Count the FLOPs of attention, for each pair of a query and a key that it sees.

    A pair takes products as long as the query and as long as the value: forward one of each;
    backward three and two, as the first one is computed again. With a causal mask a query sees the
    keys up to its own. Whether there is one has to be known, and how it is aligned: that differs
    between libraries unless there are as many keys as queries.

    Args:
        query_place: That of the query; key and value follow.
        length_axis: Axis of the sequence, 1 or 2; the other one is that of the heads.
        num_qk: Products with query or key for each pair.
        num_v: The same of the value.

    Source: Dao, FlashAttention-2, arXiv 2307.08691, sections 3.1 and 4.1.
    """
    query, key, value = (_shape(args, query_place + at) for at in range(3))
    is_causal = _is_causal(args)
    if is_causal is None or {len(query), len(key), len(value)} != {4}:
        return UNKNOWN
    queries, keys, heads_axis = query[length_axis], key[length_axis], 3 - length_axis
    is_whole = query[3] == key[3] and keys == value[length_axis]
    if not is_whole or query[heads_axis] % key[heads_axis] or (is_causal and queries != keys):
        return UNKNOWN
    pairs = queries * (queries + 1) // 2 if is_causal else queries * keys
    pairs *= query[0] * query[heads_axis]
    tensors = prod(query) + prod(key) + prod(value) + prod(query[:3]) * value[3]
    flops = 2 * pairs * (num_qk * query[3] + num_v * value[3])
    return Work(flops, num_v * tensors)  # backward: each tensor, and its gradient


def _attend_back(args: Arguments, query_place: int, length_axis: int = 2) -> Work:
    return _attend(args, query_place, length_axis, num_qk=3, num_v=2)


def _is_causal(args: Arguments) -> bool | None:
    """Return whether the mask of attention is causal; None if it is unknown.

    The flag is the first one after the probability of dropout, which is a fraction. In flash-attn
    the window of keys that a query sees follows: -1, -1 if it is not limited.
    """
    values = args.get("Concrete Inputs")
    texts = [str(value)[:64] for value in values] if isinstance(values, list) else []
    dropout = next((at for at, text in enumerate(texts) if FRACTION.fullmatch(text)), len(texts))
    flag = next((at for at in range(dropout, len(texts)) if texts[at] in FLAGS), None)
    if flag is None:
        return None
    window = {text for text in texts[flag + 1 : flag + 3] if WHOLE_NUMBER.fullmatch(text)}
    return FLAGS[texts[flag]] if window <= {"-1"} else None


def _convolve(args: Arguments, input_place: int, weight_place: int) -> Work:
    """Count 2 FLOPs for each number of the filters, at each place of the result.

    The places of a transposed convolution are those of its input. The other arguments are stride,
    padding, dilation and the flag *transposed*, behind the bias.
    """
    given, weight = _shape(args, input_place), _shape(args, weight_place)
    num_axes = len(given) - 2
    stride, padding, dilation = (_sizes(args, weight_place + at, num_axes) for at in (2, 3, 4))
    is_transposed = _flags(args, weight_place + 5)
    is_known = num_axes > 0 and len(weight) == len(given) and stride and padding and dilation
    if not is_known or min(stride) < 1:
        return UNKNOWN
    if is_transposed == [True]:
        return Work(2 * given[0] * prod(given[2:]) * prod(weight), 0)
    places = [
        (size + 2 * pad - gap * (taps - 1) - 1) // step + 1
        for size, taps, step, pad, gap in zip(
            given[2:], weight[2:], stride, padding, dilation, strict=True
        )
    ]
    if is_transposed != [False] or min(places) < 1:
        return UNKNOWN
    num_places = given[0] * prod(places)
    numbers = prod(given) + prod(weight) + num_places * weight[0]
    return Work(2 * num_places * prod(weight), numbers)


def _convolve_back(args: Arguments, gradient_place: int, input_place: int) -> Work:
    """Count the FLOPs of the forward for each of the gradients of input and filters."""
    gradient, given = _shape(args, gradient_place), _shape(args, input_place)
    weight = _shape(args, input_place + 1)
    is_transposed, wanted = _flags(args, 7), _flags(args, 10)
    if len({len(gradient), len(given), len(weight)}) > 1 or not is_transposed or not wanted:
        return UNKNOWN
    places = given if is_transposed[0] else gradient
    flops = 2 * given[0] * prod(places[2:]) * prod(weight)
    num_gradients = sum(wanted[:2])
    numbers = prod(gradient) + prod(given) + prod(weight)
    return Work(num_gradients * flops, num_gradients * numbers)


OPERATORS: dict[str, tuple[Callable[..., Work], tuple[int, ...]]] = {
    "aten::mm": (_multiply, (0, 1)),
    "aten::bmm": (_multiply, (0, 1)),
    "aten::_scaled_mm": (_multiply, (0, 1)),
    "aten::addmm": (_multiply, (1, 2)),
    "aten::baddbmm": (_multiply, (1, 2)),
    "aten::convolution": (_convolve, (0, 1)),
    "aten::convolution_backward": (_convolve_back, (0, 1)),
    "flash_attn::_flash_attn_forward": (_attend, (0, 1)),
    "flash_attn::_flash_attn_backward": (_attend_back, (1, 1)),
    **{
        f"aten::_scaled_dot_product_{kind}_attention{suffix}": (attend, (place,))
        for kind in ("flash", "efficient", "cudnn")
        for suffix, attend, place in (("", _attend, 0), ("_backward", _attend_back, 1))
    },
}
"""How the work of an operator is counted, and from which of its inputs.

Source: ``native_functions.yaml`` of PyTorch; ``flash_attn_interface.py`` of flash-attn 2.7."""


def _shape(args: Arguments, place: int) -> tuple[int, ...]:
    """Return the shape of an input; () if it has none, or one that is no list of sizes."""
    dims = args.get("Input Dims")
    shape = dims[place] if isinstance(dims, list) and place < len(dims) else None
    if not isinstance(shape, list) or not all(type(size) is int and size > 0 for size in shape):
        return ()
    return tuple(shape)


def _value(args: Arguments, place: int) -> object:
    """Return an input that is no tensor, which is there as text; None if it is not."""
    values = args.get("Concrete Inputs")
    text = values[place] if isinstance(values, list) and place < len(values) else None
    if not isinstance(text, str) or len(text) > MAX_CHARS:
        return None
    try:
        value: object = json.loads(text.lower())
    except ValueError:
        return None
    return value


def _sizes(args: Arguments, place: int, num: int) -> list[int]:
    """Return the sizes of ``num`` axes; one counts for all; [] if they are unknown."""
    sizes = _value(args, place)
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        return []
    return sizes * num if len(sizes) == 1 else sizes if len(sizes) == num else []


def _flags(args: Arguments, place: int) -> list[bool]:
    """Return a flag or a list of flags; [] if it is unknown."""
    value = _value(args, place)
    given: list[object] = value if isinstance(value, list) else [value]
    flags = [flag for flag in given if isinstance(flag, bool)]
    return flags if len(flags) == len(given) else []


def _count(value: object, unit: float) -> int | None:
    """Return a positive number in units of one; None if it is none."""
    if not isinstance(value, int | float) or not 0 < value * unit < MAX_COST:
        return None
    return round(value * unit)
