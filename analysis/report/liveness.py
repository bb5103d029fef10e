"""Liveness of a run's ranks: which ones are silent while others go on."""

from __future__ import annotations

from dataclasses import dataclass

RECENT_NS = 5_000_000_000
"""Heartbeats come once a second; at twice the longest delay of an agent one is still recent."""

SILENT_NS = 15_000_000_000
"""Three times `RECENT_NS`: longer than one retry of the agent delays a heartbeat."""

MAX_SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentRank:
    """A rank whose last heartbeat is more than `SILENT_NS` old."""

    rank: int
    host: str
    state: str
    """As of its last heartbeat: ``starting``, ``training``, ``silent``, ``failed`` or ``lost``."""

    step: int | None
    """The newest step with a record; None before the first."""

    age_ns: int
    """Time since its last heartbeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLiveness:
    """Ranks of a live run by the age of their last heartbeat, without ranks that ended well."""

    num_ranks: int
    num_recent: int
    """Ranks whose last heartbeat is at most `RECENT_NS` old."""

    num_silent: int
    """Ranks whose last heartbeat is more than `SILENT_NS` old."""

    silent: tuple[SilentRank, ...]
    """The longest silence first, `MAX_SHOWN` at most."""

    @property
    def is_uneven(self) -> bool:
        """True if some ranks are silent while others go on."""
        return 0 < self.num_silent < self.num_ranks
