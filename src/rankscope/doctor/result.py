"""Results of checks: what one check says of a part of the host."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class State(StrEnum):
    """Result of a check, the worst first."""

    ERROR = "error"
    """Keep jobs from this host until it is fixed."""

    WARNING = "warning"
    """It may cost speed or fail later."""

    HEALTHY = "healthy"
    NOT_APPLICABLE = "not applicable"
    """The host does not have what is checked, or does not show it."""


ORDER = tuple(State)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The statement of a check about the host or a part of it."""

    state: State
    reason: str
    """A sentence without its full stop, with the numbers that were read."""

    remedy: str = ""
    """What to do; empty if nothing."""

    part: str = ""
    """The part of the host, such as ``GPU 3``; empty: the host as a whole."""

    device: str = ""
    """UUID of a GPU, as `collector.host.gpu.plain_uuid` has it."""

    value: str = ""
    """What must be equal on all hosts, such as a version; empty: nothing."""

    @property
    def is_deviation(self) -> bool:
        """True if something is wrong."""
        return self.state in {State.ERROR, State.WARNING}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Outcome):
    """An outcome with the check that it is of."""

    section: str
    check: str

    @classmethod
    def of(cls, outcome: Outcome, *, section: str, check: str) -> Result:
        """Return an outcome as that of a check."""
        return cls(section=section, check=check, **asdict(outcome))


def healthy(reason: str, *, part: str = "", value: str = "") -> Outcome:
    """Return the outcome of a part in which nothing is wrong."""
    return Outcome(state=State.HEALTHY, reason=reason, part=part, value=value)


def warning(reason: str, remedy: str, *, part: str = "", device: str = "") -> Outcome:
    """Return the outcome of a part that may cost speed or fail later."""
    return Outcome(state=State.WARNING, reason=reason, remedy=remedy, part=part, device=device)


def error(reason: str, remedy: str, *, part: str = "", device: str = "") -> Outcome:
    """Return the outcome of a part that no job may use."""
    return Outcome(state=State.ERROR, reason=reason, remedy=remedy, part=part, device=device)


def not_applicable(reason: str) -> Outcome:
    """Return the outcome of what the host does not have."""
    return Outcome(state=State.NOT_APPLICABLE, reason=reason)


def worst_state(outcomes: Iterable[Outcome]) -> State:
    """Return the worst state of any outcome; not applicable if there is none."""
    return min((each.state for each in outcomes), key=ORDER.index, default=State.NOT_APPLICABLE)


def count_states(outcomes: Iterable[Outcome]) -> dict[State, int]:
    """Return the number of outcomes by state, the worst first."""
    counted = Counter(each.state for each in outcomes)
    return {state: counted[state] for state in ORDER}
