"""Events of a Chrome trace: intervals with the rank, the step and the place that they name.

Times of the format are microseconds. An interval is an event X, or a B and the E that closes it on
its thread, or a b and the e of the same category and id.

Source: "Trace Event Format" of the Chromium project. Names of arguments: MegaScan
(github.com/OpenSQZ/MegatronApp, `megatron/training/trace.py` and `scripts/aggregate.py`) and
ndtimeline (github.com/volcengine/veScale, `legacy/vescale/ndtimeline`).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rankscope.tracer.span import NONE

from ..errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

    Event = dict[str, Any]

MAX_US = 1e16
"""Times beyond it are no microseconds of this millennium."""

ROUNDING_NS = 1_000
"""Unix times in us are multiples of a quarter as floating-point numbers, and an end is a sum."""

MAX_RANKS = 1 << 20
MAX_STEP = 1 << 30

NUMBERS = {
    "rank": ("g_rk", "rank", "global_rank"),
    "step": ("iteration", "step", "global_step", "batch"),
    "microbatch": ("microbatch", "micro_batch_index", "microbatch_id", "micro_batch", "mb"),
    "chunk": ("model_chunk", "model_chunk_id", "chunk"),
    "dp": ("dp_rk", "dp_rank", "dp"),
    "tp": ("tp_rk", "tp_rank", "tp"),
    "pp": ("pp_rk", "pp_rank", "pp", "stage"),
    "num_bytes": ("data", "num_bytes", "bytes"),
}
"""Names of the arguments that have a number, the first one counts."""

STEP_NAME = re.compile(r"(?:ProfilerStep#(?P<number>\d{1,9})|iteration|step|event/batch)")
"""An interval that is a step; it has its number in its name or among its arguments."""

STEP_BORDER = re.compile(r"(?:iteration|step) (begin|end)")
"""Instants between which a step is."""

DATA_PARALLEL_PROCESS = re.compile(r"dp rank\[(\d{1,9})\]")
"""Name of a process whose threads are the ranks of one data-parallel position (ndtimeline)."""


@dataclass(slots=True, kw_only=True)
class Interval:
    """A begin and an end, with what they say. `NONE`: unknown."""

    name: str
    process: int | str
    thread: str
    start_ns: int
    end_ns: int
    args: Event
    depth: int = 0
    """Number of intervals of the thread around it."""

    rank: int = NONE
    step: int = NONE
    microbatch: int = NONE
    chunk: int = NONE
    num_bytes: int = NONE


@dataclass(slots=True, kw_only=True)
class RankEvents:
    """Content of a trace about one rank. Times are ns since the trace's origin."""

    rank: int
    coords: dict[str, int] = field(default_factory=dict)
    """Position by axis, of the axes that the trace names."""

    intervals: list[Interval] = field(default_factory=list)
    """Ascending by begin; those around others first."""

    steps: list[tuple[int, int, int]] = field(default_factory=list)
    """(begin, end, number), ascending."""

    unmarked: set[int] = field(default_factory=set)
    """Steps whose borders are not in the trace."""

    def extend_step(self, step: int, end_ns: int) -> None:
        """Let a step without borders include a time, and the next one begin after it."""
        for place, (begin, end, number) in enumerate(self.steps):
            if number == step and step in self.unmarked:
                self.steps[place] = begin, max(end, end_ns + 1), number
            elif place and number in self.unmarked and self.steps[place - 1][2] == step:
                self.steps[place] = max(begin, self.steps[place - 1][1]), end, number


