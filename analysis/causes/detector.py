"""The contract of a cause: how it is named and searched for, and what its detector is given."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..readers.tp_partners import find_workers
from .host_gaps import common_pauses, tabulate_gaps
from .link_profile import profile_links

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankscope.tracer.topology import Coords

    from ..replay.model import ComputeItems, Reading
    from ..replay.what_if import Replayer
    from ..report.report import Finding
    from ..statistics.peers import ComputeProfile
    from ..trace.context import RunContext
    from ..trace.tables import RankInfo, RunInfo, SpanTable, StepTable
    from .candidate import Candidate
    from .host_gaps import CommonPauses, HostGaps
    from .link_profile import LinkProfile


class Subject(Enum):
    """What the verdict's sentence about a cause speaks of."""

    RANKS = "the ranks at fault"
    LINK = "one link, with the ranks that it joins"
    STAGE = "one pipeline stage"
    JOB = "the whole job: the ranks that show it are not at fault"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One cause: its name, and what the verdict, the alarms and the recurrence need of it."""

    name: str
    """As findings, the store and the JSON document spell it."""

    subject: Subject = Subject.RANKS
    one: str = ""
    """Predicate of the verdict's sentence about one rank: "is slow"."""

    several: str = ""
    """The same about several ranks: "are slow"."""

    sentence: str = ""
    """Whole sentence, without its full stop, if the finding names no ranks or its subject is the
    job."""

    is_alarm: bool = True
    """False: reported beside `healthy` and does not replace it."""

    ends_run: bool = False
    """Whether the job ended with it: the waits of the steps before do not follow from it."""

    has_place: bool = False
    """Whether it belongs to a host or a position, so that its recurrence can be followed."""

    recurs_as: str = ""
    """Name of the cause that is the same but for what was sampled; empty: its own."""


INSUFFICIENT_EVIDENCE = Cause(name="insufficient-evidence", is_alarm=False)
"""Something is unusual, and what it is cannot be decided. Reported only if nothing else is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What was recorded of a run: the input of detectors that need no replay."""

    run: RunInfo
    spans: SpanTable
    steps: StepTable
    context: RunContext
    reading: Reading | None = None
    """The spans as operations; None if no step can be replayed."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run that can be replayed, with the evidence that several detectors share.

    The evidence is computed when a detector first asks for it.
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

    equalized: ComputeItems | None = None
    """Compute as if all micro-batches had the same length; None if their lengths are unknown."""

    @cached_property
    def coords(self) -> dict[int, Coords]:
        """Return the position of each rank."""
        return {rank: info.coords for rank, info in self.ranks.items()}

    @cached_property
    def workers(self) -> dict[int, tuple[int, ...]]:
        """Return, for each rank, what it shares with the partners whose compute looks the same."""
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
        """Return the host gaps as matrices over ranks and steps."""
        reading = self.reading
        return tabulate_gaps(self.profile, reading.gaps, reading.model.operations.duration_ns)

    @cached_property
    def common_pauses(self) -> CommonPauses:
        """Return the steps in which nearly all ranks pause at once."""
        return common_pauses(self.gaps)

    @cached_property
    def links(self) -> LinkProfile:
        """Return the transfer times of each link against alike ones."""
        return profile_links(self.reading.transfers, self.reading.steps, self.coords)


class CauseModule(Protocol):
    """A module of this package that is named as its cause."""

    CAUSE: Cause


class Detector(CauseModule, Protocol):
    """One that searches for its cause in the replayed steps."""

    def detect(self, case: Case, found: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
        """Return the candidates with those of this cause added.

        Args:
            case: The run.
            found: Candidates of the causes that were searched for before. A detector may mark
                those that its own cause explains (`Candidate.explained_by`), never drop them: what
                they name still explains what comes after.
        """
        ...


class RecordDetector(CauseModule, Protocol):
    """One that needs no replay: its findings have no price."""

    def detect(self, record: Record) -> Sequence[Finding]:
        """Return the findings of this cause."""
        ...
