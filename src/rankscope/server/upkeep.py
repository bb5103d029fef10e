"""What a server does for its store besides writing: sweep up, expire, roll up."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from rankscope.collector.retention.retention import DAY_NS, HOUR_NS, Keep, Retention

from ..errors import BadInputError
from ..terminal import lines as terminal
from .loops import Loop
from .rollups import Rolling

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankscope.collector.retention.deletion import Deletions
    from rankscope.collector.store.store import Store

UPKEEP_PAUSE_S = 5.0
EXPIRE_EVERY_NS = HOUR_NS
FIRST_EXPIRE_NS = 60_000_000_000
"""After the start: what waits in the spool may make a run live again."""

DURATION = re.compile(r"(\d{1,6})(h|d)")
UNITS_NS = {"h": HOUR_NS, "d": DAY_NS}
FOR_EVER = "forever"


class Upkeep:
    """One turn of upkeep.

    Args:
        deletions: The store's tombstones.
        retention: Removes what is kept no longer.
        rolling: Rolls up the steps that close.
        say: Tells a line to the person at the terminal.
        monotonic_ns: Clock for the pauses between two removals.
    """

    def __init__(
        self,
        deletions: Deletions,
        retention: Retention,
        rolling: Rolling,
        *,
        say: Callable[[str], None] = terminal.say,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._deletions = deletions
        self._retention = retention
        self._rolling = rolling
        self._say = say
        self._monotonic_ns = monotonic_ns
        self._expire_ns = monotonic_ns() + FIRST_EXPIRE_NS

    def turn(self) -> None:
        """Do what is due."""
        for run_id in self._deletions.sweep():
            self._say(f"removed what came late of the deleted run {run_id!r}")
        if self._monotonic_ns() >= self._expire_ns:
            self._expire()
            self._expire_ns = self._monotonic_ns() + EXPIRE_EVERY_NS
        self._rolling.turn()

    def _expire(self) -> None:
        went = self._retention.expire()
        num_spans = sum(went.num_spans.values())
        if num_spans:
            self._say(
                f"removed {num_spans:,} spans of {len(went.num_spans)} runs: kept long enough"
            )
        for run_id in went.runs:
            self._say(f"removed run {run_id!r}: kept long enough")


def open_upkeep(store: Store, deletions: Deletions, keep: Keep) -> Loop:
    """Return the loop that keeps a store in order.

    Args:
        store: The store.
        deletions: Its tombstones.
        keep: How long what is kept.
    """
    upkeep = Upkeep(deletions, Retention(store, deletions, keep=keep), Rolling(store))
    return Loop("upkeep", upkeep.turn, pause_s=UPKEEP_PAUSE_S)


def parse_keep(*, spans: str, findings: str, runs: str) -> Keep:
    """Return how long what is kept, from the words of the command line.

    Args:
        spans: ``48h``, ``30d``, or ``forever``.
        findings: Of the spans around findings.
        runs: Of all else.

    Raises:
        BadInputError: One is no such word, or they do not grow in this order.
    """
    keep = Keep(
        spans_ns=_duration_ns("--keep-spans", spans),
        findings_ns=_duration_ns("--keep-findings", findings),
        runs_ns=_duration_ns("--keep-runs", runs),
    )
    grows = [float("inf") if ns is None else ns for ns in (
        keep.spans_ns, keep.findings_ns, keep.runs_ns
    )]  # fmt: skip
    if grows != sorted(grows):
        raise BadInputError(
            f"--keep-spans {spans}, --keep-findings {findings}, --keep-runs {runs}:"
            " each must last at least as long as the one before"
        )
    return keep


def _duration_ns(flag: str, text: str) -> int | None:
    if text == FOR_EVER:
        return None
    match = DURATION.fullmatch(text)
    if match is None:
        raise BadInputError(f"{flag} {text!r}: give hours or days (48h, 30d), or {FOR_EVER}")
    return int(match[1]) * UNITS_NS[match[2]]
