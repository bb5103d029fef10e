from __future__ import annotations

import gc
from pathlib import Path

import pyarrow as pa
import pytest

from rankscope.collector.store.store import open_store
from rankscope.memory import release_memory, use_one_allocator, without_collection


def test_garbage_collection_is_on_again_after_an_error() -> None:
    assert gc.isenabled()

    with pytest.raises(ZeroDivisionError), without_collection():
        1 / gc.isenabled()

    assert gc.isenabled()


def test_garbage_collection_that_was_off_stays_off() -> None:
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
"""Small enough for the heap, which can only shrink at its end."""


def private_bytes() -> int:
    """Return the private memory of this process."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) << 10


def test_freed_memory_below_a_used_block_is_returned_to_the_machine(
    tmp_path: Path,
) -> None:
    with open_store(f"chdb://{tmp_path}") as store:
        blocks = [bytearray(BLOCK_BYTES) for _ in range(NUM_BLOCKS)]
        kept = blocks[-1]
        del blocks
        before = private_bytes()

        release_memory(store)

        # THEN most of the 78 MiB are returned, and the engine still works
        assert before - private_bytes() > 50 * MIB
        assert len(kept) == BLOCK_BYTES
        assert store.rows("SELECT 1 AS alive") == [{"alive": 1}]


def test_arrow_allocates_from_the_c_library() -> None:
    before = pa.default_memory_pool()
    try:
        use_one_allocator()

        assert pa.default_memory_pool().backend_name == "system"
        assert pa.array([1, 2, 3]).sum().as_py() == 6
    finally:
        pa.set_memory_pool(before)
