"""The data path under random faults: 30 cycles here, 300 by `make faults`."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.faults.cycles import NUM_RANKS, ROWS_A_BURST, WholePath

if TYPE_CHECKING:
    from pathlib import Path

NUM_CYCLES = 30
SEED = 20_261_121


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_kills_lose_and_duplicate_no_row(tmp_path: Path) -> None:
    # GIVEN ranks that write, an agent that sends, a collector that stores
    with WholePath(folder=tmp_path / "path", chooser=random.Random(SEED)) as path:
        # WHEN the agent, the collector or both are killed, or the collector is frozen
        for _ in range(NUM_CYCLES):
            path.cycle()
        path.drain()

        # THEN each row is in the store once and unchanged
        verdict = path.verdict()
        assert verdict.is_clean, (verdict, path.logs())
        assert verdict.num_stored >= NUM_CYCLES * NUM_RANKS * ROWS_A_BURST
