"""The cost of tracing in small steps: the ratio of the steps, and each captured thing.

    python -m benchmarks.small_steps [--processes 8] [--steps 150] [--json FILE]

One process trains a GPT of 24 blocks, with a loader, AdamW and two collectives of one number, in a
group of one rank. Its step is bound by launches on a GPU, and by the dispatcher on a CPU.

* **The ratio**: the given number of processes, untraced and traced in the order A B B A. Each takes
  the median CPU time and the median wall time of its steps; the ratio is that of the medians of the
  processes. The 95 % interval draws processes (bootstrap). On a GPU each step also ends in a
  synchronisation, in a second series.
* **By profile**: one more process reads the clock where the job enters the tracer, and where the
  tracer enters the function of torch that it replaced. The difference is the tracer's, in the
  step as it is: caches are as cold as after any backward. Medians of all calls, less what the
  measurement itself costs around a function that does nothing. Other load changes few of so short
  calls, so the medians hold on a busy machine, and the ratio does not.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.intervals import bootstrap_interval

if TYPE_CHECKING:
    from collections.abc import Callable

IS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_CUDA else "cpu")
NUM_BLOCKS, WIDTH, NUM_HEADS, VOCABULARY, LENGTH = 24, 64, 4, 256, 8
NUM_UNTIMED = 20
NUM_RESAMPLES = 2_000
LAUNCH_BOUND_US = 20_000
"""The step of which tracing may cost 1 %."""

GARBAGE = "collection of garbage"
"""Collections are rare: their cost is measured outside of the steps."""

Meters = dict[str, list[tuple[int, int]]]
"""By name of the captured thing: ns of each call in the tracer, and in the replaced function."""


class Block(nn.Module):
    """A block of eleven modules."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tokens' next state, shape (batch, length, width)."""
        shape = (*x.shape[:2], NUM_HEADS, WIDTH // NUM_HEADS)
        hidden = self.norms[0](x)
        queries, keys, values = (
            self.parts[index](hidden).view(shape).transpose(1, 2) for index in range(3)
        )
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.parts[3](mixed.transpose(1, 2).reshape(x.shape))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return out


class Gpt(nn.Module):
    """A language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits, shape (batch, length, vocabulary)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Tokens(Dataset[torch.Tensor]):
    """Endless sequences."""

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((LENGTH,), index % VOCABULARY)


class Job:
    """The training; nothing in it knows of a tracer."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        store = torch._C._distributed_c10d.HashStore()
        backend = "nccl" if IS_CUDA else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        self._model = Gpt().to(DEVICE)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._batches = iter(DataLoader(Tokens(), batch_size=1))
        self._number = torch.ones(1, device=DEVICE)

    def step(self) -> None:
        """Train one step."""
        tokens = next(self._batches).to(DEVICE)
        loss = F.cross_entropy(self._model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        dist.all_reduce(self._number)
        work = dist.all_reduce(self._number, async_op=True)
        if work is not None:
            work.wait()
        self._optimizer.step()
        self._optimizer.zero_grad()


def synchronize(*, ends_steps: bool) -> None:
    """Wait for the device, if steps are to end so."""
    if ends_steps and IS_CUDA:
        torch.cuda.synchronize()


def time_steps(num_steps: int, *, with_sync: bool) -> dict[str, float]:
    """Return the medians of CPU and wall time of a step, ms."""
    job, times = Job(), []
    for index in range(NUM_UNTIMED + num_steps):
        before = time.process_time_ns(), time.perf_counter_ns()
        job.step()
        synchronize(ends_steps=with_sync)
        if index >= NUM_UNTIMED:
            now = time.process_time_ns(), time.perf_counter_ns()
            times.append([(end - begin) / 1e6 for begin, end in zip(before, now, strict=True)])
    cpu, wall = np.median(np.array(times), axis=0).tolist()
    return {"cpu_ms": cpu, "wall_ms": wall}


class Meter:
    """Clocks around the tracer, and around what it replaced."""

    def __init__(self) -> None:
        self.meters: Meters = defaultdict(list)
        self._inner_ns = 0

    def outer(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of the tracer, measured from its begin to its end."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            self._inner_ns = 0
            begin_ns = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                whole_ns = time.perf_counter_ns() - begin_ns
                self.meters[name].append((whole_ns - self._inner_ns, self._inner_ns))

        return call

    def inner(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of torch, whose time is not the tracer's."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            begin_ns = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self._inner_ns = time.perf_counter_ns() - begin_ns

        return call

    def own_ns(self) -> int:
        """Return what the measurement itself takes of a call, ns."""
        passes = self.outer("nothing", self.inner(lambda *_: None))
        for _ in range(1000):
            passes(None)
        return int(statistics.median(own for own, _ in self.meters.pop("nothing")))


def place_clocks(meter: Meter) -> None:
    """Measure what the tracer will install."""
    from torch._ops import OpOverload
    from torch.optim import optimizer

    from rankscope.tracer.patches import Patches

    names = {"_engine_run_backward": "backward", "__next__": "batch", "wait": "wait"}
    wrap: Any = Patches.wrap
    implement: Any = torch.library.Library.impl

    def wrap_measured(patches: Patches, owner: Any, name: str, how: Any) -> None:  # noqa: ANN401
        def measured(original: Any) -> Any:  # noqa: ANN401
            return meter.outer(names[name], how(meter.inner(original)))

        wrap(patches, owner, name, measured if name in names else how)

    def implement_measured(
        library: Any,  # noqa: ANN401
        op: Any,  # noqa: ANN401
        kernel: Any,  # noqa: ANN401
        *about: Any,  # noqa: ANN401
        **named: Any,  # noqa: ANN401
    ) -> None:
        implement(library, op, meter.outer("collective", kernel), *about, **named)

    replaced: list[tuple[Any, str, Any]] = [
        (Patches, "wrap", wrap_measured),
        (torch.library.Library, "impl", implement_measured),
        (OpOverload, "redispatch", meter.inner(OpOverload.redispatch)),
        (Gpt, "_call_impl", meter.inner(Gpt._call_impl)),
    ]
    for owner, name, function in replaced:
        setattr(owner, name, function)
    for name in ("register_optimizer_step_pre_hook", "register_optimizer_step_post_hook"):
        register = getattr(optimizer, name)
        setattr(
            optimizer,
            name,
            lambda hook, register=register: register(
                meter.outer(f"optimizer: {hook.__qualname__}", hook)
            ),
        )


def profile(num_steps: int) -> dict[str, object]:
    """Return what each captured thing costs, us."""
    from rankscope import tracer

    meter = Meter()
    own_ns = meter.own_ns()
    place_clocks(meter)
    with tempfile.TemporaryDirectory() as spool:
        tracer.install(spool=spool, run="small", count_steps=True)
        job = Job()
        for _ in range(NUM_UNTIMED):
            job.step()
        Gpt.__call__ = meter.outer("forward", Gpt.__call__)  # type: ignore[method-assign]
        before = {name: len(calls) for name, calls in meter.meters.items()}
        begin_ns, begin_s = time.process_time_ns(), background_s()
        for _ in range(num_steps):
            job.step()
        background_us = (background_s() - begin_s) * 1e6 / num_steps
        step_us = (time.process_time_ns() - begin_ns) / 1e3 / num_steps
        for name in ("start", "stop"):
            for _ in range(1000):
                for callback in gc.callbacks:
                    meter.outer(GARBAGE, callback)(name, {})
        rows = [
            summarize(name, calls[before.get(name, 0) :], own_ns, num_steps)
            for name, calls in meter.meters.items()
        ]
        tracer.shutdown()
    total_us = background_us + sum(float(str(row["us_a_step"])) for row in rows)
    return {
        "rows": rows,
        "background_us_a_step": round(background_us, 1),
        "total_us_a_step": round(total_us, 1),
        "share_of_20_ms": round(total_us / LAUNCH_BOUND_US, 4),
        "measured_step_cpu_us": round(step_us),
    }


def summarize(
    name: str, calls: list[tuple[int, int]], own_ns: int, num_steps: int
) -> dict[str, object]:
    """Return a row of the profile."""
    ours_us = (statistics.median(ours for ours, _ in calls) - own_ns) / 1e3
    num_a_step = 0.0 if name == GARBAGE else len(calls) / num_steps
    return {
        "captured": name,
        "us": round(ours_us, 1),
        "op_us": round(statistics.median(its for _, its in calls) / 1e3, 1),
        "calls_a_step": round(num_a_step, 2),
        "us_a_step": round(ours_us * num_a_step, 1),
    }


def background_s() -> float:
    """Return the CPU time of the tracer's thread so far."""
    for thread in threading.enumerate():
        if thread.name == "rankscope-spool" and thread.ident is not None:
            return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return 0.0


def run_child(part: str, num_steps: int, spool: str = "") -> Any:  # noqa: ANN401
    """Run one process, traced if it gets a spool; return what it printed."""
    module = ["-m", "rankscope.tracer"] if spool else []
    command = [sys.executable, *module, __file__, "--part", part, "--steps", str(num_steps)]
    root = str(Path(__file__).parent.parent)
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "RANKSCOPE_TRACE": spool},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure_ratio(part: str, num_processes: int, num_steps: int) -> dict[str, object]:
    """Run the processes in the order A B B A; return the ratios of their steps."""
    letters = ("UTTU" * num_processes)[:num_processes]
    with tempfile.TemporaryDirectory() as spool:
        found = [run_child(part, num_steps, spool if it == "T" else "") for it in letters]
    row: dict[str, object] = {"series": part, "processes": num_processes}
    for unit in ("cpu_ms", "wall_ms"):
        # The neighbours U T and T U are pairs: what changes slowly affects both.
        values = np.array([it[unit] for it in found]).reshape(-1, 2)
        swapped = np.array([letters[at : at + 2] == "TU" for at in range(0, len(letters), 2)])
        values[swapped] = values[swapped][:, ::-1]
        row[unit] = [round(float(it), 2) for it in np.median(values, axis=0)]
        row[unit.replace("ms", "ratio")] = round(ratio(values), 4)
        interval = bootstrap_interval(
            np.arange(len(values)),
            lambda drawn, values=values: ratio(values[drawn]),  # type: ignore[misc]
            num_resamples=NUM_RESAMPLES,
        )
        row[unit.replace("ms", "ratio_interval")] = [round(it, 4) for it in interval]
    return row


def ratio(pairs: Any) -> float:  # noqa: ANN401 - an array of (untraced, traced)
    """Return the ratio of the medians, traced to untraced."""
    untraced, traced = np.median(pairs, axis=0)
    return float(traced / untraced)


def main() -> None:
    """Measure, and print the document."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--processes", type=int, default=8, help="of each series; a multiple of 4")
    parser.add_argument("--steps", type=int, default=150, help="timed steps of each process")
    parser.add_argument("--part", help="what a child of this program does")
    parser.add_argument("--json", type=Path, help="write the document here")
    options = parser.parse_args()
    if options.part == "profile":
        print(json.dumps(profile(options.steps)))
    elif options.part:
        print(json.dumps(time_steps(options.steps, with_sync=options.part == "synchronised")))
    if options.part:
        return
    series = ["queued", "synchronised"] if IS_CUDA else ["queued"]
    document = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "device": torch.cuda.get_device_name() if IS_CUDA else "CPU",
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "profile": run_child("profile", options.steps),
        "ratios": [measure_ratio(it, options.processes, options.steps) for it in series],
    }
    text = json.dumps(document, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
