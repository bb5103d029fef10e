"""Parts of `gpu_tracer`, each of which runs in its own process.

They need only torch: the interval of a median is computed here and not by scipy.
"""

from __future__ import annotations

import gc
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rankscope import tracer
from rankscope.tracer.device.backend import MarkPool
from rankscope.tracer.device.clock import DeviceClock, Probe
from rankscope.tracer.device.communication import CommStream, DeviceComm
from rankscope.tracer.device.span import DeviceSpan
from rankscope.tracer.device.timing import start_device_timing
from rankscope.tracer.span import SpanKind
from rankscope.tracer.spool import PROCESS_FILE, read_counts, read_dropped

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.gpu_rig import Rig
    from rankscope.tracer.record.recorder import Recorder

MICROBATCHES = 100
REDUCES = 250
MANUAL_SPANS = 299
"""Manual spans. With two spans per micro-batch, a communication and a wait per reduction, and the
optimizer, a step has 1,000."""

SIZES = (4096, 2048, 1024)
MAX_STEP_S = 1.5
"""Longest step: the first size of a matrix that does not exceed it is used."""

BLOCK_S = 4.0
STEP_BUDGET_S = 75.0
SYNC_CALLS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")
ROUNDS = 20
ROUND_MS = 5.0
MAPPING_S = 60.0
FAKE_MAPPING_S = 30.0
MARKS = 5_000


class Job:
    """A training of a few matrix products, with 1,000 spans per step if it is traced."""

    def __init__(self, rig: Rig, size: int, spool: Path) -> None:
        self.size = size
        self._rig = rig
        self._spool = spool
        self._model = torch.nn.Sequential(
            *(torch.nn.Linear(size, size, bias=False) for _ in range(4))
        ).to(rig.torch_device, torch.bfloat16)
        self._data = torch.randn(size, size, device=rig.torch_device, dtype=torch.bfloat16)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-6)
        self._buffer = torch.ones(1 << 16, device=rig.torch_device)
        self._blocks = 0

    def steps(self, number: int) -> float:
        """Train and return the seconds per step."""
        self._rig.synchronize()
        before, begun_s = _full_collections(), time.perf_counter()
        for _ in range(number):
            self._step()
            tracer.step()
        self.launch_s = (time.perf_counter() - begun_s) / number
        """Seconds per step that the host took to issue it."""
        self.full_collections = (_full_collections() - before) / number
        """Full garbage collections per step."""
        self._rig.synchronize()
        return (time.perf_counter() - begun_s) / number

    def traced(self, run: Callable[[], float]) -> tuple[float, Path]:
        """Return the result of ``run`` with the tracer on, and the folder of its records."""
        self._blocks += 1
        recorder: Any = tracer.install(
            spool=self._spool, run=f"block-{self._blocks}", model=self._model
        )
        if self._rig.torch_device == "cpu":
            start_device_timing(recorder, lambda: self._rig.backend)
            recorder.device_timing._clock = self._rig.clock
            recorder.device_timing._sleep = self._rig.sleep
        tracer.begin_steps()
        try:
            return run(), recorder.folder
        finally:
            tracer.shutdown()

    def _step(self) -> None:
        per_reduce, num_reduced = REDUCES / MICROBATCHES, 0
        for number in range(MICROBATCHES):
            loss = self._model(self._data).mean()
            loss.backward()
            while num_reduced < (number + 1) * per_reduce:
                work = dist.all_reduce(self._buffer, async_op=True)
                if work is not None:
                    work.wait()
                num_reduced += 1
        for _ in range(MANUAL_SPANS):
            with tracer.span("manual"):
                pass
        self._optimizer.step()
        self._optimizer.zero_grad()


def _full_collections() -> int:
    return int(gc.get_stats()[2]["collections"])


