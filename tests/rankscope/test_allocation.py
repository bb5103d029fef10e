from __future__ import annotations

import gc

import pytest

from rankscope.allocation import without_collection


def test_cycles_are_looked_for_again_afterwards_whatever_happened() -> None:
    assert gc.isenabled()

    with pytest.raises(ZeroDivisionError), without_collection():
        1 / gc.isenabled()

    assert gc.isenabled()


def test_where_nobody_looked_for_cycles_nobody_does_afterwards() -> None:
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
