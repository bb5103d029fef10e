"""Account of records: produced = stored + dropped by reason + still buffered.

A record is a span, a step or a micro-batch: all that a tracer writes into the spool and counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

TORN = "torn"
"""Reason of a record whose process ended while writing it."""

TRUNCATED = "segment-truncated"
"""Reason of a record that was cut off with the end of its segment's file."""

INVALID = "invalid"
"""Reason of a record that was stored in table ``bad_rows``, and not as a measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordAccount:
    """Numbers of records of a rank or a run."""

    produced: int | None = None
    """None if unknown: not all processes have reported how many records they made."""

    stored: int | None = None
    """None if the source is not a store."""

    dropped: Mapping[str, int] = field(default_factory=dict)
    """By reason, with only the reasons that occurred."""

    buffered: int | None = None
    """In the spool or on the way to the store; None if ``produced`` is unknown."""

    @property
    def num_dropped(self) -> int:
        """Number of dropped records, for any reason."""
        return sum(self.dropped.values())


def account_records(
    *, published: int | None, stored: int, dropped: Mapping[str, int]
) -> RecordAccount:
    """Return the account of one rank.

    The tracer publishes its count once a second, and the collector's count of what is stored may
    be newer. At least what was stored or dropped was produced, so a published count below that is
    raised to it.

    Args:
        published: Records that the rank's processes produced by their own count; None if unknown.
    """
    lost = {reason: count for reason, count in sorted(dropped.items()) if count}
    known = stored + sum(lost.values())
    if published is None:
        return RecordAccount(stored=stored, dropped=lost)
    produced = max(published, known)
    return RecordAccount(produced=produced, stored=stored, dropped=lost, buffered=produced - known)


def sum_accounts(accounts: Iterable[RecordAccount]) -> RecordAccount:
    """Return the account of all; a number that is unknown of one is unknown of all."""
    every = tuple(accounts)
    if not every:
        return RecordAccount()
    dropped: Counter[str] = Counter()
    for account in every:
        dropped.update(account.dropped)
    return RecordAccount(
        produced=_sum_known(account.produced for account in every),
        stored=_sum_known(account.stored for account in every),
        dropped=dict(sorted(dropped.items())),
        buffered=_sum_known(account.buffered for account in every),
    )


def _sum_known(numbers: Iterable[int | None]) -> int | None:
    total = 0
    for number in numbers:
        if number is None:
            return None
        total += number
    return total
