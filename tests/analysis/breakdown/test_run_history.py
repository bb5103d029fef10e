"""Loss and epochs of a run."""

from __future__ import annotations

from rankscope.analysis.breakdown.run_history import EpochHistory, StepMark, summarize_history

S = 1_000_000_000


def mark(epoch: int, step: int, begin_s: int, end_s: int, loss: float | None = None) -> StepMark:
    return StepMark(epoch=epoch, step=step, begin_ns=begin_s * S, end_ns=end_s * S, loss=loss)


def test_steps_that_a_later_epoch_repeats_are_lost() -> None:
    # GIVEN steps 0 to 3 of 10 s, a restart of 20 s, and steps 2 to 4 of 10 s
    first = [mark(0, step, 10 * step, 10 * step + 10, loss=9.0 - step) for step in range(4)]
    second = [mark(1, step, 40 + 10 * step, 50 + 10 * step, loss=5.0) for step in (2, 3, 4)]

    found = summarize_history([*second, *first])

    assert found is not None
    assert found.epochs == (
        EpochHistory(epoch=0, steps=(0, 3), num_repeated=2, seconds=40.0),
        EpochHistory(epoch=1, steps=(2, 4), num_repeated=0, seconds=30.0),
    )
    assert found.loss_by_step == {0: 9.0, 1: 8.0, 2: 5.0, 3: 5.0, 4: 5.0}
    assert found.seconds_by_step == dict.fromkeys(range(5), 10.0)


def test_steps_that_overlap_count_once_and_open_ones_not() -> None:
    found = summarize_history([mark(0, 0, 0, 11), mark(0, 1, 10, 20), mark(0, 2, 20, 0)])

    assert found is not None
    assert found.seconds_by_step == {0: 11.0, 1: 9.0}
    assert found.loss_by_step == {}
    assert found.epochs[0].steps == (0, 1)


def test_a_run_without_an_ended_step_has_no_history() -> None:
    assert summarize_history([mark(0, 0, 5, 0)]) is None
