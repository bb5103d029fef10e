"""Upkeep of a store: removal of late rows of deleted runs, expiry, rollups, checks of parts."""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import TYPE_CHECKING

from rankscope.collector.errors import StoreQueryError
from rankscope.collector.retention.ledger_merges import LedgerMerges
from rankscope.collector.retention.retention import HOUR_NS, Retention, RetentionPolicy
from rankscope.collector.retention.span_days import DAY_NS
from rankscope.collector.store.lease import PAUSE_S, Lease

from ..errors import BadInputError
from ..terminal import lines as terminal
from .loops import Loop
from .rollups import Rollups

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankscope.collector.retention.deletion import Deletions
    from rankscope.collector.store.store import Store

    from .run_failures import RunFailures

UPKEEP_PAUSE_S = 5.0
MERGE_PAUSE_S = 600.0
EXPIRY_PAUSE_NS = HOUR_NS
FIRST_EXPIRY_NS = 60_000_000_000
"""Delay after the start, because rows that wait in the spool may make a run live again."""

DURATION = re.compile(r"(\d{1,6})(h|d)")
UNITS_NS = {"h": HOUR_NS, "d": DAY_NS}
FOREVER = "forever"


CHECKED_BYTES_PER_S = 16 << 20
"""A tenth of what a disk of a cloud machine reads: 1.4 TB a day."""

RECHECK_NS = 7 * DAY_NS
NO_SUCH_PART = 232
PART_NAME = re.compile(r"[A-Za-z0-9_-]{1,256}")

SELECT_PARTS = """
SELECT table, name, path, bytes_on_disk FROM system.parts
WHERE active AND database = currentDatabase() AND modification_time < now() - 600
ORDER BY table, name
"""
"""Parts that exist for ten minutes: smaller ones are merged into others by then."""


class PartChecks:
    """Checks of the parts of an embedded store: are its files those that were written?

    The engine compares a checksum only when it reads a block, so a part with a wrong bit may be
    noticed months later, when its backup is gone.

    Args:
        monotonic_ns: Clock for the pauses between two checks.
    """

    def __init__(
        self,
        store: Store,
        *,
        say: Callable[[str], None] = terminal.say,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._store = store
        self._say = say
        self._monotonic_ns = monotonic_ns
        self._checked_ns: dict[tuple[str, str], int] = {}
        self._next_ns = monotonic_ns()
        self._damaged: set[tuple[str, str]] = set()

    @property
    def num_damaged(self) -> Counter[str]:
        """Number of damaged parts that are still in use, by table."""
        return Counter(table for table, _ in self._damaged)

    def turn(self) -> None:
        """Check the next part, if it is due."""
        now_ns = self._monotonic_ns()
        if now_ns < self._next_ns:
            return
        parts = {
            (str(row["table"]), str(row["name"])): row for row in self._store.rows(SELECT_PARTS)
        }
        self._damaged &= parts.keys()
        self._checked_ns = {key: ns for key, ns in self._checked_ns.items() if key in parts}
        due = min(parts, key=lambda key: self._checked_ns.get(key, -RECHECK_NS), default=None)
        if due is None or now_ns - self._checked_ns.get(due, -RECHECK_NS) < RECHECK_NS:
            return
        problem = check_part(self._store, *due)
        self._checked_ns[due] = now_ns
        num_bytes = int(parts[due]["bytes_on_disk"])
        self._next_ns = now_ns + num_bytes * 1_000_000_000 // CHECKED_BYTES_PER_S
        if problem is None:
            self._damaged.discard(due)
        elif due not in self._damaged:
            self._damaged.add(due)
            self._say(
                f"table {due[0]} has a damaged part at {parts[due]['path']} ({problem}): reads of"
                " its rows may fail, so restore the folder of the store from a backup, and check"
                " the disk"
            )


def check_part(store: Store, table: str, part: str) -> str | None:
    """Return what is wrong with the files of a part; None if they match their checksums.

    A part that was merged into another in the meantime is not wrong.

    Args:
        store: An embedded store.
        table: Name of its table.
        part: Name as `SELECT_PARTS` shows it.
    """
    if not PART_NAME.fullmatch(part):
        return None  # an engine with other names; a name must not end the quotes
    try:
        (found,) = store.rows(f"CHECK TABLE {{table:Identifier}} PART '{part}'", {"table": table})
    except StoreQueryError as error:
        if error.code == NO_SUCH_PART:
            return None
        raise
    return None if found["is_passed"] else " ".join(str(found["message"]).split())[:300]


class Upkeep:
    """Upkeep of a store.

    Args:
        lease: Says whether this process does it; others on the same store stand by.
        monotonic_ns: Clock for the pauses between expiries.
    """

    def __init__(
        self,
        deletions: Deletions,
        retention: Retention,
        rollups: Rollups,
        *,
        lease: Lease,
        say: Callable[[str], None] = terminal.say,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._lease = lease
        self._deletions = deletions
        self._retention = retention
        self._rollups = rollups
        self._say = say
        self._monotonic_ns = monotonic_ns
        self._next_expiry_ns = monotonic_ns() + FIRST_EXPIRY_NS

    def turn(self) -> None:
        """Do the upkeep that is due. A part that fails delays no other.

        Raises:
            StoreError: A part failed, the first of them; the next call tries it again.
        """
        errors = []
        if not self._lease.is_held:
            return
        for part in (self._sweep, self._expire, self._rollups.turn):
            try:
                part()
            except Exception as error:  # noqa: BLE001  # raised below
                errors.append(error)
        if errors:
            raise errors[0]

    def _sweep(self) -> None:
        for run_id in self._deletions.sweep():
            self._say(f"removed late rows of the deleted run {run_id!r}")

    def _expire(self) -> None:
        if self._monotonic_ns() < self._next_expiry_ns:
            return
        expired = self._retention.expire()
        num_spans = sum(expired.num_spans.values())
        if num_spans:
            self._say(f"removed {num_spans:,} expired spans of {len(expired.num_spans)} runs")
        for run_id in expired.runs:
            self._say(f"removed the expired run {run_id!r}")
        self._next_expiry_ns = self._monotonic_ns() + EXPIRY_PAUSE_NS


def open_upkeep(
    store: Store,
    deletions: Deletions,
    keep: RetentionPolicy,
    failures: RunFailures | None = None,
) -> tuple[Loop, ...]:
    """Return the loops for the upkeep of a store, which one process of a shared store does."""
    lease = Lease(store)
    rollups = Rollups(store, failures=failures)
    retention = Retention(store, deletions, policy=keep)
    upkeep = Upkeep(deletions, retention, rollups, lease=lease)
    ledger = LedgerMerges(store)

    def merge_ledger() -> None:
        if lease.is_held:
            ledger.turn()

    loops = (
        Loop("upkeep", upkeep.turn, pause_s=UPKEEP_PAUSE_S),
        Loop("ledger-merges", merge_ledger, pause_s=MERGE_PAUSE_S),
    )
    if store.path is not None:
        return loops
    return (Loop("upkeep-lease", lease.renew, pause_s=PAUSE_S), *loops)


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
