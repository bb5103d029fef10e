"""The history of a run over its epochs: loss, step times, and repeated steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankscope.tracer.span import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMark:
    """A step of one epoch, as its ranks marked it."""

    epoch: int
    step: int
    begin_ns: int
    """First begin of any rank, Unix time."""

    end_ns: int
    """Last end of any rank; 0 or less if no rank has ended it."""

    loss: float | None
    """Mean of the ranks that reported it; None if none did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochHistory:
    """One incarnation of the job."""

    epoch: int
    steps: tuple[int, int]
    num_repeated: int
    """Steps that a later epoch trained again."""

    seconds: float
    """From its first begin to its last end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory:
    """The newest steps of a run, over all epochs."""

    epochs: tuple[EpochHistory, ...]
    loss_by_step: Mapping[int, float]
    """Of the last epoch of each step; steps without a loss are left out."""

    seconds_by_step: Mapping[int, float]
    """From the end of the step before to its end; from its begin if the one before is not of the
    same epoch. Of the last epoch of each step."""


def summarize_history(marks: Iterable[StepMark]) -> RunHistory | None:
    """Return the history of steps in any order; None if none has ended."""
    ended = [mark for mark in marks if mark.end_ns > mark.begin_ns]
    if not ended:
        return None
    kept = {mark.step: mark for mark in sorted(ended, key=lambda mark: mark.epoch)}
    by_epoch: dict[int, list[StepMark]] = {}
    for mark in ended:
        by_epoch.setdefault(mark.epoch, []).append(mark)
    seconds_by_step: dict[int, float] = {}
    for step, mark in sorted(kept.items()):
        before = kept.get(step - 1)
        follows = before and before.epoch == mark.epoch and before.end_ns < mark.end_ns
        begin_ns = before.end_ns if before and follows else mark.begin_ns
        seconds_by_step[step] = (mark.end_ns - begin_ns) / NS_PER_S
    return RunHistory(
        epochs=tuple(
            EpochHistory(
                epoch=epoch,
                steps=(min(mark.step for mark in mine), max(mark.step for mark in mine)),
                num_repeated=sum(kept[mark.step].epoch != epoch for mark in mine),
                seconds=(max(m.end_ns for m in mine) - min(m.begin_ns for m in mine)) / NS_PER_S,
            )
            for epoch, mine in sorted(by_epoch.items())
        ),
        loss_by_step={
            step: kept[step].loss or 0.0 for step in sorted(kept) if kept[step].loss is not None
        },
        seconds_by_step=seconds_by_step,
    )
