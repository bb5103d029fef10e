from __future__ import annotations

import pytest

from rankscope.tracer.topology import Coords, Layout
from rankscope.trainer.ranks import coords_of, ranks_of_stage


def test_tp_changes_fastest_and_pp_slowest() -> None:
    layout = Layout(pp=2, dp=3, tp=2)

    assert coords_of(0, layout) == Coords(pp=0, dp=0, tp=0)
    assert coords_of(1, layout) == Coords(pp=0, dp=0, tp=1)
    assert coords_of(5, layout) == Coords(pp=0, dp=2, tp=1)
    assert coords_of(6, layout) == Coords(pp=1, dp=0, tp=0)
    assert coords_of(11, layout) == Coords(pp=1, dp=2, tp=1)


def test_a_stage_is_a_run_of_ranks() -> None:
    assert ranks_of_stage(1, Layout(pp=3, dp=2, tp=2)) == (4, 5, 6, 7)


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_job_has_no_position(rank: int) -> None:
    with pytest.raises(ValueError, match=rf"rank must be in \[0, 8\), got {rank}"):
        coords_of(rank, Layout(pp=2, dp=2, tp=2))
