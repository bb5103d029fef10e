"""Goodput: what the GPU-hours of a run bought, by cause, over all its restarts.

Each moment of a run, from the start of its first process to the end of its last one, has one owner,
and counts for as many ranks as the job had then. So the parts sum to the whole exactly, and none is
negative. What no record explains is a part of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from rankscope.tracer.span import NS_PER_S

from .report.text import format_age, format_device_hours, format_flops_rate, format_percent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

S_PER_H, S_PER_DAY = 3_600, 86_400


class GoodputPart(StrEnum):
    """Owner of a moment of a run."""

    PRODUCTIVE = "productive"
    """Steps that no later epoch trained again, without the parts below."""

    REPEATED = "repeated"
    """Steps behind the checkpoint that a later epoch loaded, and steps that never ended."""

    DETECTION = "detection"
    """From the first failure, or the last progress of a hang, to the end of the last process."""

    RESTART = "restart"
    """From the end of an epoch to the first process of the next one."""

    STARTUP = "startup"
    """From the first process of an epoch to its first step; and what the steps of a start-up take
    longer than usual."""

    CHECKPOINT = "checkpoint"
    """A thread that trains was inside a save."""

    EVALUATION = "evaluation"
    """Price of the evaluations."""

    FINDINGS = "findings"
    """Prices of all other findings."""

    UNKNOWN = "unknown"
    """No record explains it: after the last step, the running step, steps of unknown number."""

    @property
    def word(self) -> str:
        """Return its name in prose."""
        return {"startup": "start-up", "checkpoint": "checkpoints"}.get(self.value, self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputStep:
    """A step of one epoch over all its ranks. All times are Unix ns."""

    step: int
    begin_ns: int
    """First begin of any rank."""

    end_ns: int
    """Last end of any rank; 0 or less if one has not ended it."""

    num_tokens: int | None = None
    saving_ns: int = 0
    """Time in which a thread that trains was inside a save, on any rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRecord:
    """Stored times of one incarnation of a job. All times are Unix ns, None if unknown."""

    epoch: int
    num_ranks: int
    started_ns: int | None
    """Start of its first process."""

    failed_ns: int | None
    """First end of a process that failed or was lost; None also if none did."""

    ended_ns: int | None
    """End of its last process; None also if one is running."""

    last_begin_ns: int | None
    """Last begin of a span in its last step."""

    steps: tuple[GoodputStep, ...]
    """Ascending."""

    final_saving_ns: int = 0
    """Time inside saves after the last step."""

    is_counted: bool = False
    """Whether the tracer counted its steps from 0, because the job reported none: which steps it
    repeats is unknown then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Statements of a diagnosis about the time of steps; empty if there is none."""

    lost_s: Mapping[str, float] = field(default_factory=dict)
    """Price of the findings by cause over all steps that show them, seconds of the job."""

    evaluation_s: float = 0.0
    startup_excess_s: Mapping[int, float] = field(default_factory=dict)
    """What each step of a start-up took longer than usual."""

    flops_by_step: Mapping[int, float] = field(default_factory=dict)
    """Model FLOPs of steps, where they are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochGoodput:
    """One incarnation of a job, with the time until the next one."""

    epoch: int
    num_ranks: int
    steps: tuple[int, int] | None
    """First and last one that ended; None if none did."""

    num_repeated: int
    """Of these, steps that were lost."""

    rank_s: dict[str, float]
    """Seconds of each part times the ranks; findings and evaluations are in ``productive``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Use of the time of a run."""

    wall_s: float
    rank_s: dict[str, float]
    """Seconds of each `GoodputPart` times the ranks; they sum to `total_rank_s`."""

    finding_rank_s: dict[str, float]
    """The part ``findings`` by cause."""

    epochs: tuple[EpochGoodput, ...]
    num_kept_steps: int
    flops_per_s: float | None
    """Model FLOPs of all ranks over the time of the steps that were kept; None if unknown."""

    total_flops_per_s: float | None
    """The same FLOPs over the whole time."""

    days_left: float | None
    """Days until the declared number of steps or tokens, at the pace of the whole run so far; None
    if the job declared none."""

    @property
    def total_rank_s(self) -> float:
        """Return the whole time: seconds times the ranks."""
        return sum(self.rank_s.values())

    @property
    def ratio(self) -> float:
        """Return the productive share of the whole."""
        return self.share(GoodputPart.PRODUCTIVE)

    def share(self, part: str) -> float:
        """Return a part's share of the whole."""
        return self.rank_s[part] / self.total_rank_s

    def hours(self, part: str) -> float:
        """Return a part in GPU-hours."""
        return self.rank_s[part] / S_PER_H

    def to_document(self) -> dict[str, object]:
        """Return the value of the key ``goodput`` of `rankscope analyze --json`."""
        return {
            "ratio": self.ratio,
            "wall_s": self.wall_s,
            "gpu_hours": self.total_rank_s / S_PER_H,
            "parts_gpu_hours": {part: self.hours(part) for part in self.rank_s},
            "findings_gpu_hours": {
                cause: seconds / S_PER_H for cause, seconds in self.finding_rank_s.items()
            },
            "kept_steps": self.num_kept_steps,
            "flops_per_s": self.flops_per_s,
            "total_flops_per_s": self.total_flops_per_s,
            "days_left": self.days_left,
            "epochs": [
                {
                    "epoch": epoch.epoch,
                    "ranks": epoch.num_ranks,
                    "steps": epoch.steps and list(epoch.steps),
                    "repeated_steps": epoch.num_repeated,
                    "parts_gpu_hours": {
                        part: seconds / S_PER_H for part, seconds in epoch.rank_s.items()
                    },
                }
                for epoch in self.epochs
            ],
        }


