"""The search for the two functions of CUDA."""

from __future__ import annotations

import ctypes

import pytest

from rankscope.tracer.device.cuda import DRIVER_NAMES, RUNTIME, Names, _find, _having


def test_the_runtime_is_found_among_the_mapped_libraries() -> None:
    maps = (
        "7f00-7f01 r-xp 00000000 08:01 17 /usr/lib/libc.so.6\n"
        "7f02-7f03 r-xp 00000000 08:01 18 /opt/nvidia/cuda_runtime/lib/libcudart.so.12\n"
    )

    found = RUNTIME.search(maps)

    assert found is not None
    assert found.group(1) == "/opt/nvidia/cuda_runtime/lib/libcudart.so.12"


def test_a_library_without_the_functions_is_rejected_by_name() -> None:
    with pytest.raises(OSError, match="lacks cuThreadExchangeStreamCaptureMode, cuStreamCreate"):
        _having(ctypes.CDLL("libc.so.6"), DRIVER_NAMES)


def test_without_runtime_and_driver_the_error_names_the_missing_library() -> None:
    with pytest.raises(OSError, match=r"lacks no_such_function|that-is-not-there"):
        _find(
            runtime_names=Names("no_such_function", "nor_this"),
            driver="libcuda-that-is-not-there.so.1",
        )
