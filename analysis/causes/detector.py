"""The contract of a cause: how it is named and searched for, and what its detector is given."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..readers.workers import find_workers
from ..report.report import Finding
from ..statistics.link_profile import profile_links
from ..statistics.thresholds import THRESHOLDS
from .host_gaps import find_common_pauses, tabulate_gaps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from rankscope.tracer.topology import Coords

    from ..breakdown.waterfall import Part
    from ..replay.model import ComputeItems, Reading
    from ..replay.replayer import Replayer
    from ..statistics.link_profile import LinkProfile
    from ..statistics.peers import ComputeProfile
    from ..trace.context import RunContext
    from ..trace.tables import RankInfo, RunInfo, SpanTable, StepTable
    from .candidate import Candidate
    from .host_gaps import CommonPauses, HostGaps


class Subject(Enum):
    """Subject of the verdict's sentence about a cause."""

    RANKS = "the ranks at fault"
    LINK = "one link, with the ranks that it joins"
    STAGE = "one pipeline stage"
    JOB = "the whole job: the ranks that show it are not at fault"


class ShownIn(Enum):
    """Operations in which a cause shows."""

    COMPUTE = "compute"
    TRANSFERS = "transfers"


class ProofForm(Enum):
    """Picture that proves a finding: what `analysis.proof` compares with what."""

    COMPUTE = "compute of each micro-batch beside that of peers"
    DEVICES = "the same, and the readings of the device beside those of others"
    STAGES = "compute of a stage beside that of other stages"
    LENGTHS = "time of micro-batches against their lengths"
    LINKS = "rate of a link beside that of alike ones"
    HOST = "gaps and host spans of a rank beside those of others, or of other steps"
    RECOMPILES = "the same, and the compile ids"
    STATES = "last operation of each rank"
    SETTINGS = "values of a setting on each side"
    MEMORY = "peak of the memory of ranks beside that of others"
    HOSTS = "hosts of each group"


@dataclass(frozen=True, slots=True)
class HostTime:
    """Time of a host in which a cause shows, as parts of the waterfall."""

    name: str
    parts: tuple[Part, ...]
    is_of_all: bool = False
    """Whether all ranks lose it at once, so that a rank is compared with its own median step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One cause, with all that the verdict, its evidence, the alerts and the recurrence need."""

    name: str
    """As it is written in findings, in the store and in the JSON document."""

    subject: Subject = Subject.RANKS
    one: str = ""
    """Predicate of the verdict's sentence about one rank: "is slow"."""

    several: str = ""
    """The same about several ranks: "are slow"."""

    sentence: str = ""
    """Whole sentence without its full stop, for a subject `JOB` or a finding without ranks."""

    shown_in: ShownIn | HostTime | None = None
    """Where its proof is looked for; None: it is about no time."""

    proof_form: ProofForm | None = None
    """Its picture on the proof card; None: it has none."""

    is_alarm: bool = True
    """False: reported beside `healthy`, which remains the first finding."""

    has_onset: bool = True
    """False: it is in the work of all steps alike, so that nothing began that needs an answer at
    once. Without a rank it alerts only if the job straggles (S of 1.1, arXiv 2505.05713), which is
    `Severity.CRITICAL`; the report and the pages always show it."""

    ends_run: bool = False
    """Whether the job ends with it, so that it explains none of the waits before."""

    has_place: bool = False
    """Whether it belongs to a host or a position, so that its recurrence is tracked."""

    recurs_as: str = ""
    """Cause that it counts as in a recurrence, by name; empty: itself."""


INSUFFICIENT_EVIDENCE = Cause(name="insufficient-evidence", is_alarm=False)
"""Something is unusual and its cause cannot be decided. Reported only if no alarm is."""