def sort_by_rank(path: Path, events: Iterable[Any]) -> dict[int, RankEvents]:
    """Return the intervals of a trace by rank.

    Raises:
        TraceError: An interval has no rank or no step, or a rank has two positions.
    """
    sound = [event for event in events if _is_sound(event)]
    ranks: dict[int, RankEvents] = {}
    data_position = _data_positions(sound)
    borders: dict[tuple[int, int], dict[str, int]] = defaultdict(dict)
    for interval in _pair(sound):
        _read_arguments(path, interval)
        rank = ranks.setdefault(interval.rank, RankEvents(rank=interval.rank))
        if STEP_NAME.fullmatch(interval.name):
            rank.steps.append((interval.start_ns, interval.end_ns, interval.step))
        else:
            rank.intervals.append(interval)
        own = {axis: _number(interval.args, axis) for axis in ("dp", "pp", "tp")}
        if own["dp"] == NONE:
            own["dp"] = data_position.get(interval.process, NONE)
        for axis, position in own.items():
            if position != NONE and rank.coords.setdefault(axis, position) != position:
                reason = (
                    f"has rank {rank.rank} at the {axis} positions {rank.coords[axis]} and"
                    f" {position}: it needs args.rank, the global rank, in its events"
                )
                raise TraceError(path, reason)
    for event in sound:
        if event["ph"] in "iI" and (border := STEP_BORDER.fullmatch(event["name"])):
            number = _number(event["args"], "step")
            borders[_rank_of(event["pid"], event["args"]), number][border[1]] = _ns(event["ts"])
    for (rank_number, step), times in borders.items():
        if rank_number in ranks and step != NONE and times.keys() == {"begin", "end"}:
            ranks[rank_number].steps.append((times["begin"], times["end"], step))
    for rank in ranks.values():
        _find_steps(path, rank)
    _extend_steps(ranks.values())
    return ranks


def _is_sound(event: Any) -> bool:  # noqa: ANN401  # of any JSON type
    """Return whether an event can be read; absent names and arguments are added."""
    if not isinstance(event, dict) or not isinstance(event.get("ph"), str):
        return False
    if not isinstance(event.setdefault("args", {}), dict):
        return False
    process, thread = event.get("pid"), event.setdefault("tid", 0)
    is_placed = isinstance(process, int | str) and isinstance(thread, int | str)
    is_placed &= not isinstance(process, bool)
    if event["ph"] == "M":
        return is_placed
    times = event.get("ts"), event.get("dur", 0)
    if not all(isinstance(time, int | float) and 0 <= time < MAX_US for time in times):
        return False
    return is_placed and isinstance(event.setdefault("name", ""), str)


def _pair(events: list[Event]) -> list[Interval]:
    """Return the intervals; a begin without an end is none, as is an end without a begin."""
    begun: dict[object, list[Event]] = defaultdict(list)
    intervals = []
    for event in sorted((event for event in events if "ts" in event), key=_time):
        phase = event["ph"]
        if phase == "X":
            intervals.append(_interval(event, event["ts"] + event.get("dur", 0), {}))
        elif phase in "Bb":
            begun[_lane(event)].append(event)
        elif phase in "Ee" and (own := begun[_lane(event)]):
            intervals.append(_interval(own.pop(), event["ts"], event["args"]))
    intervals.sort(key=lambda interval: (interval.start_ns, -interval.end_ns))
    around: dict[tuple[int | str, str], list[int]] = defaultdict(list)
    for interval in intervals:
        ends = around[interval.process, interval.thread]
        while ends and ends[-1] <= interval.start_ns:
            ends.pop()
        if ends and interval.end_ns > ends[-1] > interval.start_ns >= ends[-1] - ROUNDING_NS:
            interval.start_ns = ends.pop()
        interval.depth = len(ends)
        ends.append(interval.end_ns)
    return intervals


def _time(event: Event) -> float:
    return float(event["ts"])


def _lane(event: Event) -> object:
    if event["ph"] in "be":
        return event["pid"], event.get("cat"), str(event.get("id"))
    return event["pid"], event["tid"]


def _interval(event: Event, end_us: float, more: Event) -> Interval:
    return Interval(
        name=event["name"],
        process=event["pid"],
        thread=str(event["tid"]),
        start_ns=_ns(event["ts"]),
        end_ns=_ns(end_us),
        args=event["args"] | more,
    )


def _ns(time_us: float) -> int:
    return round(time_us * 1000)


