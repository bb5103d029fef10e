"""Texts of quantities: counts, shares, durations, sizes, and lists of ranks and steps.

Every evidence sentence, printed table, page and alert formats its numbers here:

    format_count      1 step; 12,288 ranks
    format_percent    26 %
    format_slowdown   1.38x
    format_change     24 % slower; 55 % faster     (from new over old)
    format_finding    slow-compute, critical, 5, 10-29, 36.0 ms (27 %), 0.98: cells of a table
    format_duration   45.3 s; 137 ms; 62.0 us      (from ns)
    format_seconds    the same, from seconds
    format_bytes      4.00 MiB
    format_rate       37.3 GB/s
    format_flops_rate 312 TFLOP/s
    format_ranks      ranks 0 to 7, 9 and 12,279 more      (in a sentence)
    format_link       3 → 7; 0, 2 … 30 (16)
    format_names      node-A, node-B, node-C and 9 more    (in a sentence)
    format_steps      step 3; steps 3 to 9                 (in a sentence)
    format_ranges     0-7, 9      (in a table)
    format_range      3-9         (in a table)
    format_account    9 records = 7 stored + 2 dropped (2 torn) + 0 buffered

An unknown quantity is `UNKNOWN`, an empty list `EMPTY`. Nothing here escapes text from outside:
`dashboard.text` does that for pages.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rankscope.tracer.span import NS_PER_MS, NS_PER_S, NS_PER_US

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ..trace.account import RecordAccount
    from .report import Finding, Price, RunReport

FORMULA = "=+-@\t\r"
"""A spreadsheet takes a cell that begins with one of these for a formula. Source: OWASP, CSV
Injection."""

FINDING_COLUMNS = (
    "cause", "severity", "ranks", "steps", "cost of a step", "confidence",
)  # fmt: skip
"""Columns of a table of findings, on a terminal, a page and in a report."""

UNKNOWN = "n/a"
EMPTY = "-"

MAX_NAMED = 8
"""Ranges, and numbers outside any range, that a sentence lists before it counts the rest."""

MAX_NAMES = 3
"""Hosts or runs that a sentence lists before it counts the rest."""

MAX_MEMBERS = 4
"""Members of a link that its label names."""

MIN_RANGE = 3
"""Consecutive numbers that are written as a range; two are written out."""

_TIME_UNITS = (("s", NS_PER_S), ("ms", NS_PER_MS), ("us", NS_PER_US))
_BYTE_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_DECIMAL_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_RATE_UNITS = (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3))
_FLOPS_UNITS = (("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("MFLOP/s", 1e6))
_MINUTE_S, _HOUR_S, _DAY_H = 60, 3600, 24

MIN_AXIS_S = 5
"""Seconds of a step from which its timeline, and a place on it, is in seconds and not in ms: a zoom
needs more digits than a duration, which is in seconds from 1 s."""

_ROUNDS_UP = 0.9995
"""Share of a unit from which three digits round up to the whole unit."""


def format_count(num: int, noun: str) -> str:
    """Return a number with its noun: "1 step", "2 micro-batches", "12,288 ranks"."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{num} {noun}" if num == 1 else f"{num:,} {noun}{plural}"


def format_ordinal(num: int) -> str:
    """Return 4 as "4th"."""
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(num % 10, "th") if num // 10 % 10 != 1 else "th"
    return f"{num:,}{suffix}"


def format_percent(ratio: float | None, *, digits: int = 0) -> str:
    """Return a share in percent: "26 %"."""
    return UNKNOWN if ratio is None else f"{100 * ratio:z.{digits}f} %"


def format_slowdown(slowdown: float | None) -> str:
    """Return a slowdown as a factor: "1.38x"."""
    return UNKNOWN if slowdown is None else f"{slowdown:.2f}x"


def format_change(ratio: float | None) -> str:
    """Return in a sentence how fast a step is, new over old: "24 % slower", "equally fast"."""
    if ratio is None:
        return "of unknown length"
    change = format_percent(abs(ratio - 1.0))
    if change == format_percent(0.0):
        return "equally fast"
    return f"{change} {'slower' if ratio > 1 else 'faster'}"


def format_part(part: str) -> str:
    """Return a part of the waterfall in words: "useful compute", "bubble, warm-up"."""
    if part == "gc":
        return "garbage collection"
    if part.startswith("bubble_"):
        return f"bubble, {part.removeprefix('bubble_').replace('_', '-')}"
    return part.replace("_", " ")


