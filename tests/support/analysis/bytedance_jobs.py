"""Jobs that write the ByteDance format, with the schedules of Megatron.

A discrete-event model: each worker is a coroutine that runs its schedule (1F1B or interleaved,
transfers batched or each on its own stream) and waits for transfers that another worker has not
posted yet. It is independent of the analysis and of how that infers the structure.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    ComputeTime = Callable[[int, int, int, int, bool], float]
    """By dp, stage, step, micro-batch, and whether it is a forward."""

    Row = dict[str, Any]
    Task = Generator[object, None, None]
    Transfer = tuple[Any, ...]

MS = 1_000_000


@dataclass(kw_only=True)
class Job:
    """Settings of a job. Times in ns."""

    dp: int = 2
    pp: int = 2
    vpp: int = 1
    tp: int = 1
    dsp: int = 1
    microbatches: tuple[int, ...] = (4,)
    """Micro-batches of each step."""

    batched: bool = True
    """Whether sends and receives of one call begin and end together, and block the computes."""

    records_no_ops: bool = False
    """Whether transfers at the pipeline's edge, without another end, are recorded too."""

    overlapped: bool = False
    """Whether gradients of a chunk are reduced while other chunks compute."""

    forward_ns: float = 10 * MS
    compute_ns: ComputeTime | None = None
    """Times of computes, instead of those that follow from ``forward_ns``."""

    latency_ns: float = 0.3 * MS
    host_factor: float = 1.0
    """Factor of the host's time between operations."""

    dp_factor: float = 4.0
    """Time of data-parallel collectives over that of others."""

    jitter: float = 0.02
    worker_factor: dict[tuple[int, int], float] = field(default_factory=dict)
    stage_factor: dict[int, float] = field(default_factory=dict)
    link_factor: dict[tuple[int, int], float] = field(default_factory=dict)
    """By (dp, lower stage), for transfers to and from the next stage."""

    length_spread: float = 0.0
    """Relative variation of the lengths of a replica's micro-batches."""

    stall_chance: float = 0.0
    stall_ns: float = 120 * MS
    faults_from: int = 0
    """Index of the first step with the factors above."""

    steps: tuple[int, ...] = ()
    clock_ns: dict[tuple[int, int], int] = field(default_factory=dict)
    seed: int = 0

    def rows(self) -> list[Row]:
        """Run the job; return one row per operation, with ``start`` and ``end`` from its step's."""
        rows: list[Row] = []
        rng = random.Random(self.seed)
        for index, num in enumerate(self.microbatches):
            number = self.steps[index] if self.steps else index
            step = _Step(self, number, num, rng, faulty=index >= self.faults_from)
            rows += [{**row, "step": number} for row in step.run()]
        return rows

    def rank(self, dp: int, stage: int) -> int:
        return (stage * self.dp * self.dsp + dp) * self.tp


class _Step:
    def __init__(
        self, job: Job, number: int, num: int, rng: random.Random, *, faulty: bool
    ) -> None:
        self.job, self.number, self.num, self.rng, self.faulty = job, number, num, rng, faulty
        self.posted: dict[tuple[Transfer, str], float] = {}
        self.ended: dict[Transfer, float] = {}
        self.entered: dict[Any, dict[Any, float]] = defaultdict(dict)
        self.rows: list[Row] = []
        self.lengths = {
            (dp, mb): 1 + rng.uniform(-1, 1) * job.length_spread
            for dp in range(job.dp)
            for mb in range(num)
        }

    def run(self) -> list[Row]:
        job = self.job
        tasks = [_Worker(self, dp, p).work() for dp in range(job.dp) for p in range(job.pp)]
        while tasks:
            before = self._progress()
            tasks = [task for task in tasks if next(task, "done") != "done"]
            if tasks and self._progress() == before:
                raise RuntimeError("the job hangs")
        first = min(row["start"] for row in self.rows)
        for row in self.rows:
            row["start"], row["end"] = row["start"] - first, row["end"] - first
        return self._numbered()

    def _progress(self) -> tuple[int, ...]:
        entered = sum(len(members) for members in self.entered.values())
        return len(self.rows), len(self.posted), entered

    def _numbered(self) -> list[Row]:
        seen: dict[Any, int] = defaultdict(int)
        for row in sorted(self.rows, key=lambda row: (row["start"], row["end"])):
            key = row["dp"], row["stage"], row["type"]
            row["seq"] = seen[key]
            seen[key] += 1
        return self.rows

    def latency(self, dp: int, lower: int) -> float:
        factor = self.job.link_factor.get((dp, lower), 1.0) if self.faulty else 1.0
        return self.job.latency_ns * factor * self.noise()

    def noise(self) -> float:
        return 1 + self.rng.uniform(-1, 1) * self.job.jitter


