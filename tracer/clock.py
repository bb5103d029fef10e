"""The clocks that the tracer reads: one monotonic, and how it stands to the wall."""

from __future__ import annotations

import time
from dataclasses import dataclass

from .span import MonotonicNs, UnixNs

monotonic_ns = time.monotonic_ns
"""``CLOCK_MONOTONIC`` in ns. Bound once, because every span reads it twice."""

NUM_ANCHOR_READS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """One moment on both clocks of this host."""

    monotonic_ns: MonotonicNs
    unix_ns: UnixNs
    error_ns: int
    """Half of the bracket in which the wall clock was read."""


def read_anchor() -> Anchor:
    """Read both clocks several times; return the tightest bracket.

    The wall clock is read between two readings of the monotonic clock. A
    thread switch in between widens the bracket, so the narrowest of
    `NUM_ANCHOR_READS` is the one that nothing disturbed.
    """
    return min((_bracket() for _ in range(NUM_ANCHOR_READS)), key=lambda anchor: anchor.error_ns)


def _bracket() -> Anchor:
    before = time.monotonic_ns()
    wall = time.time_ns()
    after = time.monotonic_ns()
    return Anchor(
        monotonic_ns=MonotonicNs((before + after) // 2),
        unix_ns=UnixNs(wall),
        error_ns=(after - before + 1) // 2,
    )
