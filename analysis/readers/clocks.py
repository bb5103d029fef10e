"""Alignment of clocks whose offset was never measured, by communications between their hosts.

See docs/clocks.md, "Clocks that nothing measured".
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from rankscope.tracer.span import NONE, SpanFlag

from ..arrays.group_stats import medians_by_key
from ..arrays.grouping import factorize
from ..arrays.sorting import argsort_rows, find_positions, is_in_sorted
from ..report.text import format_count, format_duration, format_names
from ..trace.rows import select_rows
from ..trace.tables import SpanTable, StepTable, format_of
from .waits import ROOTED, instance_keys, is_communication, is_p2p

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from ..trace.context import EventRecord, RankExit, RunContext
    from ..trace.tables import RunInfo

    Pair = tuple[int, int]
    """Codes of two clocks, ascending."""

    Level = tuple[float, float, float]
    """Error and offset in ns, and rate, of a line."""

Table = TypeVar("Table", SpanTable, StepTable)
Dated = TypeVar("Dated", "EventRecord", "RankExit")

MAX_SPANS = 200_000
"""Spans that are compared; if there are more, every second, third, ... communication of a group."""

RESOLUTION_NS = 1_000
"""Least error of an offset. Source: torch.profiler writes times in microseconds."""

ERROR_DEVIATIONS = 3.0 * 1.4826
"""Error of an offset, in median distances of its communications from it: three standard deviations
if these are normal."""

MIN_FITTED = 9
"""Communications from which a drift is fitted: three in each third of the time."""

MAX_CONTRADICTED = 0.05
"""Share of the communications of two hosts that may end before all members have entered. Fewer are
broken records; more contradict the declared errors of the clocks."""

MAX_RATE = 500e-6
"""Largest difference of two clocks' rates. Source: docs/clocks.md, as between probes."""

TIMES = ("start_ns", "launch_ns", "end_ns")
FIRST, LAST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
_UNUSABLE = SpanFlag.OPEN | SpanFlag.ERROR | SpanFlag.END_BOUND


