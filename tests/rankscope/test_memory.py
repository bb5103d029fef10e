from __future__ import annotations

import gc
from pathlib import Path

import pyarrow as pa
import pytest

from rankscope.collector.store.store import open_store
from rankscope.memory import release_memory, use_one_allocator, without_collection


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


MIB = 1 << 20
NUM_BLOCKS = 20_000
BLOCK_BYTES = 4_096
"""Small enough for the heap, which shrinks at its end alone."""


def held_bytes() -> int:
    """Return the memory of its own that this process has."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) << 10


def test_freed_memory_below_something_that_is_kept_goes_back_to_the_machine(
    tmp_path: Path,
) -> None:
    with open_store(f"chdb://{tmp_path}") as store:
        blocks = [bytearray(BLOCK_BYTES) for _ in range(NUM_BLOCKS)]
        kept = blocks[-1]
        del blocks
        before = held_bytes()

        release_memory(store)

        # THEN most of the 78 MiB are gone, and the engine works on
        assert before - held_bytes() > 50 * MIB
        assert len(kept) == BLOCK_BYTES
        assert store.rows("SELECT 1 AS alive") == [{"alive": 1}]


def test_columns_come_from_the_c_library_afterwards() -> None:
    before = pa.default_memory_pool()
    try:
        use_one_allocator()

        assert pa.default_memory_pool().backend_name == "system"
        assert pa.array([1, 2, 3]).sum().as_py() == 6
    finally:
        pa.set_memory_pool(before)
