"""Liveness of a run: which ranks are silent while others go on, and whether all have stopped."""

from __future__ import annotations

from dataclasses import dataclass

RECENT_NS = 5_000_000_000
"""Heartbeats come once a second; at twice the longest delay of an agent one is still recent."""

SILENT_NS = 15_000_000_000
"""Three times `RECENT_NS`: longer than one retry of the agent delays a heartbeat."""

MAX_SHOWN = 10

SILENT_STEPS = 2
"""Times the usual step time after which a run without a new step is silent."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSilence:
    """A running job in which no rank has ended a step for long."""

    last_step: int
    """The last step of the diagnosis."""

    age_ns: int
    """Time since any rank ended a step."""

    step_time_ns: int
    """Usual time of a step."""


def find_silence(
    *, last_step: int, ended_ns: int, step_time_ns: int, now_ns: int
) -> StepSilence | None:
    """Return the silence of a running job; None as long as the next step may just be under way.

    A step that has ended is in the store `RECENT_NS` later at the latest, so shorter steps need
    that much more time.

    Args:
        ended_ns: When a rank last ended a step, Unix time of the collector's clock.
        now_ns: Unix time of the same clock.
    """
    age_ns = now_ns - ended_ns
    if age_ns <= max(SILENT_STEPS * step_time_ns, step_time_ns + RECENT_NS):
        return None
    return StepSilence(last_step=last_step, age_ns=age_ns, step_time_ns=step_time_ns)