def format_excluded(report: RunReport) -> list[tuple[str, str]]:
    """Return the steps in no number, by what they are: ("Start-up", "2 steps (0, 1), 4.10 s")."""
    by_name = {"Start-up": report.startup_s_by_step, "End of the job": report.ending_s_by_step}
    return [
        (
            name,
            (
                f"{format_count(len(by_step), 'step')} ({format_ranges(sorted(by_step))}),"
                f" {format_seconds(sum(by_step.values()))}"
            ),
        )
        for name, by_step in by_name.items()
        if by_step
    ]


def format_finding(finding: Finding, price: Price | None) -> tuple[str, ...]:
    """Return the cells of `FINDING_COLUMNS`. The cost is the price that the verdict names."""
    return (
        finding.cause,
        finding.severity or UNKNOWN,
        format_ranges(finding.ranks, max_ranges=MAX_NAMED),
        format_range(finding.steps),
        UNKNOWN
        if price is None
        else f"{format_seconds(price.seconds)} ({format_percent(price.share)})",
        f"{finding.confidence:.2f}",
    )


def format_duration(duration_ns: float | None) -> str:
    """Return a duration in the unit that suits it, with three digits: "45.3 s", "137 ms"."""
    return UNKNOWN if duration_ns is None else _in_unit(duration_ns, _TIME_UNITS, "ns")


def format_age(age_ns: int) -> str:
    """Return an age in its two largest units: "59 s", "3 min 20 s", "25 h 1 min", "3 days 2 h"."""
    seconds = age_ns // NS_PER_S
    if seconds < _MINUTE_S:
        return f"{seconds} s"
    if seconds < _HOUR_S:
        return f"{seconds // _MINUTE_S} min {seconds % _MINUTE_S} s"
    hours = seconds // _HOUR_S
    if hours < 2 * _DAY_H:
        return f"{hours} h {seconds % _HOUR_S // _MINUTE_S} min"
    return f"{hours // _DAY_H:,} days {hours % _DAY_H} h"


