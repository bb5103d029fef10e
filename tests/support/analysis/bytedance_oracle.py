"""Reference implementation of the ByteDance what-if, in plain loops and dicts.

It shares no code with the analysis, so both have the same error only if the rules were misread
twice. An operation is a dict with the format's columns, but ``start`` and ``end`` are integer
nanoseconds.

Source: arXiv 2505.05713.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Op = dict[str, Any]
    Part = Callable[[Op], bool]

P2P = ("forward-send", "forward-recv", "backward-send", "backward-recv")
DATA_PARALLEL = ("params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce")
COMMUNICATION = (
    *P2P,
    *DATA_PARALLEL,
    "layernorm-grads-all-reduce",
    "embedding-grads-all-reduce",
    "optimizer-clip-main-grad",
)
COMPUTE = ("forward-compute", "backward-compute")
KNOWN = (*COMMUNICATION, *COMPUTE, "gc", "optimizer")
STREAMS = (COMPUTE, *((name,) for name in P2P), ("params-all-gather", "grads-reduce-scatter"))
SLACK_NS = 50_000
CLOCK_ERROR_NS = -10_000_000


def kind_of(op: Op) -> str:
    name = str(op["type"])
    return f"{name.split('-')[0]}-pp-comm" if name in P2P else name


def worker_of(op: Op) -> tuple[int, int]:
    return op["dp"], op["stage"]


@dataclass
class Oracle:
    """The rules applied to a trace. Times in ns, by step."""

    ops: list[Op]
    pp: int
    vpp: int
    num_dp_members: int
    """dp x dsp; if 1, the data-parallel operations are ignored."""

    before: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    group: dict[int, Any] = field(default_factory=dict)
    recorded: dict[int, float] = field(default_factory=dict)
    num_clock_errors: int = 0

    def __post_init__(self) -> None:
        self.actual = {
            step: max(op["end"] for op in ops) - min(op["start"] for op in ops)
            for step, ops in _split(self.ops, lambda op: op["step"]).items()
        }
        dropped = () if self.num_dp_members > 1 else DATA_PARALLEL
        self.ops = [op for op in self.ops if op["type"] in KNOWN and op["type"] not in dropped]
        self.ops = [{**op, "id": number} for number, op in enumerate(self.ops)]
        overlapped = any(op["type"] == "separate-grads-all-reduce" for op in self.ops)
        for worker in _split(self.ops, lambda op: (op["step"], *worker_of(op))).values():
            self._worker(worker, overlapped=overlapped)
        for collective in DATA_PARALLEL:
            self._group(collective, lambda op: op["stage"])
        self._group("embedding-grads-all-reduce", lambda op: op["dp"])
        self._group("optimizer-clip-main-grad", lambda op: 0)
        self._drop_unpaired()
        self._measure()

    def _worker(self, ops: list[Op], *, overlapped: bool) -> None:
        of = {name: _numbered(op for op in ops if op["type"] == name) for name in KNOWN}
        for stream in STREAMS:
            self._chain(sorted((op for name in stream for op in of[name]), key=_by_start))
        for direction, forward in (("forward", True), ("backward", False)):
            self._transfers(of, direction, forward=forward)
        computes = sorted((op for name in COMPUTE for op in of[name]), key=_by_start)
        first_backward = next(
            (at for at, op in enumerate(computes) if op["type"] == "backward-compute"), None
        )
        if first_backward is not None and first_backward >= 2:
            for name in ("backward-send", "backward-recv"):
                self._chain([computes[first_backward - 2], *of[name][:1]])
        for chunk in {op["mc"] for op in of["forward-compute"]}:
            gathers = [op for op in of["params-all-gather"] if op["mc"] == chunk]
            self._chain(
                [*gathers[-1:], *[op for op in of["forward-compute"] if op["mc"] == chunk][:1]]
            )
        scatters = of["grads-reduce-scatter"]
        self._chain(
            [
                *computes[-1:],
                *of["gc"],
                *of["layernorm-grads-all-reduce"],
                *(of["embedding-grads-all-reduce"]),
                *(of["separate-grads-all-reduce"] if overlapped else scatters),
                *of["optimizer-clip-main-grad"],
                *of["optimizer"],
            ]
        )
        if overlapped:
            for scatter in scatters:
                same = [op for op in of["backward-compute"] if op["mc"] == scatter["mc"]]
                self._chain([*same[-1:], scatter])
            for layernorm in of["layernorm-grads-all-reduce"]:
                self._chain([*scatters[-1:], layernorm])

    def _transfers(self, of: dict[str, list[Op]], direction: str, *, forward: bool) -> None:
        computes = of[f"{direction}-compute"]
        recvs, sends = of[f"{direction}-recv"], of[f"{direction}-send"]
        if not computes:
            return
        recvs = [op for op in recvs if op["start"] <= computes[-1]["start"] + SLACK_NS]
        sends = [op for op in sends if op["end"] >= computes[0]["end"] - SLACK_NS]
        enters = (0, 0) if forward else (self.pp - 1, self.vpp - 1)
        leaves = (self.pp - 1, self.vpp - 1) if forward else (0, 0)
        for transfers, alone in ((recvs, enters), (sends, leaves)):
            peered = [op for op in computes if (op["stage"], op["mc"]) != alone]
            theirs = computes
            if len(transfers) == len(peered):  # those at the edge were not recorded
                theirs = peered
            elif transfers is recvs and len(transfers) == len(computes) - 1:
                theirs = computes[1:]
            number = 0
            for transfer, compute in zip(transfers, theirs, strict=False):
                if (compute["stage"], compute["mc"]) == alone:
                    continue  # a no-op
                towards = 1 if forward else -1
                to = compute["stage"] + (0 if transfers is recvs else towards)
                self.group[transfer["id"]] = (
                    direction, transfer["step"], transfer["dp"], to % self.pp, number,
                )  # fmt: skip
                number += 1
                if transfers is recvs:
                    at = computes.index(compute)
                    self._chain([transfer, compute])
                    self._chain([*computes[max(at - 1, 0) : at], transfer])
                else:
                    self._chain([compute, transfer])

    def _chain(self, ops: list[Op]) -> None:
        for earlier, later in pairwise(ops):
            self.before[later["id"]].append(earlier["id"])

    def _group(self, name: str, scope: Callable[[Op], int]) -> None:
        members = [op for op in self.ops if op["type"] == name]
        for worker in _split(members, lambda op: (op["step"], *worker_of(op))).values():
            for number, op in enumerate(_numbered(worker)):
                self.group[op["id"]] = (name, op["step"], scope(op), number)

    def _drop_unpaired(self) -> None:
        """Drop the groups of p2p operations that have only one side."""
        sizes: dict[Any, int] = defaultdict(int)
        for key in self.group.values():
            sizes[key] += 1
        self.num_unpaired = 0
        for number, key in list(self.group.items()):
            if key[0] in ("forward", "backward") and sizes[key] < 2:
                del self.group[number]
                self.num_unpaired += 1

    def _measure(self) -> None:
        arrival: dict[Any, int] = {}
        for op in self.ops:
            key = self.group.get(op["id"], op["id"])
            arrival[key] = max(arrival.get(key, op["start"]), op["start"])
        durations: dict[str, list[float]] = defaultdict(list)
        for op in self.ops:
            duration = op["end"] - op["start"]
            if op["type"] in COMMUNICATION:
                duration = op["end"] - arrival[self.group.get(op["id"], op["id"])]
                if duration <= CLOCK_ERROR_NS:
                    duration = 0
                    self.num_clock_errors += 1
            self.recorded[op["id"]] = duration
            durations[op["type"]].append(duration)
        self.ideal = {
            name: (median if name in COMMUNICATION else fmean)(values)
            for name, values in durations.items()
        }

    def replay(self, is_recorded: Part) -> dict[int, float]:
        """Return each step's time with some operations as recorded and the others ideal."""
        durations = {
            op["id"]: self.recorded[op["id"]] if is_recorded(op) else self.ideal[op["type"]]
            for op in self.ops
        }
        end = self._ends(durations)
        if len(end) < len(self.ops):
            raise RuntimeError("operations depend on each other in a cycle")
        times: dict[int, float] = {}
        for op in self.ops:
            if op["type"] == "optimizer":
                times[op["step"]] = max(times.get(op["step"], 0.0), end[op["id"]])
        return times

    def _ends(self, durations: dict[int, float]) -> dict[int, float]:
        """Return the end of each operation; operations of a cycle have none."""
        after: dict[int, list[int]] = defaultdict(list)
        for number, earlier in self.before.items():
            for one in earlier:
                after[one].append(number)
        members: dict[Any, list[int]] = defaultdict(list)
        for op in self.ops:
            members[self.group.get(op["id"], op["id"])].append(op["id"])
        missing = {op["id"]: len(self.before[op["id"]]) for op in self.ops}
        # With a negative transfer, as clock errors cause it, an operation can end before the step.
        start = {number: -math.inf if count else 0.0 for number, count in missing.items()}
        absent = {key: len(numbers) for key, numbers in members.items()}
        end: dict[int, float] = {}
        ready = [number for number, count in missing.items() if not count]
        while ready:
            number = ready.pop()
            key = self.group.get(number, number)
            absent[key] -= 1
            arrival = max(start[one] for one in members[key])
            for one in members[key] if not absent[key] else ():
                end[one] = arrival + durations[one]
                for later in after[one]:
                    start[later] = max(start[later], end[one])
                    missing[later] -= 1
                    if not missing[later]:
                        ready.append(later)
        return end

    def results(self, *, with_workers: bool = True) -> Results:
        ideal, recorded = self.replay(lambda op: False), self.replay(lambda op: True)

        def put_back(key: Callable[[Op], Any]) -> dict[Any, dict[int, float]]:
            parts = sorted({key(op) for op in self.ops})
            return {part: self.replay(_equal(key, part)) for part in parts}

        by_dp, by_stage = put_back(lambda op: op["dp"]), put_back(lambda op: op["stage"])
        rank = {worker_of(op): op["rank"] for op in self.ops}

        def without(part: Part) -> float | None:
            total, best = _mean(recorded), _mean(ideal)
            fixed = _mean(self.replay(lambda op: not part(op)))
            return (total - fixed) / (total - best) if abs(total - best) > 1e-9 * best else None

        shortcut = {w: min(_mean(by_dp[w[0]]), _mean(by_stage[w[1]])) for w in rank}
        worst = sorted(rank, key=lambda w: (-shortcut[w], rank[w]))
        worst = worst[: math.ceil(0.03 * len(rank))]
        return Results(
            recorded=recorded,
            ideal=ideal,
            by_kind=put_back(kind_of),
            by_dp=by_dp,
            by_stage=by_stage,
            by_worker=put_back(worker_of) if with_workers else {},
            shortcut={w: time / _mean(ideal) for w, time in shortcut.items()},
            worst=set(worst),
            m_w=without(lambda op: worker_of(op) in worst),
            m_s=without(lambda op: op["stage"] == self.pp - 1) if self.pp > 1 else None,
        )


@dataclass
class Results:
    """Step times by step number."""

    recorded: dict[int, float]
    ideal: dict[int, float]
    by_kind: dict[str, dict[int, float]]
    by_dp: dict[int, dict[int, float]]
    by_stage: dict[int, dict[int, float]]
    by_worker: dict[tuple[int, int], dict[int, float]]
    shortcut: dict[tuple[int, int], float]
    worst: set[tuple[int, int]]
    m_w: float | None
    m_s: float | None


def _equal(key: Callable[[Op], Any], part: object) -> Part:
    return lambda op: bool(key(op) == part)


def _mean(times: dict[int, float]) -> float:
    return fmean(times.values())


def _by_start(op: Op) -> tuple[int, int]:
    return op["start"], op["end"]


def _numbered(ops: Iterable[Op]) -> list[Op]:
    return sorted(ops, key=lambda op: op["seq"])


def _split(ops: list[Op], key: Callable[[Op], Any]) -> dict[Any, list[Op]]:
    found: dict[Any, list[Op]] = defaultdict(list)
    for op in ops:
        found[key(op)].append(op)
    return found