def measure_steps(rig: Rig, *, fake: bool) -> dict[str, object]:
    """Return the ratio of a step traced / untraced, additional synchronisations, cost of a span."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            rig.dist_backend, init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        smaller = iter((64,) if fake else SIZES)
        job, once_s = _sized(rig, next(smaller), Path(folder))
        for size in smaller:
            if once_s < MAX_STEP_S:
                break
            job, once_s = _sized(rig, size, Path(folder))
        number = max(1, min(50, round(BLOCK_S / once_s))) if not fake else 1
        document = _step_ratio(job, number, budget_s=0.0 if fake else STEP_BUDGET_S)
        document["matrix_size"] = job.size
        document["synchronisations"] = _synchronisations(job)
        dist.destroy_process_group()
    return document


def _sized(rig: Rig, size: int, spool: Path) -> tuple[Job, float]:
    """Return a job and the seconds of one of its steps."""
    job = Job(rig, size, spool)
    return job, min(job.steps(1) for _ in range(2))


def _step_ratio(job: Job, number: int, *, budget_s: float) -> dict[str, object]:
    ratios: list[float] = []
    untraced_s: list[float] = []
    accounts, until_s = [], time.monotonic() + budget_s
    host: dict[str, list[tuple[float, float]]] = {"untraced": [], "traced": []}

    def run(kind: str) -> float:
        taken_s = job.steps(number)
        host[kind].append((job.launch_s, job.full_collections))
        return taken_s

    while not ratios or time.monotonic() < until_s:
        before = run("untraced")
        first, folder = job.traced(lambda: run("traced"))
        second, _ = job.traced(lambda: run("traced"))
        after = run("untraced")
        ratios.append((first + second) / (before + after))
        untraced_s += [before, after]
        accounts.append(_account(folder, number))
    low, high = interval(ratios)
    return {
        "steps_per_block": number,
        "quads": len(ratios),
        "step_s_untraced": statistics.median(untraced_s),
        "step_ratio": {"median": statistics.median(ratios), "low_95": low, "high_95": high},
        "launch_s": {kind: statistics.median(s for s, _ in seen) for kind, seen in host.items()},
        "full_collections_per_step": {
            kind: statistics.mean(num for _, num in seen) for kind, seen in host.items()
        },
        "account": accounts[-1],
    }


def _account(folder: Path, num_steps: int) -> dict[str, object]:
    data = (folder / PROCESS_FILE).read_bytes()
    account = read_counts(data)
    return {
        "spans_per_step": account.num_produced / num_steps,
        "background_cpu_ns_per_span": account.own_cpu_ns / max(1, account.num_produced),
        "dropped": {reason.name: num for reason, num in read_dropped(data).items()},
    }


def _synchronisations(job: Job) -> dict[str, object]:
    """Count the calls that wait for the device in one step, untraced and traced, by CUPTI."""
    untraced = _runtime_calls(lambda: job.steps(1))
    traced: Counter[str] = Counter()

    def profiled() -> float:
        traced.update(_runtime_calls(lambda: job.steps(1)))
        return 0.0

    job.traced(profiled)
    return {
        "untraced": {name: untraced[name] for name in SYNC_CALLS},
        "traced": {name: traced[name] for name in SYNC_CALLS},
        "extra": sum(traced[name] - untraced[name] for name in SYNC_CALLS),
        "counted": bool(untraced),
    }


def _runtime_calls(run: Callable[[], float]) -> Counter[str]:
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        run()
        return Counter()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
    return Counter(event.name for event in profiler.events() if event.name.startswith("cuda"))


def measure_overlap(rig: Rig, *, fake: bool) -> dict[str, object]:
    """Return the time of compute beside communication, without and with marks."""
    with tempfile.TemporaryDirectory() as folder:
        recorder: Any = tracer.install(spool=folder, run="overlap")
        start_device_timing(recorder, lambda: rig.backend)
        if fake:
            recorder.device_timing._clock, recorder.device_timing._sleep = rig.clock, rig.sleep
        comm = rig.new_stream()
        _rounds(rig, comm, None)
        quads = []
        for _ in range(3 if fake else 15):
            plain, first, second, again = (
                _rounds(rig, comm, one) for one in (None, recorder, recorder, None)
            )
            quads.append(((plain + again) / 2, (first + second) / 2))
        tracer.shutdown()
    ratios = [traced / plain for plain, traced in quads]
    low, high = interval(ratios)
    plain_ms = statistics.median(plain for plain, _ in quads)
    traced_ms = statistics.median(traced for _, traced in quads)
    return {
        "compute_ms": ROUND_MS,
        "communication_ms": ROUND_MS,
        "round_ms_untraced": plain_ms,
        "round_ms_traced": traced_ms,
        "overlap_ratio_untraced": (2 * ROUND_MS - plain_ms) / ROUND_MS,
        "overlap_ratio_traced": (2 * ROUND_MS - traced_ms) / ROUND_MS,
        "ratio": {"median": statistics.median(ratios), "low_95": low, "high_95": high},
    }


def _rounds(rig: Rig, comm: Any, recorder: Recorder | None) -> float:  # noqa: ANN401
    """Return the ms of a round: communication and compute of equal length, beside each other."""
    rig.synchronize()
    chain = CommStream()
    begun_ns = rig.clock()
    for _ in range(ROUNDS):
        timing = recorder.device_timing if recorder is not None else None
        launched = timing.mark(0) if timing is not None else None
        rig.wait_for(comm, rig.default)
        rig.kernel(ROUND_MS, comm)
        rig.kernel(ROUND_MS, rig.default)
        followed = None
        if timing is not None and launched is not None:
            followed = DeviceComm(timing, launched, chain, chained=True)
            followed.reach_wait(alone=True)
        rig.wait_for(rig.default, comm)
        if followed is not None:
            followed.pass_wait(Discarded())
    rig.synchronize()
    return (rig.clock() - begun_ns) / ROUNDS / 1e6


class Discarded:
    """Writes nothing."""

    def span(self, *about: object) -> None:
        """Do nothing."""

    wait = lose = note_side_stream = span


def measure_mapping(rig: Rig, *, fake: bool) -> dict[str, object]:
    """Return the distance of device times from host times around single events, over minutes."""
    clock = DeviceClock(
        MarkPool(rig.backend.new_event, 0),
        rig.backend.private_stream(0),
        clock=rig.clock,
        sleep=rig.sleep,
    )
    stream, errors, bounds, outside = rig.new_stream(), [], [], 0
    seconds = FAKE_MAPPING_S if fake else MAPPING_S
    until_ns = rig.clock() + round(seconds * 1e9)
    next_ns = rig.clock() + 3_000_000_000
    while rig.clock() < until_ns:
        clock.renew_if_due()
        rig.sleep(0.02)
        if rig.clock() < next_ns:
            continue
        next_ns += 1_000_000_000
        event, launch_ns = rig.backend.new_event(), rig.clock()
        seen = Probe(event, stream, clock=rig.clock, sleep=rig.sleep).watch(50_000_000)
        if seen is None:
            continue
        placed = clock.read_time(event, launch_ns)
        errors.append(abs(placed.at_ns - (seen.lower_ns + seen.upper_ns) // 2))
        bounds.append(placed.error_ns)
        distances_ns = max(seen.lower_ns - placed.at_ns, placed.at_ns - seen.upper_ns, 0)
        outside += distances_ns > placed.error_ns
    return {
        "seconds": seconds,
        "events": len(errors),
        "error_ns": {"median": statistics.median(errors), "max": max(errors)},
        "bound_ns": {"median": statistics.median(bounds), "max": max(bounds)},
        "outside_the_bound": outside,
        "drift_ppb": round(clock.drift.ratio * 1e9),
        "drift_error_ppb": round(clock.drift.error_ratio * 1e9),
    }


def measure_cost(rig: Rig, *, fake: bool) -> dict[str, object]:
    """Return the host time of a mark and of a span on the job's thread, and in the resolver."""
    with tempfile.TemporaryDirectory() as folder:
        recorder: Any = tracer.install(spool=folder, run="cost")
        start_device_timing(recorder, lambda: rig.backend)
        timing: Any = recorder.device_timing
        if fake:
            timing._clock, timing._sleep = rig.clock, rig.sleep
        head = recorder.head("forward", SpanKind.FORWARD)
        taking_ns, entering_ns, resolving_ns, num = [], [], [], MARKS // 10
        for _ in range(10):
            with timing._turn:  # The background thread is idle, so that this one resolves.
                begun_ns = time.thread_time_ns()
                marks = [timing.mark(0) for _ in range(num)]
                taking_ns.append((time.thread_time_ns() - begun_ns) / num)
                for mark in marks:
                    timing.release(mark)
                begun_ns = time.thread_time_ns()
                for _ in range(num // 2):
                    with DeviceSpan(recorder, head, device=0):
                        pass
                entering_ns.append((time.thread_time_ns() - begun_ns) / (num // 2))
                rig.synchronize()
                rig.sleep(0.01)
                before, begun_ns = timing.num_resolved, time.thread_time_ns()
                while timing._resolve() and timing.num_resolved < before + num // 2:
                    rig.sleep(0.01)
                resolving_ns.append((time.thread_time_ns() - begun_ns) / (num // 2))
        tracer.shutdown()
    return {
        "mark_ns": statistics.median(taking_ns),
        "span_ns": statistics.median(entering_ns),
        "resolve_span_ns": statistics.median(resolving_ns),
        "threads": threading.active_count(),
    }


def interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, by resampling with a fixed seed."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(2_000))
    return medians[50], medians[1_949]


PARTS: dict[str, Callable[..., dict[str, object]]] = {
    "steps": measure_steps,
    "overlap": measure_overlap,
    "mapping": measure_mapping,
    "cost": measure_cost,
}
