"""Which ranks of a run have fallen silent while others go on."""

from __future__ import annotations

from dataclasses import dataclass

RECENT_NS = 5_000_000_000
"""A rank is heard of once a second; twice as late as an agent's slowest look is still recent."""

SILENT_NS = 15_000_000_000
"""Three times `RECENT_NS`: later than one retry of its agent makes it."""

MAX_SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentRank:
    """A rank that was not heard of for `SILENT_NS`."""

    rank: int
    host: str
    state: str
    """As of its last heartbeat: ``starting``, ``training``, ``silent``, ``failed`` or ``lost``."""

    step: int | None
    """The newest that it recorded anything of; None before the first."""

    age_ns: int
    """From its last heartbeat to now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """How many ranks of a live run are heard of; those that ended well are left out."""

    num_ranks: int
    num_recent: int
    """Heard of within `RECENT_NS`."""

    num_silent: int
    """Not heard of for `SILENT_NS`."""

    silent: tuple[SilentRank, ...]
    """The longest silence first, `MAX_SHOWN` at most."""

    @property
    def is_uneven(self) -> bool:
        """Whether some fell silent while others go on."""
        return 0 < self.num_silent < self.num_ranks