def format_time(at_ns: int | None) -> str:
    """Return a Unix time in UTC to the second, or "n/a" if it is unknown."""
    if at_ns is None:
        return UNKNOWN
    return datetime.fromtimestamp(at_ns // NS_PER_S, UTC).strftime("%Y-%m-%d %H:%M:%S")


def format_seconds(seconds: float | None) -> str:
    """Return a duration in seconds as `format_duration` does one in nanoseconds."""
    return format_duration(None if seconds is None else seconds * NS_PER_S)


def format_device_hours(hours: float | None) -> str:
    """Return a cost in hours of devices, with three digits: "12.3 GPU-hours"."""
    return UNKNOWN if hours is None else f"{float(f'{hours:.3g}'):,.12g} GPU-hours"


def format_price(seconds: float, share: float, *, since: int | None = None) -> str:
    """Return what a step loses: "36.0 ms per step since step 20 (27 %)"."""
    onset = "" if since is None else f" since step {since}"
    return f"{format_seconds(seconds)} per step{onset} ({format_percent(share)})"


def format_bytes(num_bytes: int) -> str:
    """Return a size in binary units, with three digits: "4.00 MiB", "12 B"."""
    return _in_unit(num_bytes, _BYTE_UNITS, "B")


def format_decimal_bytes(num_bytes: int) -> str:
    """Return a size in decimal units, as papers have, with three digits: "700 GB"."""
    return _in_unit(num_bytes, _DECIMAL_UNITS, "B")


def format_hfu(mean: float, hfu: float | None) -> str:
    """Return the HFU beside the MFU if recomputation adds to it: ", HFU 52 %", else ""."""
    return "" if hfu is None or hfu <= mean else f", HFU {format_percent(hfu, digits=1)}"


def format_rate(bytes_per_s: float | None) -> str:
    """Return a bandwidth in decimal units, as networks have, with three digits: "37.3 GB/s"."""
    return UNKNOWN if bytes_per_s is None else _in_unit(bytes_per_s, _RATE_UNITS, "B/s")


def format_flops_rate(flops_per_s: float | None) -> str:
    """Return a rate of computation with three digits: "312 TFLOP/s"."""
    return UNKNOWN if flops_per_s is None else _in_unit(flops_per_s, _FLOPS_UNITS, "FLOP/s")


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ascending ranks for a sentence: "rank 5", "ranks 0 to 7, 9 and 12,279 more"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    ranges, num_more = name_ranges(ranks, max_ranges=MAX_NAMED)
    shown = [_joined(first, last, " to ") for first, last in ranges]
    if num_more:
        shown.append(f"{num_more:,} more")
    if len(shown) == 1:
        return f"ranks {shown[0]}"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def format_link(members: Sequence[int]) -> str:
    """Return the members of a link as a label: "3 → 7", "0, 2, 4", "0, 2 … 30 (16)"."""
    if len(members) == 2:  # noqa: PLR2004  # a pair
        return f"{members[0]} → {members[1]}"
    if len(members) <= MAX_MEMBERS:
        return ", ".join(map(str, members))
    return f"{members[0]}, {members[1]} … {members[-1]} ({len(members)})"


def format_names(names: Sequence[str]) -> str:
    """Return the first few names for a sentence: "a", "a and b", "a, b, c and 4 more"."""
    shown, num_more = list(names[:MAX_NAMES]), len(names) - MAX_NAMES
    if num_more > 0:
        return f"{', '.join(shown)} and {num_more:,} more"
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def format_steps(steps: tuple[int, int]) -> str:
    """Return the first and the last step for a sentence: "step 3", "steps 3 to 9"."""
    first, last = steps
    return f"step{'s' if last > first else ''} {_joined(first, last, ' to ')}"


def format_ranges(numbers: Sequence[int], *, max_ranges: int | None = None) -> str:
    """Return ascending numbers for a table: "0, 4-7, 9".

    Args:
        numbers: Ascending.
        max_ranges: Ranges to show before the rest is counted ("0, 4-7 and 12 more"); all if None.
    """
    ranges, num_more = name_ranges(numbers, max_ranges=max_ranges)
    shown = ", ".join(_joined(first, last, "-") for first, last in ranges)
    return f"{shown} and {num_more:,} more" if num_more else shown or EMPTY


def format_range(first_last: tuple[int, int] | None) -> str:
    """Return the first and the last number for a table: "3-9", or "3" if they are equal."""
    return EMPTY if first_last is None else _joined(*first_last, "-")


def name_ranges(
    numbers: Sequence[int], *, max_ranges: int | None = None, num_all: int = 0
) -> tuple[list[tuple[int, int]], int]:
    """Return the ranges to name as (first, last), and how many numbers are left to count.

    Where the count would be longer than the numbers, all are named: "0, 2, 4, 6" and not
    "0, 2 and 2 more".

    Args:
        numbers: Ascending.
        max_ranges: Ranges to name before the rest is counted; all if None.
        num_all: Number of all, if ``numbers`` are only the first ones.
    """
    ranges = split_ranges(numbers)
    kept = ranges[:max_ranges]
    num_more = max(num_all, len(numbers)) - sum(last - first + 1 for first, last in kept)
    rest = ranges[len(kept) :]
    if num_all <= len(numbers) and rest:
        # One range more than needed is enough to be longer than any count.
        named = "".join(f", {_joined(first, last, '-')}" for first, last in rest[:8])
        if len(named) <= len(f" and {num_more:,} more"):
            return ranges, 0
    return kept, num_more


def _joined(first: int, last: int, to: str) -> str:
    return f"{first}" if first == last else f"{first}{to}{last}"


def split_ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as (first, last) of each range, (4, 4) for a number outside any."""
    ranges: list[tuple[int, int]] = []
    begin = 0
    for end in range(1, len(numbers) + 1):
        if end < len(numbers) and numbers[end] == numbers[end - 1] + 1:
            continue
        run = numbers[begin:end]
        ranges += [(run[0], run[-1])] if len(run) >= MIN_RANGE else [(num, num) for num in run]
        begin = end
    return ranges


def _in_unit(value: float, units: Iterable[tuple[str, float]], smallest: str) -> str:
    for unit, size in units:
        if abs(value) >= _ROUNDS_UP * size:
            scaled = value / size
            least = abs(scaled) / _ROUNDS_UP
            digits = 2 if least < 10 else 1 if least < 100 else 0  # noqa: PLR2004
            return f"{scaled:,.{digits}f} {unit}"
    return f"{value:.0f} {smallest}"


def format_account(account: RecordAccount) -> str:
    """Return an account in one clause: "9 records = 7 stored + 2 dropped (2 torn) + 0 buffered"."""
    stored = "unknown" if account.stored is None else f"{account.stored:,}"
    reasons = ", ".join(f"{num:,} {reason}" for reason, num in account.dropped.items())
    dropped = f"{account.num_dropped:,} dropped" + (f" ({reasons})" if reasons else "")
    if account.produced is None:
        return f"{stored} records stored, {dropped}, number produced unknown"
    return (
        f"{account.produced:,} records = {stored} stored + {dropped}"
        f" + {account.buffered:,} buffered"
    )


def format_most_dropped(accounts: Mapping[tuple[int, int], RecordAccount]) -> str:
    """Return the rank that dropped most; "" if none of several dropped any."""
    worst = max(accounts.items(), key=lambda item: item[1].num_dropped, default=None)
    if len(accounts) == 1 or worst is None or not worst[1].num_dropped:
        return ""
    (_, rank), account = worst
    return f"rank {rank} dropped most: {account.num_dropped:,}"
