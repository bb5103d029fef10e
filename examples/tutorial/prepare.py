"""Write the data of the tutorial: one shard of text for each rank, one of them still compressed.

python prepare.py FOLDER
"""

from __future__ import annotations

import lzma
import sys
from pathlib import Path

import numpy as np

NUM_RANKS, SHARD_BYTES, COMPRESSED = 4, 6_000_000, 2

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(NUM_RANKS):
        letters = np.random.default_rng(rank).integers(97, 123, SHARD_BYTES, dtype=np.uint8)
        shard = folder / f"shard-{rank}.bin"
        if rank == COMPRESSED:
            shard.with_suffix(".bin.xz").write_bytes(lzma.compress(letters.tobytes(), preset=1))
        else:
            shard.write_bytes(letters.tobytes())
