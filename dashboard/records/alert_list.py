"""Alerts as a page shows them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class AlertState(StrEnum):
    """State of an alert for a person."""

    OPEN = "open"
    ACKNOWLEDGED = "acknowledged"
    SILENCED = "silenced"
    RESOLVED = "resolved"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownAlert:
    """One alert."""

    name: str
    """Short name, as commands take it."""

    run: str
    """"" if it is about a host."""

    rule: str
    cause: str
    """"" without a finding."""

    severity: str
    state: AlertState
    steps: tuple[int, int] | None
    """First and last step that showed it when it fired."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    text: str
    cost: str
    """What it costs, in words; "" if unknown."""

    action: str
    """What to do next, or the section of a document."""

    fired: str
    """Time in UTC."""

    resolved: str
    """Time in UTC; "" while it is active."""

    acknowledged_by: str
    delivery: str
    """Worst delivery of its current state over the receivers."""

    resolved_because: str = ""
    """Why it was resolved; "" while it is active."""

    incident: int | None = None
    """Number of its finding in the run; None if it has none, or that is not tracked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSilence:
    """One silence that is in force."""

    name: str
    covers: str
    until: str
    """Time in UTC."""

    by: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertList:
    """Alerts and silences of a store, the newest first."""

    alerts: tuple[ShownAlert, ...] = ()
    num_left_out: int = 0
    """Older alerts that are not listed."""

    silences: tuple[ShownSilence, ...] = ()
    may_change: bool = False
    """Whether who asks may silence and acknowledge."""
