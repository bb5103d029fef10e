"""Upkeep of a store: removal of late rows of deleted runs, expiry, rollups."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from rankscope.collector.retention.retention import DAY_NS, HOUR_NS, Retention, RetentionPolicy

from ..errors import BadInputError
from ..terminal import lines as terminal
from .loops import Loop
from .rollups import Rollups

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankscope.collector.retention.deletion import Deletions
    from rankscope.collector.store.store import Store

UPKEEP_PAUSE_S = 5.0
EXPIRY_PAUSE_NS = HOUR_NS
FIRST_EXPIRY_NS = 60_000_000_000
"""Delay after the start, because rows that wait in the spool may make a run live again."""

DURATION = re.compile(r"(\d{1,6})(h|d)")
UNITS_NS = {"h": HOUR_NS, "d": DAY_NS}
FOREVER = "forever"


class Upkeep:
    """Upkeep of a store.

    Args:
        say: Logs a line.
        monotonic_ns: Clock for the pauses between expiries.
    """

    def __init__(
        self,
        deletions: Deletions,
        retention: Retention,
        rollups: Rollups,
        *,
        say: Callable[[str], None] = terminal.say,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._deletions = deletions
        self._retention = retention
        self._rollups = rollups
        self._say = say
        self._monotonic_ns = monotonic_ns
        self._next_expiry_ns = monotonic_ns() + FIRST_EXPIRY_NS

    def turn(self) -> None:
        """Do the upkeep that is due."""
        for run_id in self._deletions.sweep():
            self._say(f"removed late rows of the deleted run {run_id!r}")
        if self._monotonic_ns() >= self._next_expiry_ns:
            self._expire()
            self._next_expiry_ns = self._monotonic_ns() + EXPIRY_PAUSE_NS
        self._rollups.turn()

    def _expire(self) -> None:
        expired = self._retention.expire()
        num_spans = sum(expired.num_spans.values())
        if num_spans:
            self._say(f"removed {num_spans:,} expired spans of {len(expired.num_spans)} runs")
        for run_id in expired.runs:
            self._say(f"removed the expired run {run_id!r}")


def open_upkeep(store: Store, deletions: Deletions, keep: RetentionPolicy) -> Loop:
    """Return the loop for the upkeep of a store."""
    upkeep = Upkeep(deletions, Retention(store, deletions, policy=keep), Rollups(store))
    return Loop("upkeep", upkeep.turn, pause_s=UPKEEP_PAUSE_S)


def parse_keep(*, spans: str, findings: str, runs: str) -> RetentionPolicy:
    """Return the retention times of the flags.

    Args:
        spans: Of spans: ``48h``, ``30d`` or ``forever``, for example.
        findings: Of spans around findings.
        runs: Of everything else.

    Raises:
        BadInputError: A text is not a duration, or one is shorter than the one before it.
    """
    keep = RetentionPolicy(
        spans_ns=_duration_ns("--keep-spans", spans),
        findings_ns=_duration_ns("--keep-findings", findings),
        runs_ns=_duration_ns("--keep-runs", runs),
    )
    durations_ns = [
        float("inf") if ns is None else ns for ns in (keep.spans_ns, keep.findings_ns, keep.runs_ns)
    ]
    if durations_ns != sorted(durations_ns):
        raise BadInputError(
            f"--keep-spans {spans}, --keep-findings {findings}, --keep-runs {runs}:"
            " each must be at least as long as the one before"
        )
    return keep


def _duration_ns(flag: str, text: str) -> int | None:
    if text == FOREVER:
        return None
    match = DURATION.fullmatch(text)
    if match is None:
        raise BadInputError(f"{flag} {text!r}: give hours or days (48h, 30d), or {FOREVER}")
    return int(match[1]) * UNITS_NS[match[2]]
