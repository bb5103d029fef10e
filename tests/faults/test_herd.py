"""A collector restarts under 64 agents: they come back without a storm."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.faults.herd import STEADY_REQUESTS_PER_S, Herd, restart

if TYPE_CHECKING:
    from pathlib import Path

WARM_S = 5.0
STEADY_S = 3.0
RECOVERY_S = 4.0
START_CPU_S = 3.0
"""What a collector's first decoding and insert may take, whoever asks: 1.5 s were seen. It weighs
in a few seconds; over half a minute `tests.faults.herd` compares without it."""


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.alone
def test_sixty_four_agents_come_back_to_a_restarted_collector_without_a_storm(
    tmp_path: Path,
) -> None:
    with Herd(folder=tmp_path / "path", chooser=random.Random(1)) as herd:
        # GIVEN 64 agents that have shipped and probed for a while
        herd.watch(lambda seconds: seconds >= WARM_S)

        # WHEN their collector is killed and started again while their ranks write on
        steady, recovery = restart(herd, steady_s=STEADY_S, recovery_s=RECOVERY_S)

        # THEN it is asked less than twice as much as before, on the whole and in its worst moment
        told = (steady, recovery)
        assert recovery.requests_per_s < 2 * STEADY_REQUESTS_PER_S, told
        assert recovery.most_requests_per_s < 2 * STEADY_REQUESTS_PER_S, told

        # AND works less than twice as much, if a request costs what it cost before
        steady_cpu_s = steady.cpu_s_a_request * STEADY_REQUESTS_PER_S * recovery.seconds
        assert recovery.cpu_ratio * recovery.seconds < 2 * steady_cpu_s + START_CPU_S, told

        # AND each row is stored once
        herd.drain()
        verdict = herd.verdict()
        assert verdict.is_clean, (verdict, herd.told())
