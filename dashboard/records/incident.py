"""A finding with its life: onset, end, cost, circumstances, notes and whether it is fixed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankscope.analysis.report.report import Finding
    from rankscope.dashboard.records.alert_list import ShownAlert
    from rankscope.dashboard.records.rank_details import HostFinding


class IncidentState(StrEnum):
    """State of an incident."""

    ONGOING = "ongoing"
    OPEN_AT_END = "open at the end of the run"
    """The last steps of the run show it."""

    ENDED_RUN = "ended the run"

    ENDED = "ended"
    """The newest steps no longer show it."""

    FIXED = "verified fixed"
    """And they are significantly faster."""


class FixOutcome(StrEnum):
    """Result of the comparison of the steps since the end with those that showed the finding."""

    VERIFIED = "verified"
    TOO_FEW = "not verified yet"
    NOT_BETTER = "not better"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """Step times while the finding showed, and since then."""

    outcome: FixOutcome
    first_step: int
    """First step after those that showed it."""

    num_before: int
    num_after: int
    num_needed: int
    """Steps on either side that the comparison needs. Start-up, checkpoints and other planned
    pauses do not count."""

    before_s: float | None
    """Mean step time while it showed; None without such a step."""

    after_s: float | None
    """The same since then."""

    margin_s: float | None
    """Half of the width of the 98 % interval of their difference; None if it is unknown."""

    usual_s: float | None
    """The same before the onset; None if no such step is stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A step, and when it was."""

    epoch: int
    step: int
    at_ns: int | None
    """Unix time: of an onset the begin of the step, else its end; None if it is not stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstance:
    """Something that changed before the onset."""

    kind: str
    """restart, host, setting, checkpoint, planned pause, or the kind of an event."""

    text: str
    step: int | None
    """None if it belongs to no step."""

    num_steps_before: int | None
    """Steps from it to the onset; 0: in the same one; None: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownNote:
    """A note about a finding."""

    at_ns: int
    """Unix time."""

    by: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A finding of a run with its life. Times are Unix times."""

    run: str
    number: int
    """Number of the finding in its run, from 0: the last part of the address. It never changes."""

    cause: str
    severity: str
    """"" if unknown."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    """Of these ranks, each once; empty if unknown."""

    evidence: str
    confidence: float
    state: IncidentState
    onset: Moment | None
    """None if no step shows it, as of a crash."""

    last: Moment | None
    """Last step that shows it."""

    checked_step: int
    """Last step of the analysis."""

    opened_ns: int
    """When the analysis first had it."""

    closed_ns: int | None
    """When it no longer had it; None if it is open, or was so at the end of the run."""

    saved_s: float | None
    """What fixing it saves in each of its steps, seconds; None if it has no price."""

    lost_device_h: float | None
    """The same over its steps and all ranks: hours of devices, as in the list of runs."""

    fix: Fix | None
    """None while it shows, and if no step ever did."""

    restarted: Moment | None
    """First step of the job's next epoch after what ended it; None: not started again."""

    came_back_from: int | None
    """Number of the earlier incident of the same cause and ranks in this run; None: the first."""

    came_back_as: int | None
    """Number of the later one; None: it did not come back."""

    before_onset: tuple[Circumstance, ...]
    history: tuple[HostFinding, ...]
    """Other findings of any run on its hosts, the newest first."""

    follows: str
    """Whether findings of other epochs and runs follow the host or the position; "" if unknown."""

    notes: tuple[ShownNote, ...]
    """The newest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentView:
    """An incident with what a page adds to it."""

    incident: Incident
    finding: Finding | None
    """The finding in the shown report, with its proof; None if that no longer has it."""

    alert: ShownAlert | None
    """None if none was raised."""

    may_change: bool
    """Whether who asks may write notes, silence and acknowledge."""
