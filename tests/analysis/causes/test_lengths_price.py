from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.causes.equal_lengths import equalize_durations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


def equal(by_rank: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """Return what each rank's piece of each step takes, one piece a step, all of one stage."""
    num_ranks, num_steps = len(by_rank), len(by_rank[0])
    rank, step = np.meshgrid(np.arange(num_ranks), np.arange(num_steps), indexing="ij")
    found = equalize_durations(
        np.array(by_rank, dtype=np.float64).reshape(-1),
        rank=rank.reshape(-1).astype(np.int32),
        step=step.reshape(-1).astype(np.int32),
        label=np.zeros(rank.size, dtype=np.int64),
    )
    return found.reshape(num_ranks, num_steps)


def test_what_is_dealt_unequally_takes_the_mean_of_all_ranks() -> None:
    # Rank 1 got 4 x 20, rank 0 2 x 20: 90 ms of 6 are 15 each, and no rank is slower by itself:
    # ratios 2/3 and 4/3 vary by 4/9 in rank 0, so its mean of 3 steps is sure to 0.15, v is 0.11.
    even = equal([[10.0, 10.0, 20.0], [20.0, 20.0, 10.0]])

    assert even == pytest.approx(np.full((2, 3), 15.0))


def test_a_rank_that_is_always_slower_stays_so() -> None:
    assert equal([[10.0] * 4, [12.0] * 4]) == pytest.approx(np.array([[10.0] * 4, [12.0] * 4]))


def test_of_a_ranks_difference_what_is_surely_its_own_is_kept() -> None:
    # Three ranks of mean 0.9, 1.0 and 1.1, each 0.1 more and less in turn, 8 steps: v = 0.01,
    # e = (24 x 0.01 / 21) / 8 = 0.00143, and 1 - e / v = 0.857 of 0.1 is kept.
    even = equal([[0.8, 1.0] * 4, [1.1, 0.9] * 4, [1.0, 1.2] * 4])

    assert even[:, 0] == pytest.approx([1 - 0.0857, 1.0, 1 + 0.0857], abs=1e-4)
    assert even.min(axis=1) == pytest.approx(even.max(axis=1))


def test_the_tokens_stay_as_many() -> None:
    lengths = np.random.default_rng(1).lognormal(0.0, 0.4, (8, 40))

    assert equal(lengths.tolist()).sum() == pytest.approx(lengths.sum(), rel=0.01)


def test_a_step_that_is_long_as_a_whole_stays_long() -> None:
    even = equal([[30.0, 10.0, 10.0, 20.0, 10.0], [30.0, 20.0, 10.0, 10.0, 10.0]])

    # Over each rank's median of 10, step 0 is 3 times as long on both; the others hold 100 ms in 8
    # pieces and step 0, evened, 20 in 2: 12 each.
    assert even[0] == pytest.approx([36.0, 12.0, 12.0, 12.0, 12.0])


def test_a_span_is_evened_as_a_whole_however_it_is_cut() -> None:
    # GIVEN a rank that takes 40 ms in one piece, as it waited for nobody, and one that takes 20 ms
    # in two, 5 and 15, in turn: each is the longer one in one step
    found = equalize_durations(
        np.array([40.0, 5.0, 15.0, 5.0, 15.0, 40.0]),
        rank=np.array([0, 1, 1, 0, 0, 1], dtype=np.int32),
        step=np.array([0, 0, 0, 1, 1, 1], dtype=np.int32),
        label=np.zeros(6, dtype=np.int64),
        span=np.array([0, 1, 1, 2, 2, 3]),
    )

    # THEN each span takes the mean of 30, shared among its pieces as before
    assert found == pytest.approx([30.0, 7.5, 22.5, 7.5, 22.5, 30.0])


def test_a_speed_that_is_known_is_kept_whole() -> None:
    # GIVEN ranks that took 10 and 30 ms, known to be a tenth faster and slower than their stage
    found = equalize_durations(
        np.array([10.0, 30.0]),
        rank=np.array([0, 1], dtype=np.int32),
        step=np.zeros(2, dtype=np.int32),
        label=np.zeros(2, dtype=np.int64),
        speed=np.array([0.9, 1.1]),
    )

    assert found == pytest.approx([18.0, 22.0])
