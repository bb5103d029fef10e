"""Ranks that compute 100 ms in each step, with host gaps by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.analysis.causes.host_gaps import Stalls, stalls_of
from rankscope.analysis.replay.model import GapItems, Place
from rankscope.analysis.statistics.peers import Basis, ComputeProfile

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MS = 1_000_000

Gap = tuple[int, int, Place, int]
"""Step, rank, place, ms."""


def stalls_with(gaps: Iterable[Gap], *, stage: Sequence[int], num_steps: int) -> Stalls:
    """Return the gaps of ranks 0, 1, ... of these stages.

    Args:
        gaps: At least one.
        stage: Shape (ranks,).
        num_steps: From step 0 on.
    """
    num_ranks = len(stage)
    total = np.full((num_ranks, num_steps), 100.0 * MS)
    profile = ComputeProfile(
        ranks=np.arange(num_ranks, dtype=np.int32),
        steps=np.arange(num_steps, dtype=np.int32),
        stage=np.array(stage, dtype=np.int32),
        total_ns=total,
        expected_ns=total,
        basis=(Basis.PEERS,) * num_ranks,
    )
    step, rank, place, ms = zip(*gaps, strict=True)
    items = GapItems(
        step=np.array(step, dtype=np.int32),
        rank=np.array(rank, dtype=np.int32),
        place=np.array(place, dtype=np.int8),
        gap_ns=np.array(ms, dtype=np.int64) * MS,
        operation=np.full(len(step), -1),
    )
    return stalls_of(profile, items, np.zeros(1))
