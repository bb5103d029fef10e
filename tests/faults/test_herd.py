"""Restart of a collector under 64 agents without a storm of requests."""

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
"""Allowance for a collector's first decoding and insert, of which 1.5 s were measured. It matters
in a few seconds; `tests.faults.herd` measures over half a minute without it."""


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.nightly
def test_sixty_four_agents_return_to_a_restarted_collector_without_a_storm(tmp_path: Path) -> None:
    with Herd(folder=tmp_path / "path", chooser=random.Random(1)) as herd:
        # GIVEN 64 agents that have sent and probed for some time
        herd.watch(lambda seconds: seconds >= WARM_S)

        # WHEN their collector is restarted while their ranks write
        steady, recovery = restart(herd, steady_s=STEADY_S, recovery_s=RECOVERY_S)

        # THEN it gets less than twice as many requests as before, in total and at its worst moment
        paces = (steady, recovery)
        assert recovery.requests_per_s < 2 * STEADY_REQUESTS_PER_S, paces
        assert recovery.most_requests_per_s < 2 * STEADY_REQUESTS_PER_S, paces

        # AND takes less than twice the CPU time, if a request costs the same as before
        steady_cpu_s = steady.cpu_s_a_request * STEADY_REQUESTS_PER_S * recovery.seconds
        assert recovery.cpu_ratio * recovery.seconds < 2 * steady_cpu_s + START_CPU_S, paces

        # AND each row is stored once
        herd.drain()
        verdict = herd.verdict()
        assert verdict.is_clean, (verdict, herd.logs())