def describe_goodput(goodput: Goodput) -> str:
    """Return what a run's goodput is a share of, its rate of computation and what is left."""
    of = f"Of {format_device_hours(goodput.total_rank_s / S_PER_H)}"
    if len(goodput.epochs) > 1:
        of += f" in {len(goodput.epochs)} epochs"
    sentences = [f"{of}, {format_percent(goodput.ratio, digits=1)} trained steps that were kept."]
    if goodput.flops_per_s is not None:
        sentences.append(
            f"All ranks together compute {format_flops_rate(goodput.flops_per_s)} while steps run,"
            f" {format_flops_rate(goodput.total_flops_per_s)} over the whole time."
        )
    if goodput.days_left:
        left = format_age(round(goodput.days_left * S_PER_DAY * NS_PER_S))
        sentences.append(f"At the pace so far, the declared end is {left} away.")
    return " ".join(sentences)


def measure_goodput(
    records: Sequence[EpochRecord],
    diagnosis: Diagnosis,
    *,
    until_ns: int | None = None,
    total_steps: int | None = None,
    total_tokens: int | None = None,
) -> Goodput | None:
    """Return what the time of a run was spent on; None if nothing of it has a time.

    An epoch resumes at its first step, so the steps of earlier epochs from that number on are lost.
    What several owners claim belongs to the one that comes first in time; prices of findings take
    at most what is left of the steps that were kept.

    Args:
        records: The epochs, ascending.
        diagnosis: What is known of the steps' time beside the records.
        until_ns: The present of a running job, Unix time; None: the job is over.
        total_steps: Steps that the job declared; None if it did not.
        total_tokens: Tokens likewise.
    """
    timelines = [
        _Timeline(record, records[number + 1 :], until_ns) for number, record in enumerate(records)
    ]
    known = [timeline for timeline in timelines if timeline.begin_ns is not None]
    if not known:
        return None
    at_ns = known[0].begin_ns or 0
    begin_ns = at_ns
    for timeline in known:
        at_ns = timeline.split(at_ns, diagnosis.startup_excess_s)
    wall_s = (at_ns - begin_ns) / NS_PER_S
    if wall_s <= 0:
        return None
    rank_ns = dict.fromkeys(GoodputPart, 0)
    for timeline in known:
        for part, part_ns in timeline.part_ns.items():
            rank_ns[part] += part_ns * timeline.record.num_ranks
    rank_s = {str(part): part_ns / NS_PER_S for part, part_ns in rank_ns.items()}
    num_ranks = known[-1].record.num_ranks
    _take(rank_s, GoodputPart.EVALUATION, diagnosis.evaluation_s * num_ranks)
    finding_rank_s = {
        cause: _take(rank_s, GoodputPart.FINDINGS, seconds * num_ranks)
        for cause, seconds in diagnosis.lost_s.items()
    }
    kept = [step for timeline in known for step in timeline.kept]
    kept_ns = sum(timeline.kept_ns for timeline in known)
    flops = sum(diagnosis.flops_by_step.get(step.step, 0.0) for step in kept)
    has_flops = bool(kept) and all(step.step in diagnosis.flops_by_step for step in kept)
    return Goodput(
        wall_s=wall_s,
        rank_s=rank_s,
        finding_rank_s=finding_rank_s,
        epochs=tuple(timeline.summarize() for timeline in known),
        num_kept_steps=len(kept),
        flops_per_s=flops * NS_PER_S / kept_ns if has_flops else None,
        total_flops_per_s=flops / wall_s if has_flops else None,
        days_left=min(_days_left(kept, total_steps, total_tokens, wall_s), default=None),
    )


