"""Recompilation of one rank, of all ranks, and at the start of a job."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rankscope.analysis.causes.recompile import find_recompiles
from rankscope.analysis.replay.model import Place
from rankscope.analysis.trace.context import EventRecord
from tests.support.analysis.gap_builders import gaps_with

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankscope.analysis.causes.host_gaps import HostGaps


def compiling(cells: Iterable[tuple[int, int]], *, num_ranks: int = 2) -> HostGaps:
    """Return recompilations of 500 ms, by (step, rank)."""
    placed = [(step, rank, Place.COMPILATION, 500) for step, rank in cells]
    gaps = gaps_with(placed, stage=[0] * num_ranks, num_steps=12)
    name = np.zeros(len(placed), dtype=np.int32)
    return replace(gaps, gaps=replace(gaps.gaps, name=name, names=("recompile",)))


def test_a_rank_that_recompiles_is_named_with_its_compile_ids() -> None:
    events = [
        EventRecord(
            epoch=0,
            rank=rank,
            at_ns=step,
            kind="compilation",
            text=f"recompile {rank}/{step}",
            data={"compile_id": f"{rank}/{step}", "step": step},
        )
        for rank, step in ((1, 3), (0, 5), (1, 6), (1, 9))
    ]

    (found,) = find_recompiles(compiling([(3, 1), (6, 1), (9, 1)]), events)

    assert (found.cause.name, found.ranks, found.shown_steps) == ("recompile", (1,), (3, 6, 9))
    assert found.evidence == (
        "rank 1 loses 500 ms recompiling (compile ids 1/3, 1/6, 1/9) (500 % of the compute)"
        " in 3 of the 7 steps 3 to 9; its peers lose none"
    )


def test_no_rank_is_at_fault_if_all_recompile() -> None:
    (found,) = find_recompiles(compiling([(5, 0), (5, 1), (8, 0), (8, 1)]), ())

    assert (found.cause.name, found.ranks, found.steps) == ("recompile", (), (5, 8))


def test_recompiling_in_the_first_steps_is_usual() -> None:
    assert find_recompiles(compiling([(0, 0), (1, 1), (2, 1)]), ()) == ()
