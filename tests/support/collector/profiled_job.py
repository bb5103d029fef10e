"""Traces of `torch.profiler` of a whole job, whose ranks all-reduce at the end of each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .kineto_builder import AUTOGRAD, MAIN, TraceBuilder

if TYPE_CHECKING:
    from pathlib import Path

LAUNCH = 0.006
"""Time from a launch to the begin of its kernel on an idle stream, ms."""

RESUME = 0.006
"""Time from the end of a communication to the begin of a kernel that waits for it, ms."""


@dataclass(kw_only=True)
class ProfiledJob:
    """A job in which a rank is slow; all times are ms."""

    num_ranks: int = 4
    num_steps: int = 8
    num_kernels: int = 10
    """Of a step, besides the optimizer's: two fifths forward, the others backward."""

    kernel: float = 3.6
    """Duration of a kernel."""

    pace: float = 0.01
    """Time between two launches."""

    slow_kernels: dict[int, float] = field(default_factory=dict)
    """Factor of the kernels' duration, by rank."""

    slow_host: dict[int, float] = field(default_factory=dict)
    """Factor of the pace, by rank."""

    delays: dict[tuple[int, int], float] = field(default_factory=dict)
    """Time by which a host is late for the first launch of a step, by rank and step."""

    groups: dict[str, tuple[str, tuple[int, ...]]] | None = None
    comm_name: str = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    comm_args: dict[str, Any] = field(default_factory=dict)
    """Of the kernel."""

    call: dict[str, Any] | None = None
    """Of the ``record_param_comms`` around the launch; None: there is none."""

    def write(self, folder: Path) -> Path:
        """Write the file of each rank, and return their folder."""
        folder.mkdir(parents=True, exist_ok=True)
        traces = [
            TraceBuilder(rank, self.num_ranks, groups=self.groups) for rank in range(self.num_ranks)
        ]
        begin = 0.0
        for step in range(self.num_steps):
            arrival = begin + max(self._times(rank, step)[-1][2] for rank in range(self.num_ranks))
            for trace in traces:
                self._add_step(trace, step, begin, arrival=arrival)
                trace.step(step, begin, arrival + 5)
            begin = arrival + 5
        for trace in traces:
            trace.write(folder)
        return folder

    def _times(self, rank: int, step: int) -> list[tuple[float, float, float]]:
        """Return launch, begin and end of each kernel, from the begin of a step."""
        pace = self.pace * self.slow_host.get(rank, 1.0)
        duration = self.kernel * self.slow_kernels.get(rank, 1.0)
        times, free = [], 0.0
        for number in range(self.num_kernels):
            launch = 1 + self.delays.get((rank, step), 0.0) + number * pace
            begin = max(launch + LAUNCH, free)
            free = begin + duration
            times.append((launch, begin, free))
        return times

    def _add_step(self, trace: TraceBuilder, step: int, at: float, *, arrival: float) -> None:
        times = self._times(trace.rank, step)
        num_forward = 2 * self.num_kernels // 5
        jitter = 0.002 * ((3 * trace.rank + 5 * step) % 7)
        for number, (launch, begin, end) in enumerate(times):
            tid = MAIN if number < num_forward else AUTOGRAD
            last = begin + (end - begin) * (1 - jitter)
            trace.kernel("gemm", at + begin, at + last, launch=at + launch, tid=tid)
        first, final = times[num_forward][0], times[-1][0]
        trace.backward(at + first - 0.001, at + final + 0.004)
        launch = at + final + 0.002
        if self.call is not None:
            trace.add(
                "record_param_comms", "cpu_op", launch - 0.001, launch + 0.001, tid=AUTOGRAD,
                **self.call,
            )  # fmt: skip
        trace.kernel(
            self.comm_name, at + times[-1][2], arrival + 2, launch=launch, tid=AUTOGRAD,
            stream=20, **self.comm_args,
        )  # fmt: skip
        launch = at + final + 0.005
        trace.add("Optimizer.step#AdamW.step", "user_annotation", launch, launch + 1, tid=MAIN)
        trace.kernel("adam", arrival + 2 + RESUME, arrival + 4, launch=launch + 0.5)
