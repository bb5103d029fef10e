"""What of a traced step costs how much, in the step itself.

    python -m benchmarks.step_parts [--seconds 420] [--json FILE]

On each of two cores one process runs micro-batches of the model of `benchmarks.step_rank`, forward
and backward, without communication, each in one of five ways, the five in a new random order each
round:

``plain``   the model as it is
``nothing`` a `with` around each of its 120 experts that does nothing
``clocks``  two clock reads and an append around each, the least that a span by hand could do
``spans``   a span by hand around each
``hooks``   the tracer's own spans of forward and backward

Told is what each takes more than ``plain``, for an expert and for a micro-batch: the difference
of the first deciles, and the median of the differences within a round, each with a 95 % interval
by bootstrap over rounds. Micro-batches last a tenth of a second, so one round sees a machine that
is equally fast for all five, which two whole steps do not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from benchmarks.intervals import interval
from benchmarks.step_rank import NUM_EXPERTS, NUM_LAYERS, TOKENS, WIDTH, Model
from rankscope import tracer
from rankscope.tracer.record.interface import NOOP_SPAN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope.tracer.native.host_span import SpanContext

NUM_PROCESSES = 2
WAYS = ("plain", "nothing", "clocks", "spans", "hooks")
BOOTSTRAPS = 400
PLACES = {"forward": 0, "backward": 1}

Sample = tuple[int, int]
"""What forward and backward of a micro-batch took, wall clock, ns."""


class Root(nn.Module):
    """Runs a model that it does not hold: hooks on one root are none on another."""

    def __init__(self, inner: Model) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(1))
        self._inner = (inner,)  # so it is no child, whose parameters would be the root's

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the model's last state."""
        (inner,) = self._inner
        return inner.run(x)


class Job:
    """One model, whose micro-batches are run in each of the ways."""

    def __init__(self, spool: Path) -> None:
        torch.manual_seed(7)
        self._inner = Model()
        self._bare, self._hooked = Root(self._inner), Root(self._inner)
        self._optimizer = torch.optim.SGD(self._inner.parameters(), lr=1e-3)
        self._readings: list[tuple[int, int]] = []
        self._bodies = {
            "nothing": self._with_nothing,
            "clocks": self._with_clocks,
            "spans": self._inner.with_spans,
        }
        self._untraced = torch.autograd.backward
        tracer.install(spool=spool, run="parts", model=self._hooked)
        self._traced = torch.autograd.backward
        tracer.begin_steps()

    def sample(self, way: str) -> Sample:
        """Run one micro-batch."""
        self._inner.run = self._bodies.get(way, self._inner.plainly)
        root = self._hooked if way == "hooks" else self._bare
        batch = torch.randn(TOKENS, WIDTH)
        torch.autograd.backward = self._traced if way == "hooks" else self._untraced
        try:
            begin_ns = time.monotonic_ns()
            out = root(batch)
            middle_ns = time.monotonic_ns()
            (out - batch).square().mean().backward()
            end_ns = time.monotonic_ns()
        finally:
            torch.autograd.backward = self._traced
        return middle_ns - begin_ns, end_ns - middle_ns

    def step(self) -> None:
        """End the step."""
        self._optimizer.step()
        self._optimizer.zero_grad()
        tracer.step(tokens=TOKENS)

    def _with_nothing(self, x: torch.Tensor) -> torch.Tensor:
        for expert in self._inner.experts:
            with nothing("expert"):
                x = x + expert(x) / NUM_EXPERTS
        return x

    def _with_clocks(self, x: torch.Tensor) -> torch.Tensor:
        for expert in self._inner.experts:
            start_ns = time.monotonic_ns()
            x = x + expert(x) / NUM_EXPERTS
            self._readings.append((start_ns, time.monotonic_ns()))
        self._readings.clear()
        return x


def nothing(
    name: str, kind: object = None, microbatch: object = None, chunk: object = None
) -> SpanContext:
    """Return a span that records nothing, by a call like that of `tracer.span`."""
    if kind is None and microbatch is None and chunk is None:
        return NOOP_SPAN
    raise ValueError(name)


def measure(core: int, seconds: float) -> dict[str, list[Sample]]:
    """Return the samples of each way, taken on one core, a round in one place of each list."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[core]})
    torch.set_num_threads(1)
    found: dict[str, list[Sample]] = {way: [] for way in WAYS}
    order = list(WAYS)
    with tempfile.TemporaryDirectory() as spool:
        job = Job(Path(spool))
        for way in WAYS:
            job.sample(way)
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            random.shuffle(order)
            for way in order:
                found[way].append(job.sample(way))
            job.step()
        tracer.shutdown()
    return found


def row(way: str, part: str, processes: Sequence[dict[str, list[Sample]]]) -> dict[str, object]:
    """Return what one way takes more than ``plain`` in one part of a micro-batch, in us."""
    place = PLACES[part]
    pairs = [
        [
            (own[place] / 1e3, plain[place] / 1e3)
            for own, plain in zip(found[way], found["plain"], strict=True)
        ]
        for found in processes
    ]
    dice = random.Random(7)
    drawn = sorted(
        statistics.mean(_decile_more(dice.choices(rounds, k=len(rounds))) for rounds in pairs)
        for _ in range(BOOTSTRAPS)
    )
    differences = [own - plain for rounds in pairs for own, plain in rounds]
    return {
        "way": way,
        "part": part,
        "floor_more_us": round(statistics.mean(_decile_more(rounds) for rounds in pairs)),
        "floor_interval_us": [
            round(drawn[int(0.025 * BOOTSTRAPS)]),
            round(drawn[int(0.975 * BOOTSTRAPS)]),
        ],
        "median_more_us": round(statistics.median(differences)),
        "median_interval_us": [round(end) for end in interval(differences, rounds=BOOTSTRAPS)],
    }


def _decile_more(pairs: Sequence[tuple[float, float]]) -> float:
    deciles: list[float] = [
        statistics.quantiles(times, n=10)[0] for times in zip(*pairs, strict=True)
    ]
    return deciles[0] - deciles[1]


def document_of(processes: Sequence[dict[str, list[Sample]]], seconds: float) -> dict[str, object]:
    """Return what was found, beside machine and versions."""
    plain = [sum(sample) / 1e6 for found in processes for sample in found["plain"]]
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "seconds": seconds,
        "rounds": [len(found["plain"]) for found in processes],
        "plain_microbatch_ms": round(statistics.median(plain), 1),
        "experts_in_a_microbatch": NUM_LAYERS * NUM_EXPERTS,
        "rows": [row(way, part, processes) for part in PLACES for way in WAYS if way != "plain"],
    }


def main() -> None:
    """Measure on two cores at once, as the two ranks of `benchmarks.tracer_step` do, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--json", type=Path, help="write the document here")
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.core is not None:
        json.dump(measure(options.core, options.seconds), sys.stdout)
        return
    command = [sys.executable, "-m", "benchmarks.step_parts", "--seconds", str(options.seconds)]
    running = [
        subprocess.Popen(
            [*command, "--core", str(core)], cwd=Path(__file__).parents[1], stdout=subprocess.PIPE
        )
        for core in range(NUM_PROCESSES)
    ]
    told = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit("a process has failed: see its message above")
    document = document_of([json.loads(one) for one in told], options.seconds)
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