def insufficient(evidence: str) -> Finding:
    """Return an `insufficient-evidence` with its reason."""
    return Finding(cause=INSUFFICIENT_EVIDENCE.name, confidence=1.0, evidence=evidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A run as it was recorded: the input of detectors that need no replay."""

    run: RunInfo
    spans: SpanTable
    steps: StepTable
    context: RunContext
    num_earlier_steps: int = 0
    """Steps of the run before these."""

    reading: Reading | None = None
    """The spans as operations; None if no step can be replayed."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run that can be replayed, and the evidence that several detectors share.

    Each piece of evidence is computed on its first use.
    """

    reading: Reading
    profile: ComputeProfile
    """Compute of each rank against its peers."""

    replayer: Replayer
    ranks: Mapping[int, RankInfo]
    steps: StepTable
    context: RunContext
    slowdown: float | None
    """S of the run."""

    tokens_by_step: Mapping[int, int]
    """Tokens of the job's steps, as far as they are known."""

    equalized: ComputeItems | None = None
    """Compute as if all micro-batches had the same length; None if their lengths are unknown."""

    work: tuple[NDArray[np.float64], ...] = ()
    """Measures of how much each item of the compute is (`declared_work`); empty: all are alike."""

    @cached_property
    def coords(self) -> dict[int, Coords]:
        """Return the position of each rank."""
        return {rank: info.coords for rank, info in self.ranks.items()}

    @cached_property
    def workers(self) -> dict[int, tuple[int, ...]]:
        """Return an identity for each rank, equal for partners whose compute looks the same.

        Those are ranks of one worker whose communication with each other is not traced.
        """
        return find_workers(self.ranks, (link.kind for link in self.reading.transfers.links))

    @cached_property
    def step_ns(self) -> dict[int, tuple[int, int]]:
        """Return (begin, end) of each replayed step over all ranks, Unix time."""
        numbers = self.reading.steps
        rows = np.flatnonzero(np.isin(self.steps.step, numbers))
        index = np.searchsorted(numbers, self.steps.step[rows])
        first = np.full(len(numbers), np.iinfo(np.int64).max)
        last = np.full(len(numbers), np.iinfo(np.int64).min)
        np.minimum.at(first, index, self.steps.start_ns[rows])
        np.maximum.at(last, index, self.steps.end_ns[rows])
        return dict(zip(numbers, zip(first.tolist(), last.tolist(), strict=True), strict=True))

    @cached_property
    def gaps(self) -> HostGaps:
        """Return the host gaps by rank and step."""
        reading = self.reading
        return tabulate_gaps(self.profile, reading.gaps, reading.model.operations.duration_ns)

    @cached_property
    def common_pauses(self) -> CommonPauses:
        """Return the steps in which nearly all ranks pause at once."""
        saves_ns = [event.at_ns for event in self.context.events if event.kind == "checkpoint"]
        numbers = np.array(sorted(self.step_ns), dtype=np.int64)
        ends_ns = np.array([self.step_ns[step][1] for step in numbers.tolist()], dtype=np.int64)
        # A save is in the first step that ends after it.
        step = np.searchsorted(ends_ns, np.array(saves_ns, dtype=np.int64))
        return find_common_pauses(self.gaps, numbers[step[step < len(numbers)]])

    @property
    def planned_steps(self) -> tuple[int, ...]:
        """Return the steps with a planned pause of all ranks, or with forwards of an evaluation."""
        pauses = self.common_pauses
        paused = self.profile.steps[pauses.columns[pauses.is_planned]]
        return tuple(np.union1d(paused, self.reading.evaluated_steps).tolist())

    @cached_property
    def links(self) -> LinkProfile:
        """Return the transfer times of each link, compared with alike ones."""
        step_ns = float(np.median(self.reading.actual_ns))
        return profile_links(
            self.reading.transfers,
            self.reading.steps,
            self.ranks,
            min_lost_ns=THRESHOLDS.min_loss_ratio * step_ns,
        )


class CauseModule(Protocol):
    """A module of this package, named as the cause that it finds."""

    CAUSE: Cause


class Detector(CauseModule, Protocol):
    """A module that searches the replayed steps for its cause."""

    def detect(self, case: Case, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
        """Return the candidates found so far, with those of this cause added.

        A detector may mark candidates that its own cause explains (`Candidate.explained_by`). It
        must not drop them: later detectors need them as explanations.
        """
        ...


class RecordDetector(CauseModule, Protocol):
    """A module that needs no replay. Its findings have no price."""

    def detect(self, record: Record) -> Sequence[Finding]:
        """Return the findings of this cause."""
        ...