class _Worker:
    """One (dp, stage) in one step."""

    def __init__(self, step: _Step, dp: int, stage: int) -> None:
        self.step, self.job, self.dp, self.stage = step, step.job, dp, stage
        self.now = step.rng.uniform(0, 0.2 * MS) * step.job.host_factor
        self.scatters: list[int] = []
        total = step.num * self.job.vpp
        self.total = total
        self.pending: dict[Transfer, float] = {}

    def chunk(self, number: int, *, forward: bool) -> int:
        """Return the chunk of the n-th forward or backward compute."""
        pp, vpp = self.job.pp, self.job.vpp
        chunk = number % (pp * vpp) // pp if vpp > 1 else 0
        return chunk if forward else vpp - 1 - chunk

    def microbatch(self, number: int) -> int:
        pp, vpp = self.job.pp, self.job.vpp
        return number if vpp == 1 else number // (pp * vpp) * pp + number % pp

    def peer(self, side: str, forward: bool, number: int) -> Transfer | None:  # noqa: FBT001
        """Return the transfer that the n-th compute of a direction sends or receives, if any."""
        pp, vpp = self.job.pp, self.job.vpp
        chunk = self.chunk(number, forward=forward)
        first_chunk, last_chunk = (0, vpp - 1) if forward else (vpp - 1, 0)
        first, last = (0, pp - 1) if forward else (pp - 1, 0)
        source, n = self.stage, number
        if side == "recv":
            if self.stage == first:
                if chunk == first_chunk:
                    return None
                source, n = last, number - pp
            else:
                source = self.stage + (-1 if forward else 1)
        elif self.stage == last and chunk == last_chunk:
            return None
        return self.dp, source, forward, n

    # The schedule of a worker.

    def work(self) -> Task:
        job = self.job
        if job.dp * job.dsp > 1:
            for chunk in range(job.vpp):
                yield from self.collect("params-all-gather", ("stage", self.stage), chunk=chunk)
        yield from self.interleaved() if job.vpp > 1 else self.one_f_one_b()
        yield from self.finish()

    def one_f_one_b(self) -> Task:
        num = self.total
        warm_up = min(self.job.pp - self.stage - 1, num)
        steady = num - warm_up
        for n in range(warm_up):
            yield from self.call(("recv", True, n))
            yield from self.compute(n, forward=True)
            yield from self.call(("send", True, n))
        if steady:
            yield from self.call(("recv", True, warm_up))
        for n in range(steady):
            yield from self.compute(n + warm_up, forward=True)
            yield from self.call(("send", True, n + warm_up), ("recv", False, n))
            yield from self.compute(n, forward=False)
            more = [("recv", True, n + warm_up + 1)] if n + 1 < steady else []
            yield from self.call(("send", False, n), *more)
        for n in range(steady, num):
            yield from self.call(("recv", False, n))
            yield from self.compute(n, forward=False)
            yield from self.call(("send", False, n))

    def interleaved(self) -> Task:
        pp, vpp, num = self.job.pp, self.job.vpp, self.total
        warm_up = min((pp - self.stage - 1) * 2 + (vpp - 1) * pp, num)
        if self.step.num == pp:
            warm_up = num
        yield from self.call(("recv", True, 0), initial=True)
        for n in range(warm_up):
            yield from self.compute(n, forward=True)
            calls = [("send", True, n), ("recv", True, n + 1)]
            if n + 1 == warm_up < num:
                calls += [("send", False, -1), ("recv", False, 0)]
            yield from self.call(*calls)
        if warm_up == num:
            yield from self.call(("recv", False, 0), initial=True)
        for n in range(num - warm_up):
            yield from self.compute(n + warm_up, forward=True)
            yield from self.compute(n, forward=False)
            yield from self.call(
                ("send", True, n + warm_up), ("recv", True, n + warm_up + 1),
                ("send", False, n), ("recv", False, n + 1),
            )  # fmt: skip
        for n in range(num - warm_up, num):
            yield from self.compute(n, forward=False)
            yield from self.call(("send", False, n), ("recv", False, n + 1))

    def call(self, *wanted: tuple[str, bool, int], initial: bool = False) -> Task:
        """Post transfers, and wait for batched ones."""
        begin = self.now
        real: list[tuple[str, Transfer, bool]] = []
        empty: list[str] = []
        for side, forward, n in wanted:
            key = self.peer(side, forward, n) if 0 <= n < self.total else None
            if key is not None:
                real.append((side, key, forward))
                self.step.posted[key, side] = begin
            elif self.job.records_no_ops and not initial:
                empty.append(_name(side, forward=forward))
        if not self.job.batched:
            for side, key, _ in real:
                self.pending[(side, *key)] = begin
            for name in empty:
                self.record(name, begin, begin + 2_000)
            return
        end = begin + (2_000 if empty else 0)
        for _side, key, _ in real:
            end = max(end, (yield from self.transfer_end(key)))
        for side, _, forward in real:
            self.record(_name(side, forward=forward), begin, end)
        for name in empty:
            self.record(name, begin, begin + 2_000 if not real else end)
        self.now = end + 5_000 if (real or empty) else end

    def transfer_end(self, key: Transfer) -> Generator[object, None, float]:
        """Wait until both sides of a transfer are posted; return its end."""
        posted = self.step.posted
        while (key, "send") not in posted or (key, "recv") not in posted:
            yield "waiting"
        if key not in self.step.ended:
            dp, source, forward, _ = key
            to = (source + (1 if forward else -1)) % self.job.pp
            lower = min(source, to) if abs(source - to) == 1 else self.job.pp - 1
            began = max(posted[key, "send"], posted[key, "recv"])
            self.step.ended[key] = began + self.step.latency(dp, lower)
        return self.step.ended[key]

    def compute(self, number: int, *, forward: bool) -> Task:
        job, step = self.job, self.step
        key = self.peer("recv", forward, number)
        if key is not None and not job.batched:
            posted = self.pending.pop(("recv", *key))
            end = yield from self.transfer_end(key)
            self.record(_name("recv", forward=forward), posted, end)
            self.now = max(self.now, end)
        yield from self.sent(wait=False)
        self.now += 20_000 * job.host_factor * step.noise()
        if forward and step.rng.random() < job.stall_chance:
            self.now += job.stall_ns
        duration = job.forward_ns * (1 if forward else 2) * step.noise() / job.vpp
        duration *= step.lengths[self.dp, self.microbatch(number)]
        if job.compute_ns is not None:
            at = self.dp, self.stage, step.number, self.microbatch(number), forward
            duration = job.compute_ns(*at)
        if step.faulty:
            duration *= job.worker_factor.get((self.dp, self.stage), 1.0)
            duration *= job.stage_factor.get(self.stage, 1.0)
        start, self.now = self.now, self.now + duration
        chunk = self.chunk(number, forward=forward)
        direction = "forward" if forward else "backward"
        self.record(
            f"{direction}-compute", start, self.now, chunk=chunk, mb=self.microbatch(number)
        )
        self.now += 8_000 * job.host_factor
        numbers = (n for n in range(self.total) if self.chunk(n, forward=False) == chunk)
        if job.overlapped and not forward and number == max(numbers):
            self.enter("grads-reduce-scatter", ("stage", self.stage), chunk)
            self.scatters.append(chunk)

    def sent(self, *, wait: bool) -> Task:
        """Record the sends on their own stream that have ended; ``wait`` for all of them."""
        for entry in list(self.pending):
            side, *rest = entry
            key = tuple(rest)
            ready = (key, "send") in self.step.posted and (key, "recv") in self.step.posted
            if side == "send" and (wait or ready):
                end = yield from self.transfer_end(key)
                self.record(_name("send", forward=key[2]), self.pending.pop(entry), end)

    def finish(self) -> Task:
        job = self.job
        yield from self.sent(wait=True)
        for name, duration in (("gc", 3_000), ("layernorm-grads-all-reduce", job.latency_ns)):
            start = self.now
            self.now += duration * self.step.noise()
            self.record(name, start, self.now)
        if job.overlapped:
            for chunk in self.scatters:
                yield from self.leave("grads-reduce-scatter", ("stage", self.stage), chunk)
        if self.stage in (0, job.pp - 1) and job.pp > 1:
            yield from self.collect("embedding-grads-all-reduce", ("dp", self.dp))
        if job.dp * job.dsp > 1:
            if job.overlapped:
                yield from self.collect("separate-grads-all-reduce", ("stage", self.stage))
            else:
                for chunk in range(job.vpp):
                    place = ("stage", self.stage)
                    yield from self.collect("grads-reduce-scatter", place, chunk=chunk)
        yield from self.collect("optimizer-clip-main-grad", ())
        start = self.now + 10_000 * job.host_factor
        self.now = start + 2 * MS * self.step.noise()
        self.record("optimizer", start, self.now)

    # Collectives.

    def collect(self, name: str, place: tuple[Any, ...], *, chunk: int = -1) -> Task:
        self.enter(name, place, chunk)
        self.now = yield from self.leave(name, place, chunk)
        self.now += 4_000 * self.job.host_factor

    def enter(self, name: str, place: tuple[Any, ...], chunk: int) -> None:
        self.step.entered[name, place, chunk][self.dp, self.stage] = self.now

    def leave(
        self, name: str, place: tuple[Any, ...], chunk: int
    ) -> Generator[object, None, float]:
        job, members = self.job, self.step.entered[name, place, chunk]
        num = {"stage": job.dp, "dp": 2, "": job.dp * job.pp}[place[0] if place else ""]
        while len(members) < num:
            yield "waiting"
        duration = job.latency_ns * (job.dp_factor if place[:1] == ("stage",) else 1)
        end = max(members.values()) + duration * self.step.noise()
        self.record(name, members[self.dp, self.stage], end, chunk=chunk)
        return end

    def record(self, name: str, start: float, end: float, *, chunk: int = -1, mb: int = -1) -> None:
        job = self.job
        shift = job.clock_ns.get((self.dp, self.stage), 0)
        self.step.rows.append(
            {
                "dp": self.dp,
                "stage": self.stage,
                "rank": job.rank(self.dp, self.stage),
                "type": name,
                "start": round(start) + shift,
                "end": round(end) + shift,
                "mc": chunk,
                "mb": mb,
                "gmc": chunk * job.pp + self.stage if chunk >= 0 else -1,
            }
        )


def _name(side: str, *, forward: bool) -> str:
    return f"{'forward' if forward else 'backward'}-{side}"


def from_each_steps_start(rows: list[Row]) -> list[Row]:
    """Return the rows with times relative to the start of their step."""
    first: dict[int, int] = {}
    for row in rows:
        first[row["step"]] = min(first.get(row["step"], row["start"]), row["start"])
    return [
        {**row, "start": row["start"] - first[row["step"]], "end": row["end"] - first[row["step"]]}
        for row in rows
    ]