class ClockLine(NamedTuple):
    """Times of one clock on another one: ``on_other_ns + (1 + rate) (t - at_ns)``."""

    at_ns: int
    on_other_ns: int
    rate: float = 0.0
    error_ns: float = 0.0
    num: int = 0
    """Communications that it is based on."""

    def shift_ns(self, times_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what to add to times of the clock."""
        drift_ns = np.rint(self.rate * (times_ns - self.at_ns)).astype(np.int64)
        shift: NDArray[np.int64] = drift_ns + (self.on_other_ns - self.at_ns)
        return shift

    def at(self, time_ns: int) -> int:
        """Return the time on the other clock."""
        return time_ns + int(self.shift_ns(np.array([time_ns]))[0])

    def inverse(self) -> ClockLine:
        """Return the line from the other clock to this one."""
        rate = 1.0 / (1.0 + self.rate) - 1.0
        return ClockLine(self.on_other_ns, self.at_ns, rate, self.error_ns, self.num)

    def then(self, following: ClockLine) -> ClockLine:
        """Return the line to a third clock."""
        rate = (1.0 + self.rate) * (1.0 + following.rate) - 1.0
        error_ns = self.error_ns + following.error_ns
        return ClockLine(self.at_ns, following.at(self.on_other_ns), rate, error_ns, self.num)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """A run whose clocks are aligned, and what aligns its tables."""

    run: RunInfo
    """With the error that is left, and a warning for what was aligned."""

    lines: Mapping[tuple[int, int], ClockLine] = field(default_factory=dict)
    """By (epoch, rank); ranks whose clock is right are not among them."""

    steps: StepBegins | None = None
    """None if there are no lines."""

    def align(self, table: Table) -> Table:
        """Return spans or steps with their times on the reference clock; durations are kept.

        All rows of a rank in a step are shifted equally, by what is right at the step's begin. So
        what is nested or follows at once remains so, although clocks drift.
        """
        if self.steps is None:
            return table
        shift_ns = np.zeros(len(table), dtype=np.int64)
        begin_ns = self.steps.of(table)
        for line, rows in _rows_of_lines(self.lines, table):
            shift_ns[rows] = -line.inverse().shift_ns(begin_ns[rows])
        times = {name: getattr(table, name) for name in TIMES if hasattr(table, name)}
        return replace(
            table, **{name: np.where(at > 0, at + shift_ns, at) for name, at in times.items()}
        )

    def align_context(self, context: RunContext) -> RunContext:
        """Return events, exits and samples with their times on the reference clock."""
        if not self.lines:
            return context
        samples, at_ns = context.samples, context.samples.at_ns.copy()
        host_of = {
            (one.epoch, info.rank): info.host for one in self.run.epochs for info in one.ranks
        }
        for host, line in {host_of[place]: line for place, line in self.lines.items()}.items():
            if host in samples.hosts:
                rows = samples.host == samples.hosts.index(host)
                at_ns[rows] += line.shift_ns(at_ns[rows])
        events = sorted(map(self._moved, context.events), key=lambda each: each.at_ns)
        exits = sorted(
            map(self._moved, context.exits), key=lambda each: (each.at_ns is None, each.at_ns or 0)
        )
        return replace(
            context,
            samples=replace(samples, at_ns=at_ns),
            events=tuple(events),
            exits=tuple(exits),
        )

    def _moved(self, record: Dated) -> Dated:
        line = self.lines.get((record.epoch, record.rank))
        if line is None or record.at_ns is None:
            return record
        return replace(record, at_ns=line.at(record.at_ns))


class StepBegins(NamedTuple):
    """Begins of steps on the reference clock."""

    key: NDArray[np.int64]
    """Shape (steps,): epoch and step in one number, ascending."""

    begin_ns: NDArray[np.int64]
    longest_ns: int
    """Duration of the longest step."""

    def of(self, table: SpanTable | StepTable) -> NDArray[np.int64]:
        """Return the begin of each row's step; of the nearest known one if it is not known."""
        key = table.epoch.astype(np.int64) << 32 | table.step
        return self.begin_ns[np.minimum(find_positions(key, self.key), len(self.key) - 1)]


class Meetings(NamedTuple):
    """Communications between two clocks, one row each."""

    at_ns: NDArray[np.int64]
    """Shape (rows,), as are the others: end on the second clock."""

    ends_ns: NDArray[np.int64]
    """End on the second clock - end on the first: the offset, if both end together."""

    least_ns: NDArray[np.int64]
    """Lower bound of the offset: nothing ends before its last member has entered."""

    most_ns: NDArray[np.int64]
    """Upper bound of the offset."""

    kind: NDArray[np.int64]
    """Equal for collectives of one group and name; -1 for p2p, whose ends prove nothing."""

    usual_ns: NDArray[np.float64]
    """Median of ``ends_ns`` of the pair's communications of this kind."""

    spread_ns: NDArray[np.float64]
    """Median distance of ``ends_ns`` from it."""

    def early_ratio(self, error_ns: int) -> float:
        """Return the share that ends before all members have entered, by the clocks' times."""
        error_ns = max(error_ns, RESOLUTION_NS)
        return float(((self.least_ns > error_ns) | (self.most_ns < -error_ns)).mean())


def align_clocks(run: RunInfo, spans: SpanTable) -> Alignment:
    """Align the clocks of a run that nothing measured, or whose declared error is contradicted.

    A collective without a root ends at one time on all of its members, so the difference between
    its ends on two hosts is the offset of their clocks. Nothing is received before it was sent, so
    p2p operations in both directions bound it. The ends serve for nothing else: how late a rank is
    follows from its starts.

    Args:
        spans: Spans of any of its steps, with all members of each communication.
    """
    clock_of = {
        (epoch.epoch, info.rank): (info.clock or info.host, info.host, info.clock_error_ns)
        for epoch in run.epochs
        for info in epoch.ranks
    }
    clocks = list(dict.fromkeys(clock_of.values()))
    if not format_of(run).has_clocks or len(clocks) <= 1 or not len(spans):
        return Alignment(run=run)
    declared_ns, code_of = run.clock_error_ns, {one: code for code, one in enumerate(clocks)}
    clock = {place: code_of[one] for place, one in clock_of.items()}
    joining: list[int] = []
    for epoch in run.epochs:
        code_of_rank = {info.rank: clock[epoch.epoch, info.rank] for info in epoch.ranks}
        joining += (
            group.group_id
            for group in epoch.groups
            if len(set(map(code_of_rank.get, group.members))) > 1
        )
    pairs = _find_meetings(spans, clock, joining)
    if declared_ns is None:
        trusted = {code for code, one in enumerate(clocks) if one[2] is not None} or {0}
    elif any(each.early_ratio(declared_ns) > MAX_CONTRADICTED for each in pairs.values()):
        trusted = {0}
    else:
        return Alignment(run=run)
    lines = _reach(trusted, {pair: _fit(each) for pair, each in pairs.items()})
    for code, line in list(lines.items()):
        offset_ns = abs(line.at_ns - line.on_other_ns)
        if declared_ns is not None and offset_ns <= declared_ns + line.error_ns:
            lines[code] = ClockLine(0, 0, error_ns=clocks[code][2] or 0)
    lost = [code for code in range(len(clocks)) if code not in lines]
    moved = {code: line for code, line in lines.items() if line.num}
    by_place = {place: moved[code] for place, code in clock.items() if code in moved}
    steps = _find_step_begins(spans, by_place) if moved else None
    longest_ns = 0 if steps is None else steps.longest_ns
    errors = sorted(
        moved[code].error_ns + abs(moved[code].rate) * longest_ns
        if code in moved
        else clocks[code][2] or 0
        for code in lines
    )
    hosts = [host or name for name, host, _ in clocks]
    warnings = _warnings(moved, lost, hosts, reference=hosts[min(trusted)], declared_ns=declared_ns)
    return Alignment(
        run=replace(
            run,
            clock_error_ns=None if lost else round(sum(errors[-2:])),
            warnings=(*run.warnings, *warnings),
        ),
        lines=by_place,
        steps=steps,
    )


def _find_step_begins(spans: SpanTable, lines: Mapping[tuple[int, int], ClockLine]) -> StepBegins:
    """Return when the steps of some spans begin, given the lines of the clocks that are off."""
    start_ns = spans.start_ns.copy()
    for line, rows in _rows_of_lines(lines, spans):
        start_ns[rows] += line.shift_ns(start_ns[rows])
    key, step = np.unique(spans.epoch.astype(np.int64) << 32 | spans.step, return_inverse=True)
    begin_ns, end_ns = np.full(len(key), LAST), np.full(len(key), FIRST)
    np.minimum.at(begin_ns, step, start_ns)
    np.maximum.at(end_ns, step, start_ns + spans.duration_ns)
    return StepBegins(key, begin_ns, int((end_ns - begin_ns).max()))


def _warnings(
    moved: Mapping[int, ClockLine],
    lost: Sequence[int],
    hosts: Sequence[str],
    *,
    reference: str,
    declared_ns: int | None,
) -> list[str]:
    """Return what was aligned, how and how well, and what cannot be."""
    warnings = []
    if moved:
        offset_ns = {code: line.at_ns - line.on_other_ns for code, line in moved.items()}
        worst = max(moved, key=lambda code: abs(offset_ns[code]))
        num = sum(line.num for line in moved.values())
        why = "was never measured"
        if declared_ns is not None:
            why = f"exceeds its error of {format_duration(declared_ns)}"
        warnings.append(
            f"clock of {format_names([hosts[code] for code in sorted(moved)])} {why}: aligned with"
            f" {reference} by the ends of {format_count(num, 'communication')}"
            f" ({f'{hosts[worst]} ' if len(moved) > 1 else ''}"
            f"{format_duration(abs(offset_ns[worst]))}"
            f" {'ahead' if offset_ns[worst] > 0 else 'behind'}, error up to"
            f" {format_duration(max(line.error_ns for line in moved.values()))})"
        )
    if lost:
        warnings.append(
            f"clock of {format_names([hosts[code] for code in lost])} was never measured, and"
            f" no communication joins it with {reference}: times cannot be compared between them"
        )
    return warnings


def _rows_of_lines(
    lines: Mapping[tuple[int, int], ClockLine], table: SpanTable | StepTable
) -> Iterator[tuple[ClockLine, NDArray[np.int64]]]:
    known = sorted(set(lines.values()))
    code = _codes_of_ranks({place: known.index(line) for place, line in lines.items()}, table)
    for number, line in enumerate(known):
        yield line, np.flatnonzero(code == number)


def _codes_of_ranks(
    code: Mapping[tuple[int, int], int], table: SpanTable | StepTable
) -> NDArray[np.int64]:
    """Return the code of each row's (epoch, rank); -1 if it has none."""
    key = table.epoch.astype(np.int64) << 32 | table.rank
    known = np.array(sorted(epoch << 32 | rank for epoch, rank in code), dtype=np.int64)
    codes = np.array([code[place >> 32, place & 0xFFFF_FFFF] for place in known.tolist()])
    index = np.minimum(find_positions(key, known), len(known) - 1)
    return np.where(known[index] == key, codes[index], NONE)


def _find_meetings(
    spans: SpanTable, clock: Mapping[tuple[int, int], int], joining: Sequence[int]
) -> dict[Pair, Meetings]:
    """Return the communications of each pair of clocks: of a group, each with the lowest clock.

    Of several members on one clock the first end and the last start count: delays of a host only
    ever make its ends later.
    """
    rooted = np.array([name in ROOTED for name in spans.names], dtype=np.bool_)
    usable = is_communication(spans) & ((spans.flags & _UNUSABLE) == 0) & (spans.seq != NONE)
    rows = np.flatnonzero(usable & (is_p2p(spans) | ~rooted[spans.name]))
    rows = rows[is_in_sorted(spans.group_id[rows], np.array(sorted(joining), dtype=np.uint64))]
    rows = rows[spans.seq[rows] % (len(rows) // MAX_SPANS + 1) == 0]
    if not len(rows):
        return {}
    spans = select_rows(spans, rows)
    key, of_clock = instance_keys(spans, np.arange(len(rows))), _codes_of_ranks(clock, spans)
    rows = argsort_rows(key, of_clock)
    key, of_clock = key[rows], of_clock[rows]
    is_new = np.append(True, key[1:] != key[:-1])
    first = np.flatnonzero(is_new | np.append(True, of_clock[1:] != of_clock[:-1]))
    end = np.minimum.reduceat(spans.start_ns[rows] + spans.duration_ns[rows], first)
    start = np.maximum.reduceat(spans.start_ns[rows], first)
    rows, of_clock, is_new = rows[first], of_clock[first], is_new[first]
    lowest = np.maximum.accumulate(np.where(is_new, np.arange(len(first)), 0))
    other = np.flatnonzero(~is_new & (of_clock[lowest] >= 0))
    base, row = lowest[other], rows[other]
    # A receive ends after its send has begun; a buffered send may end before its receive begins.
    p2p = is_p2p(spans)[row]
    sends = p2p & (spans.rank[row] == spans.src_rank[row])
    receives = p2p & ~sends
    least = np.where(receives, FIRST, start[other] - end[base])
    most = np.where(sends, LAST, end[other] - start[base])
    by_name, _ = factorize(spans.group_id[row], spans.name[row], spans.flags[row] & SpanFlag.ASYNC)
    kind = np.where(p2p, NONE, by_name)
    pair = of_clock[base] << 32 | of_clock[other]
    by_pair = argsort_rows(pair, end[other])
    bounds = np.flatnonzero(np.diff(pair[by_pair])) + 1
    ends = end[other] - end[base]
    usual = medians_by_key(ends, pair, kind)
    spread = medians_by_key(np.abs(ends - usual), pair, kind)
    columns: tuple[NDArray[Any], ...] = (end[other], ends, least, most, kind, usual, spread)
    return {
        (int(pair[part[0]]) >> 32, int(pair[part[0]]) & 0xFFFF_FFFF): Meetings(
            *(column[part] for column in columns)
        )
        for part in np.split(by_pair, bounds)
        if len(part)
    }


def _fit(meetings: Meetings) -> ClockLine | None:
    """Return the line from the second clock to the first with the least error; None if unknown.

    Each kind of collective gives one by its ends. Members that do not end together (an asynchronous
    collective, timed where it was waited for) give it a large error. The bounds give another one,
    halfway between them. Ends that most bounds contradict prove nothing.
    """
    least = np.where(meetings.least_ns == FIRST, -np.inf, meetings.least_ns)
    most = np.where(meetings.most_ns == LAST, np.inf, meetings.most_ns)
    after_ns = meetings.at_ns - meetings.at_ns[0]
    rates = [
        _drift(after_ns[known], bound[known], pick)
        for bound, pick in ((least, np.max), (most, np.min))
        if (known := np.isfinite(bound)).any()
    ]
    halfway = _simplest(
        partial(_between, after_ns, least, most), sum(rates) / len(rates) if rates else 0.0
    )
    lines = [halfway]
    kinds, first, num = np.unique(meetings.kind, return_index=True, return_counts=True)
    for kind, row, num_alike in zip(kinds.tolist(), first.tolist(), num.tolist(), strict=True):
        if kind == NONE:
            continue
        spread_ns = ERROR_DEVIATIONS * float(meetings.spread_ns[row])
        line = (spread_ns, float(meetings.usual_ns[row]), 0.0)
        if num_alike >= MIN_FITTED:
            rows = np.flatnonzero(meetings.kind == kind)
            ends = after_ns[rows], meetings.ends_ns[rows]
            line = _simplest(partial(_middle, *ends), _drift(*ends, _median))
        error_ns = max(line[0], RESOLUTION_NS)
        if num_alike < MIN_FITTED // 3:
            error_ns = max(error_ns, halfway[0])
        lines.append((error_ns, *line[1:]))
    lines.sort()
    error_ns, offset_ns, rate = next(
        line
        for line in lines
        if line is halfway or _is_possible(line, after_ns, least=least, most=most)
    )
    if not np.isfinite(error_ns):
        return None
    at_ns = int(meetings.at_ns[0])
    return ClockLine(
        at_ns, at_ns - round(offset_ns), -rate, max(error_ns, RESOLUTION_NS), len(after_ns)
    )


def _is_possible(
    line: Level,
    after_ns: NDArray[np.int64],
    *,
    least: NDArray[np.float64],
    most: NDArray[np.float64],
) -> bool:
    """Return whether no more than half of the bounds contradict a line."""
    error_ns, offset_ns, rate = line
    level_ns = offset_ns + rate * after_ns
    is_early = (least > level_ns + error_ns) | (most < level_ns - error_ns)
    return 2 * int(is_early.sum()) <= len(is_early)


def _simplest(fit: Callable[..., Level], rate: float) -> Level:
    """Return the line without drift, unless one with this drift halves the error."""
    still = fit(rate=0.0)
    if rate == 0.0:
        return still
    drifting = fit(rate=rate)
    return drifting if 2.0 * max(drifting[0], RESOLUTION_NS) < still[0] else still


def _median(values: NDArray[Any]) -> float:
    """Return the median of a few known values: np.median takes 30 us to look for NaN and axes."""
    ordered = np.sort(values)
    half = len(ordered) // 2
    return float(ordered[half] + ordered[half - 1 + len(ordered) % 2]) / 2.0


def _middle(after_ns: NDArray[np.int64], ends_ns: NDArray[np.int64], *, rate: float) -> Level:
    """Return the spread of offsets around their median, the median, and the rate."""
    level_ns = ends_ns - rate * after_ns
    offset_ns = _median(level_ns)
    spread_ns = ERROR_DEVIATIONS * _median(np.abs(level_ns - offset_ns))
    return spread_ns, offset_ns, rate


def _between(
    after_ns: NDArray[np.int64],
    least_ns: NDArray[np.float64],
    most_ns: NDArray[np.float64],
    *,
    rate: float,
) -> Level:
    """Return half the distance of the tightest bounds, their middle, and the rate."""
    lower = float((least_ns - rate * after_ns).max())
    upper = float((most_ns - rate * after_ns).min())
    if not np.isfinite(lower) or not np.isfinite(upper):
        return np.inf, 0.0, rate
    return abs(upper - lower) / 2, (upper + lower) / 2, rate


def _drift(
    after_ns: NDArray[np.int64],
    offset_ns: NDArray[np.float64] | NDArray[np.int64],
    pick: Callable[[NDArray[Any]], Any],
) -> float:
    """Return the slope between the first and the last third of offsets in order of time.

    Source:
        The resistant line of Tukey, Exploratory Data Analysis (1977).
    """
    third = len(after_ns) // 3
    if len(after_ns) < MIN_FITTED or after_ns[-1] == after_ns[0]:
        return 0.0
    rise_ns = float(pick(offset_ns[-third:])) - float(pick(offset_ns[:third]))
    rate = rise_ns / float(np.median(after_ns[-third:]) - np.median(after_ns[:third]))
    return rate if abs(rate) <= MAX_RATE else 0.0


def _reach(
    trusted: Collection[int], lines: Mapping[Pair, ClockLine | None]
) -> dict[int, ClockLine]:
    """Return each clock's line to the trusted ones, over the pairs with the least error in sum."""
    neighbours: dict[int, list[tuple[int, ClockLine]]] = defaultdict(list)
    for (first, second), line in lines.items():
        if line is not None:
            neighbours[first].append((second, line))
            neighbours[second].append((first, line.inverse()))
    reached: dict[int, ClockLine] = {}
    queue = [(0.0, code, ClockLine(0, 0)) for code in sorted(trusted)]
    while queue:
        _, code, line = heappop(queue)
        if code not in reached:
            reached[code] = line
            for other, to_this in neighbours[code]:
                onward = to_this.then(line)
                heappush(queue, (onward.error_ns, other, onward))
    return reached
