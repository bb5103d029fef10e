"""Ranks, counts and durations as a person reads them."""

from __future__ import annotations

MOST_RANKS_NAMED = 8
NS_PER_S = 1e9
LEAST_IN_MS_NS = 950_000
"""Durations below are written in microseconds: a tenth of a millisecond would say little."""


def name_ranks(ranks: tuple[int, ...]) -> str:
    """Write out ranks: "rank 5", "ranks 4 and 5", "ranks 0, 4, 8 and 12,280 more"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = list(map(str, ranks[:MOST_RANKS_NAMED]))
    if len(ranks) > MOST_RANKS_NAMED:
        return f"ranks {', '.join(shown)} and {len(ranks) - MOST_RANKS_NAMED:,} more"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def count_text(num: int, word: str) -> str:
    """Write out a count: "1 step", "3 steps", "2 micro-batches", "12,288 ranks"."""
    plural = "es" if word.endswith("ch") else "s"
    return f"{num} {word}" if num == 1 else f"{num:,} {word}{plural}"


def duration_text(value_ns: float) -> str:
    """Write out a duration in ns: "45.3 s", "137.0 ms", "62 us"."""
    if value_ns >= NS_PER_S:
        return f"{value_ns / NS_PER_S:.1f} s"
    if abs(value_ns) >= LEAST_IN_MS_NS:
        return f"{value_ns / 1e6:.1f} ms"
    return f"{value_ns / 1e3:.0f} us"