def _take(rank_s: dict[str, float], part: GoodputPart, wanted_s: float) -> float:
    """Move time from the productive part to another one, as far as there is any; return it."""
    taken_s = min(max(wanted_s, 0.0), rank_s[GoodputPart.PRODUCTIVE])
    rank_s[GoodputPart.PRODUCTIVE] -= taken_s
    rank_s[part] += taken_s
    return taken_s


def _days_left(
    kept: Sequence[GoodputStep], total_steps: int | None, total_tokens: int | None, wall_s: float
) -> Iterator[float]:
    """Yield the days until a number of steps, and of tokens if those of all steps are known."""
    num_tokens = {step.step: step.num_tokens or 0 for step in kept}
    if total_steps is not None and kept:
        left = max(total_steps - max(num_tokens) - 1, 0)
        yield left * wall_s / len(kept) / S_PER_DAY
    is_whole = bool(kept) and len(num_tokens) == max(num_tokens) + 1
    if total_tokens is not None and is_whole and min(num_tokens.values()) > 0:
        done = sum(num_tokens.values())
        yield max(total_tokens - done, 0) * wall_s / done / S_PER_DAY


class _Timeline:
    """The time of one epoch, up to the begin of the next one.

    Args:
        later: The epochs after it, ascending.
        until_ns: The present, if the job is running.
    """

    def __init__(
        self, record: EpochRecord, later: Sequence[EpochRecord], until_ns: int | None
    ) -> None:
        self.record = record
        self.part_ns = dict.fromkeys(GoodputPart, 0)
        self.kept: list[GoodputStep] = []
        self.kept_ns = 0
        """Time of the steps that were kept."""

        self._following = later[0] if later else None
        resumed = [follower for follower in later if follower.steps]
        self._resume_step = min((follower.steps[0].step for follower in resumed), default=None)
        self._is_resume_known = not any(follower.is_counted for follower in resumed)
        self._until_ns = until_ns
        self._at_ns = 0
        failed_ns = record.failed_ns
        self._ended = [
            step
            for step in record.steps
            if step.end_ns > step.begin_ns and (failed_ns is None or step.end_ns <= failed_ns)
        ]
        """No step ends after a rank has failed: what ended its record was the end of the process.
        """

    @property
    def begin_ns(self) -> int | None:
        """Begin of the epoch; None if nothing of it has a time."""
        record = self.record
        if record.started_ns is not None:
            return record.started_ns
        return record.steps[0].begin_ns if record.steps else None

    def split(self, at_ns: int, startup_excess_s: Mapping[int, float]) -> int:
        """Split the time from ``at_ns`` on; return where the next epoch's begins."""
        self._at_ns, record = at_ns, self.record
        has_start = record.started_ns is not None
        self._spend(self.begin_ns, GoodputPart.UNKNOWN)
        if record.steps:
            before_steps = GoodputPart.STARTUP if has_start else GoodputPart.UNKNOWN
            self._spend(record.steps[0].begin_ns, before_steps)
        for step in self._ended:
            self._split_step(step, startup_excess_s.get(step.step, 0.0))
        if record.failed_ns is not None:
            stuck_ns = self._before_following(self._find_stuck_ns(record.failed_ns))
            self._spend(stuck_ns, GoodputPart.REPEATED if record.steps else GoodputPart.STARTUP)
            self._spend(self._before_following(record.ended_ns), GoodputPart.DETECTION)
        else:
            saved_ns = self._before_following(self._at_ns + record.final_saving_ns)
            self._spend(saved_ns, GoodputPart.CHECKPOINT)
        self._split_end()
        return self._at_ns

    def summarize(self) -> EpochGoodput:
        """Return the epoch with its parts; call `split` first."""
        ended, num_ranks = self._ended, self.record.num_ranks
        return EpochGoodput(
            epoch=self.record.epoch,
            num_ranks=num_ranks,
            steps=(ended[0].step, ended[-1].step) if ended else None,
            num_repeated=sum(self._is_lost(step) for step in ended),
            rank_s={
                str(part): part_ns * num_ranks / NS_PER_S for part, part_ns in self.part_ns.items()
            },
        )

    def _spend(self, end_ns: int | None, part: GoodputPart) -> int:
        """Give the time up to ``end_ns`` to a part, if that is not past; return it."""
        spent_ns = 0 if end_ns is None else max(end_ns - self._at_ns, 0)
        self.part_ns[part] += spent_ns
        self._at_ns += spent_ns
        return spent_ns

    def _is_lost(self, step: GoodputStep) -> bool:
        return (
            self._is_resume_known
            and self._resume_step is not None
            and step.step >= self._resume_step
        )

    def _split_step(self, step: GoodputStep, startup_excess_s: float) -> None:
        self._spend(step.begin_ns, GoodputPart.UNKNOWN)
        if not self._is_resume_known:
            self._spend(step.end_ns, GoodputPart.UNKNOWN)
            return
        if self._is_lost(step):
            self._spend(step.end_ns, GoodputPart.REPEATED)
            return
        begin_ns = self._at_ns
        self._spend(min(begin_ns + step.saving_ns, step.end_ns), GoodputPart.CHECKPOINT)
        excess_ns = round(startup_excess_s * NS_PER_S)
        self._spend(min(self._at_ns + excess_ns, step.end_ns), GoodputPart.STARTUP)
        self._spend(step.end_ns, GoodputPart.PRODUCTIVE)
        self.kept.append(step)
        self.kept_ns += self._at_ns - begin_ns

    def _find_stuck_ns(self, at_ns: int) -> int:
        """Return when a job was stuck that made no progress until ``at_ns``; else that time.

        A job in which no rank begins anything for longer than its longest step is stuck.
        """
        last_ns = self.record.last_begin_ns
        longest_ns = max((step.end_ns - step.begin_ns for step in self._ended), default=None)
        is_stuck = longest_ns is not None and last_ns is not None and at_ns - last_ns > longest_ns
        return last_ns if is_stuck and last_ns is not None else at_ns

    def _split_end(self) -> None:
        record, following, until_ns = self.record, self._following, self._until_ns
        if following is not None:
            is_known = record.failed_ns is None or record.ended_ns is not None
            self._spend(
                following.started_ns, GoodputPart.RESTART if is_known else GoodputPart.UNKNOWN
            )
            return
        self._spend(record.ended_ns, GoodputPart.UNKNOWN)
        if until_ns is None:
            return
        if record.failed_ns is None:
            self._spend(
                self._find_stuck_ns(until_ns),
                GoodputPart.UNKNOWN if record.steps else GoodputPart.STARTUP,
            )
        self._spend(until_ns, GoodputPart.DETECTION)

    def _before_following(self, at_ns: int | None) -> int | None:
        """Return a time, at most the start of the next epoch, which has the devices then."""
        started_ns = None if self._following is None else self._following.started_ns
        return at_ns if at_ns is None or started_ns is None else min(at_ns, started_ns)