def _read_arguments(path: Path, interval: Interval) -> None:
    interval.rank = _rank_of(interval.process, interval.args)
    if not 0 <= interval.rank < MAX_RANKS:
        reason = (
            f"has an event {interval.name[:64]!r} of process {interval.process!r} that names no"
            " rank: give it args.rank, or a pid that is the rank"
        )
        raise TraceError(path, reason)
    for name in ("step", "microbatch", "chunk", "num_bytes"):
        setattr(interval, name, _number(interval.args, name))
    named = STEP_NAME.fullmatch(interval.name)
    if named and named["number"]:
        interval.step = int(named["number"])


def _rank_of(process: int | str, args: Event) -> int:
    rank = _number(args, "rank")
    return process if rank == NONE and isinstance(process, int) else rank


def _number(args: Event, name: str) -> int:
    """Return an argument by its usual names; `NONE` if none is a count."""
    for key in NUMBERS[name]:
        value = args.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62:
            return value
    return NONE


def _data_positions(events: list[Event]) -> dict[int | str, int]:
    """Return the data-parallel position by process, if processes have the names of ndtimeline."""
    positions = {}
    for event in events:
        if event["ph"] == "M" and event.get("name") == "process_name":
            name = DATA_PARALLEL_PROCESS.fullmatch(str(event["args"].get("name")))
            if name is not None:
                positions[event["pid"]] = int(name[1])
    return positions


def _find_steps(path: Path, rank: RankEvents) -> None:
    """Complete steps and numbers of steps: each from the other."""
    rank.steps.sort()
    marked = {number for *_, number in rank.steps}
    if NONE in marked:  # steps without numbers are counted
        rank.steps = [(begin, end, place) for place, (begin, end, _) in enumerate(rank.steps)]
        marked = set(range(len(rank.steps)))
    elif len(marked) < len(rank.steps):
        raise TraceError(
            path, f"has one step of rank {rank.rank} twice: import each run of it alone"
        )
    for interval in rank.intervals:
        if interval.step == NONE:
            interval.step = _step_around(rank.steps, interval.start_ns)
    numbered = [interval for interval in rank.intervals if interval.step != NONE]
    if not numbered:
        reason = (
            f"has no step on rank {rank.rank}: give events args.step (or args.iteration), or an"
            " interval named step or iteration around those of each step"
        )
        raise TraceError(path, reason)
    rank.intervals = numbered
    spread: dict[int, tuple[int, int]] = {}
    for interval in numbered:
        begin, end = spread.get(interval.step, (interval.start_ns, interval.end_ns))
        spread[interval.step] = min(begin, interval.start_ns), max(end, interval.end_ns)
    rank.unmarked = spread.keys() - marked
    rank.steps += [(*spread[step], step) for step in rank.unmarked]
    rank.steps.sort()
    if rank.steps[-1][2] > MAX_STEP:
        raise TraceError(path, f"has step {rank.steps[-1][2]}, more than {MAX_STEP:,}")


def _extend_steps(ranks: Collection[RankEvents]) -> None:
    """Let each step without borders begin with the end of the one before.

    The first of consecutive ones begins when its first rank does. What begins with the end of the
    last interval, such as a derived send, is in the step.
    """
    first_ns: dict[int, int] = {}
    for rank in ranks:
        for begin, _, step in rank.steps:
            first_ns[step] = min(begin, first_ns.get(step, begin))
    for rank in ranks:
        before: tuple[int, int] | None = None
        for place, (begin, last_ns, step) in enumerate(rank.steps):
            end = last_ns
            if step in rank.unmarked:
                is_next = before is not None and before[1] == step - 1
                free_ns = before[0] if before is not None and is_next else first_ns[step]
                end = last_ns + 1
                rank.steps[place] = (min(begin, free_ns), end, step)
            before = end, step


def _step_around(steps: list[tuple[int, int, int]], at_ns: int) -> int:
    place = bisect_right(steps, at_ns, key=lambda step: step[0]) - 1
    return steps[place][2] if place >= 0 and at_ns < steps[place][1] else NONE
