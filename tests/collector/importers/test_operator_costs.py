"""FLOPs and bytes of convolutions and attention, from the arguments that a trace has of them."""

from __future__ import annotations

from typing import Any

import pytest

from rankscope.collector.importers.operator_costs import find_cost

FLASH = "aten::_scaled_dot_product_flash_attention"
EFFICIENT = "aten::_scaled_dot_product_efficient_attention"
FLASH_ATTN = "flash_attn::_flash_attn_forward"
QUERY = [2, 8, 128, 64]
PAIRS = 2 * 8 * 128 * 128
CAUSAL_PAIRS = 2 * 8 * 128 * 129 // 2


def arguments(dims: list[list[int]], *scalars: str) -> dict[str, Any]:
    """Return the arguments of an operator on float16 tensors, as the profiler writes them."""
    return {
        "Input Dims": [*dims, *([] for _ in scalars)],
        "Input type": [*["c10::Half"] * len(dims), *["Scalar"] * len(scalars)],
        "Concrete Inputs": [*[""] * len(dims), *scalars],
    }


def convolution(*dims: list[int], stride: int = 1, padding: int = 0, gap: int = 1,
                transposed: bool = False) -> dict[str, Any]:  # fmt: skip
    axes = len(dims[0]) - 2
    sizes = (str([size] * axes) for size in (stride, padding, gap))
    return arguments([*dims, []], *sizes, str(transposed), str([0] * axes), "1")


def gradients(*dims: list[int], wanted: str, transposed: bool = False) -> dict[str, Any]:
    """Return the arguments of a backward: gradient of the result, input and filters."""
    sizes = "[4]", "[1, 1]", "[1, 1]", "[1, 1]", str(transposed), "[0, 0]", "1", wanted
    return arguments([*dims], *sizes)


@pytest.mark.parametrize(
    ("name", "args", "flops", "numbers"),
    [
        # 64 places of a filter of 27 numbers, 4 filters, 2 images
        ("aten::convolution", convolution([2, 3, 8, 8], [4, 3, 3, 3], padding=1),
         2 * 2 * 64 * 4 * 27, 2 * 3 * 64 + 4 * 27 + 2 * 4 * 64),
        ("aten::convolution", convolution([2, 3, 8, 8], [4, 3, 3, 3], stride=2),
         2 * 2 * 9 * 4 * 27, 2 * 3 * 64 + 4 * 27 + 2 * 4 * 9),
        ("aten::convolution", convolution([2, 3, 8, 8], [4, 3, 3, 3], gap=2),
         2 * 2 * 16 * 4 * 27, 2 * 3 * 64 + 4 * 27 + 2 * 4 * 16),
        # of each of 4 groups a filter sees one channel
        ("aten::convolution", convolution([2, 4, 8, 8], [8, 1, 3, 3], padding=1),
         2 * 2 * 64 * 8 * 9, 2 * 4 * 64 + 8 * 9 + 2 * 8 * 64),
        ("aten::convolution", convolution([3, 5, 10], [4, 5, 3]),
         2 * 3 * 8 * 4 * 15, 150 + 60 + 96),
        ("aten::convolution", convolution([2, 3, 4, 4], [3, 6, 2, 2], stride=2, transposed=True),
         2 * 2 * 16 * 3 * 24, 0),
        ("aten::convolution_backward",
         gradients([2, 4, 8, 8], [2, 3, 8, 8], [4, 3, 3, 3], wanted="[True, True, True]"),
         2 * 2 * 2 * 64 * 4 * 27, 2 * (512 + 384 + 108)),
        ("aten::convolution_backward",
         gradients([2, 4, 8, 8], [2, 3, 8, 8], [4, 3, 3, 3], wanted="[False, True, False]"),
         2 * 2 * 64 * 4 * 27, 512 + 384 + 108),
        (FLASH, arguments([QUERY] * 3, "0.", "False", "False", ""),
         2 * PAIRS * 128, 4 * 131072),
        (FLASH, arguments([QUERY] * 3, "0.10000000000000001", "True", "False", "0.125"),
         2 * CAUSAL_PAIRS * 128, 4 * 131072),
        # 2 heads of keys and values for 8 of queries; 32 keys, values of 16 numbers
        (FLASH, arguments([QUERY, [2, 2, 32, 64], [2, 2, 32, 16]], "0.", "False", "False", ""),
         2 * 2 * 8 * 128 * 32 * (64 + 16), 131072 + 8192 + 2048 + 32768),
        (EFFICIENT, arguments([QUERY] * 3, "", "True", "0.", "True", ""),
         2 * CAUSAL_PAIRS * 128, 4 * 131072),
        ("aten::_scaled_dot_product_cudnn_attention",
         arguments([QUERY] * 3, "True", "0.", "False", "False", ""),
         2 * PAIRS * 128, 4 * 131072),
        (f"{FLASH}_backward",
         arguments([QUERY] * 5 + [[2, 8, 128], [], []], "128", "128", "0.", "True"),
         2 * CAUSAL_PAIRS * 5 * 64, 8 * 131072),
        (f"{EFFICIENT}_backward",
         arguments([QUERY] * 4 + [[], QUERY, [2, 8, 128], [], []],
                   "0.", "[True, True, True, False]", "False", ""),
         2 * PAIRS * 5 * 64, 8 * 131072),
        (FLASH_ATTN,
         arguments([[2, 128, 8, 64]] * 3, "0.", "0.125", "True", "-1", "-1", "0.", "", "False"),
         2 * CAUSAL_PAIRS * 128, 4 * 131072),
        ("flash_attn::_flash_attn_backward",
         arguments([[2, 128, 8, 64]] * 5 + [[2, 8, 128]] + [[2, 128, 8, 64]] * 3,
                   "0.", "0.125", "False", "-1", "-1", "0.", "", "False"),
         2 * PAIRS * 5 * 64, 8 * 131072),
    ],
)  # fmt: skip
def test_work_follows_from_shapes_and_flags(
    name: str, args: dict[str, Any], flops: int, numbers: int
) -> None:
    cost = find_cost(name, args)

    assert cost is not None
    assert (cost.flops, cost.num_bytes) == (flops, 2 * numbers or None)
    assert cost.dtype == "float16"
    assert cost.is_shared == name.endswith("_backward")


