from __future__ import annotations

from pathlib import Path

from rankscope.collector.store.store import open_store
from rankscope.server.spare_memory import give_back

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

        give_back(store)

        # THEN most of the 78 MiB are gone, and the engine works on
        assert before - held_bytes() > 50 * MIB
        assert len(kept) == BLOCK_BYTES
        assert store.rows("SELECT 1 AS alive") == [{"alive": 1}]