@pytest.mark.parametrize(
    ("name", "args"),
    [
        (FLASH, {"Input Dims": [QUERY] * 3}),  # torch before 2.1: is the mask causal?
        (FLASH, arguments([QUERY] * 3, "0.", "", "")),
        (FLASH, arguments([QUERY] * 3, "False", "True")),
        (FLASH, arguments([QUERY, QUERY, [2, 8, 64, 64]], "0.", "False")),
        (FLASH, arguments([QUERY, [2, 3, 128, 64], [2, 3, 128, 64]], "0.", "False")),
        (FLASH, arguments([[16, 128, 64]] * 3, "0.", "False")),
        # fewer queries than keys: which keys a causal mask hides depends on the library
        (FLASH, arguments([[2, 8, 4, 64], QUERY, QUERY], "0.", "True")),
        # a window of 64 keys
        (FLASH_ATTN, arguments([[2, 128, 8, 64]] * 3, "0.", "0.125", "True", "64", "0", "0.")),
        ("aten::convolution", {"Input Dims": [[2, 3, 8, 8], [4, 3, 3, 3]]}),
        ("aten::convolution", convolution([2, 3, 8, 8], [4, 3, 9, 9])),  # no place
        ("aten::convolution", convolution([2, 3, 8, 8], [4, 3, 3, 3], stride=0)),
        ("aten::convolution", convolution([8, 8], [4, 3])),
        ("aten::convolution", convolution([2, 3, 8, 8], [4, 3, 3])),
        ("aten::convolution",
         convolution([2, 3, 8, 8], [4, 3, 3, 3]) | {"Concrete Inputs": ["["] * 9}),
        ("aten::convolution_backward",
         gradients([2, 4, 8, 8], [2, 3, 8, 8], [4, 3, 3, 3], wanted="[False, False, True]")),
        ("aten::convolution_backward",
         gradients([2, 4, 8, 8], [2, 3, 8, 8], [4, 3, 3, 3], wanted="True and False")),
    ],
)  # fmt: skip
def test_work_that_a_trace_does_not_say_is_unknown(name: str, args: dict[str, Any]) -> None:
    assert find_cost(name, args) is None
