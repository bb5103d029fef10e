"""The cost of tracing a training step on CPU: micro-batches of one job, traced and untraced.

    python -m benchmarks.step_cost [--seconds 600] [--tokens 32] [--scenario ...] [--json FILE]

Two gloo ranks, each pinned to a core of its own, train a small mixture of experts by DDP, 8
micro-batches a step. Each micro-batch gets a random letter, the same on both ranks. T is traced,
with a manual span around each expert: about 1,000 records a step. U is untraced: the tracer's hooks
are off, what it replaced is restored, and its communication kernels are out of torch's dispatcher.
The last micro-batch of a step includes the end of the step: reducing gradients and loss, the
optimizer, `tracer.step`.

Other load on the machine lasts longer than a micro-batch, so it affects neighbouring micro-batches
alike, which is not true of whole steps. The results, each with a 95 % interval by bootstrap over
steps, are:

* the cost of tracing one micro-batch: half of (median of T after U) - (median of U after T), each
  of the differences between neighbours;
* the same for the last micro-batch, from its differences to the one before, by that one's letter.
  It is measured in CPU time of its thread, because it waits for the other rank;
* the CPU time of the tracer's background thread per step, which runs for either letter;
* the ratio of a step: the sum of these over the time of an untraced step.

Scenarios: ``healthy`` (room for all records), ``agent-dead`` (no agent deletes segments, so the
spool's quota is used up in the first step), ``disk-full`` (a tmpfs of a few MiB that is full once
the tracer has started; needs user namespaces) and ``control`` (letters without tracing: any
difference from 0 is noise).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel

from benchmarks.intervals import bootstrap_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NUM_RANKS = 2
NUM_LAYERS, NUM_EXPERTS, WIDTH, TOKENS, NUM_MICROBATCHES = 6, 20, 256, 32, 8

SMALL_SEGMENT_BYTES = 1 << 16
"""A segment that half a step fills."""

SCENARIOS = {
    "healthy": {},
    "agent-dead": {
        "RANKSCOPE_SEGMENT_BYTES": str(SMALL_SEGMENT_BYTES),
        "RANKSCOPE_SPOOL_BYTES": str(2 * SMALL_SEGMENT_BYTES),
    },
    "disk-full": {"RANKSCOPE_SEGMENT_BYTES": str(SMALL_SEGMENT_BYTES)},
    "control": {},
}
"""Environment variables of each."""

DISK_SIZE = "4m"

NUM_UNTIMED = 4
"""Steps before the first timed one, untraced and then traced."""

MIN_STEPS = 50
"""Steps of both ranks: with fewer, some bootstrap draw lacks a pair of letters."""

NUM_RESAMPLES = 300
Step = tuple[str, list[int]]
"""The letters of a step's micro-batches, and the duration of each, ns: wall clock, except the last,
which waits for the other rank: CPU time of its thread."""


class Expert(nn.Module):
    """One of the small networks of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tokens' next state, shape (tokens, width)."""
        out: torch.Tensor = self.down(torch.relu(self.up(x)))
        return out


class Model(nn.Module):
    """A mixture of experts in which every expert gets every token, so that all steps are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(NUM_LAYERS * NUM_EXPERTS))
        self.has_spans = False
        """Whether `forward` puts a span around each expert."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last state."""
        return self._with_spans(x) if self.has_spans else self._without_spans(x)

    def _without_spans(self, x: torch.Tensor) -> torch.Tensor:
        for expert in self.experts:
            x = x + expert(x) / NUM_EXPERTS
        return x

    def _with_spans(self, x: torch.Tensor) -> torch.Tensor:
        from rankscope.tracer import span

        for expert in self.experts:
            with span("expert"):
                x = x + expert(x) / NUM_EXPERTS
        return x


class Switch:
    """Removes the tracer from the process and puts it back, between two micro-batches."""

    def __init__(self) -> None:
        """Record what `tracer.install` replaces; create before it, call `installed` after it."""
        from rankscope.tracer import patches as patch
        from rankscope.tracer.capture import intercept

        self._patches: list[tuple[Any, str, Any, Any]] = []
        self._kernels: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._libraries: list[Any] = []
        self._is_on = self._has_kernels = True
        wrap = patch.Patches.wrap

        def wrap_and_note(patches: Any, owner: Any, name: str, how: Any) -> None:  # noqa: ANN401
            original = getattr(owner, name)
            wrap(patches, owner, name, how)
            self._patches.append((owner, name, original, getattr(owner, name)))

        setattr(patch.Patches, "wrap", wrap_and_note)  # noqa: B010 - of another signature
        for name in ("_register_launches", "_register_functional_waits"):
            setattr(intercept, name, self._noting(getattr(intercept, name)))
        self._callbacks = list(gc.callbacks)

    def installed(self) -> None:
        """Record the hooks that the tracer has installed."""
        self._callbacks = [it for it in gc.callbacks if it not in self._callbacks]
        import torch.optim.optimizer as optimizers

        from rankscope.tracer.capture import module_calls

        known = {id(replacement): original for _, _, original, replacement in self._patches}
        self._patches += [
            (module, name, known[id(value)], value)
            for module in list(sys.modules.values())
            for name, value in list(vars(module).items())
            if id(value) in known and module is not sys.modules[__name__]
        ]
        self._global: list[tuple[Any, dict[int, Any]]] = [
            (hooks, dict(hooks))
            for hooks in (
                module_calls._followed,
                optimizers._global_optimizer_pre_hooks,
                optimizers._global_optimizer_post_hooks,
            )
        ]

    def turn(self, letter: str, *, is_last: bool) -> None:
        """Turn the tracer on for letter T, else off."""
        is_on = letter == "T"
        if is_last and is_on is not self._has_kernels:
            self._turn_kernels(is_on)
        if is_on is not self._is_on:
            self._is_on = is_on
            self._turn(is_on)

    def _turn(self, is_on: bool) -> None:  # noqa: FBT001
        for owner, name, original, replacement in self._patches:
            setattr(owner, name, replacement if is_on else original)
        for hooks, known in self._global:
            hooks.clear()
            hooks.update(known if is_on else {})
        for callback in self._callbacks:
            (gc.callbacks.append if is_on else gc.callbacks.remove)(callback)

    def _turn_kernels(self, is_on: bool) -> None:  # noqa: FBT001
        self._has_kernels = is_on
        if is_on:
            self._libraries = [make(*parts) for make, parts in self._kernels]
        else:
            for library in self._libraries:
                library._destroy()

    def _noting(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def note(*parts: Any) -> Any:  # noqa: ANN401
            library = make(*parts)
            self._kernels.append((make, parts))
            self._libraries.append(library)
            return library

        return note


class Job:
    """The training of one rank, timed by micro-batch."""

    def __init__(self, spool: Path, num_tokens: int) -> None:
        torch.manual_seed(7)
        self.spool = spool
        self._num_tokens = num_tokens
        self._module = Model()
        self._model = DistributedDataParallel(self._module, bucket_cap_mb=25)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._switch: Switch | None = None

    def begin_tracing(self, *, fills_disk: bool) -> None:
        """Install the tracer, with a switch for it."""
        from rankscope import tracer

        switch = Switch()
        tracer.install(spool=self.spool, run="benchmark", model=self._model)
        if fills_disk:
            fill_disk(self.spool / "filler")
        tracer.begin_steps()
        switch.installed()
        self._switch = switch

    def step(self, letters: str) -> list[int]:
        """Train one step, each micro-batch by its letter; return their durations, ns."""
        from rankscope import tracer

        durations_ns = []
        self._optimizer.zero_grad()
        loss_sum = torch.zeros(())
        for index, letter in enumerate(letters):
            is_last = index == len(letters) - 1
            is_traced = letter == "T" and self._switch is not None
            if self._switch is not None:
                self._switch.turn(letter, is_last=is_last)
            if is_last:
                # torch looks kernels up again after some were added or removed: not timed.
                dist.all_reduce(torch.zeros(1))
            self._module.has_spans = is_traced
            clock = time.thread_time_ns if is_last else time.monotonic_ns
            begin_ns = clock()
            loss_sum += self._run_microbatch(is_last=is_last)
            if is_last:
                self._optimizer.step()
                dist.all_reduce(loss_sum)
                if is_traced:
                    tracer.step(tokens=self._num_tokens * NUM_MICROBATCHES, loss=loss_sum)
            durations_ns.append(clock() - begin_ns)
            if is_last and not is_traced and self._switch is not None:
                tracer.step()
        return durations_ns

    def _run_microbatch(self, *, is_last: bool) -> torch.Tensor:
        with contextlib.nullcontext() if is_last else self._model.no_sync():
            batch = torch.randn(self._num_tokens, WIDTH)
            loss: torch.Tensor = (self._model(batch) - batch).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def train(seconds: float, *, scenario: str, num_tokens: int, rank: int, folder: Path) -> None:
    """Run one rank, print its result as JSON, and exit."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    store = FileStore(str(folder / "rendezvous"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    job = Job(folder / f"spool-{rank}", num_tokens)
    is_traced = scenario != "control"
    for _ in range(NUM_UNTIMED):  # DDP rebuilds its buckets after the first step
        job.step("U" * NUM_MICROBATCHES)
    if is_traced:
        job.begin_tracing(fills_disk=scenario == "disk-full")
    for _ in range(NUM_UNTIMED):
        job.step("T" * NUM_MICROBATCHES)
    letters, steps = random.Random(7), []
    before = count_records(job.spool) if is_traced else (0, 0)
    until_s, begin_cpu_s = time.monotonic() + seconds, background_s()
    is_over = torch.zeros(())
    while not is_over:
        drawn = "".join(letters.choice("TU") for _ in range(NUM_MICROBATCHES))
        steps.append((drawn, job.step(drawn)))
        is_over.fill_(time.monotonic() >= until_s)
        dist.all_reduce(is_over)
    taken_s = background_s() - begin_cpu_s
    dist.barrier()
    after = count_records(job.spool) if is_traced else (0, 0)
    stored, dropped = (now - then for now, then in zip(after, before, strict=True))
    result = {"background_ns": taken_s * 1e9 / len(steps), "stored": stored, "dropped": dropped}
    print(json.dumps({**result, "steps": steps}))
    sys.stdout.flush()
    os._exit(0)  # The tracer's exit handler expects hooks that the switch may have removed.


def background_s() -> float:
    """Return the CPU time of the tracer's thread so far; 0 without one."""
    for thread in threading.enumerate():
        if thread.name == "rankscope-spool" and thread.ident is not None:
            return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return 0.0


def fill_disk(path: Path) -> None:
    """Write until the disk is full."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 12)):
            pass


def count_records(spool: Path) -> tuple[int, int]:
    """Return how many records the process that writes to a spool stored and dropped."""
    from rankscope.tracer.spool import PROCESS_FILE, SEGMENT_GLOB, iter_committed, read_dropped

    (process,) = spool.rglob(PROCESS_FILE)
    stored = sum(1 for path in spool.rglob(SEGMENT_GLOB) for _ in iter_committed(path.read_bytes()))
    return stored, sum(read_dropped(process.read_bytes()).values())


Pair = tuple[str, int]
"""Letters of two neighbours, and how much longer the second takes, ns."""


def pairs_of(step: Step) -> tuple[list[Pair], Pair]:
    """Return the neighbours among all but the last micro-batch of a step, and the last two."""
    letters, times = step
    pairs = [(letters[at : at + 2], times[at + 1] - times[at]) for at in range(len(times) - 1)]
    return pairs[:-1], pairs[-1]


def costs_of(steps: Sequence[Step]) -> tuple[float, float]:
    """Return the cost of tracing a micro-batch, and the last one of a step, ns."""
    by_letters: dict[str, list[int]] = {}
    last: dict[str, list[int]] = {}
    for step in steps:
        pairs, pair = pairs_of(step)
        for letters, more_ns in pairs:
            by_letters.setdefault(letters, []).append(more_ns)
        last.setdefault(pair[0], []).append(pair[1])
    median = {letters: statistics.median(found) for letters, found in by_letters.items()}
    at_end = {letters: statistics.median(found) for letters, found in last.items()}
    return (
        (median["UT"] - median["TU"]) / 2,
        (at_end["UT"] - at_end["UU"] + at_end["TT"] - at_end["TU"]) / 2,
    )


def summary(ranks: Sequence[dict[str, Any]]) -> dict[str, object]:
    """Return the row of one scenario, from the results of its ranks."""
    steps: list[Step] = [(letters, times) for rank in ranks for letters, times in rank["steps"]]
    if len(steps) < MIN_STEPS:
        raise SystemExit(f"only {len(steps)} steps of both ranks: pass a larger --seconds")
    plain_ns = (NUM_MICROBATCHES - 1) * statistics.median(
        time_ns
        for letters, times in steps
        for letter, time_ns in zip(letters[:-1], times[:-1], strict=True)
        if letter == "U"
    ) + statistics.median(times[-1] for letters, times in steps if letters[-1] == "U")
    background_ns = statistics.mean(rank["background_ns"] for rank in ranks)
    num_traced = sum(letters.count("T") for letters, _ in steps) / NUM_MICROBATCHES

    def figures(drawn: Sequence[Step]) -> tuple[float, float, float]:
        each_ns, last_ns = costs_of(drawn)
        added_ns = (NUM_MICROBATCHES - 1) * each_ns + last_ns + background_ns
        return each_ns, last_ns, added_ns

    def interval_of(place: int) -> list[float]:
        def resampled(chosen: Any) -> float:  # noqa: ANN401 - scipy gives an array
            return figures([steps[at] for at in chosen.tolist()])[place]

        return bootstrap_interval(np.arange(len(steps)), resampled, num_resamples=NUM_RESAMPLES)

    row: dict[str, object] = {
        "steps_of_both_ranks": len(steps),
        "step_ms": round(plain_ns / 1e6, 1),
        "records_of_a_traced_step": round(sum(rank["stored"] for rank in ranks) / num_traced),
        "dropped_of_a_traced_step": round(sum(rank["dropped"] for rank in ranks) / num_traced),
        "background_us_a_step": round(background_ns / 1e3),
    }
    values = figures(steps)
    for place, part in enumerate(("microbatch", "last_microbatch", "step")):
        row[f"{part}_more_us"] = round(values[place] / 1e3)
        row[f"{part}_more_us_interval"] = [round(end / 1e3) for end in interval_of(place)]
    row["ratio"] = round(1 + values[2] / plain_ns, 4)
    row["ratio_interval"] = [round(1 + end / plain_ns, 4) for end in interval_of(2)]
    return row


def measure(seconds: float, scenario: str, num_tokens: int) -> dict[str, object]:
    """Run the two ranks of the job and return the row of a scenario."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as name:
        running = [
            _start(Path(name), rank, seconds, scenario, num_tokens) for rank in range(NUM_RANKS)
        ]
        try:
            outputs = [rank.communicate()[0] for rank in running]
        finally:
            for rank in running:
                rank.kill()
    if any(rank.returncode for rank in running):
        raise SystemExit("a rank has failed: its message is above")
    found = summary([json.loads(output) for output in outputs])
    return {"scenario": scenario, "tokens_of_a_microbatch": num_tokens, **found}


def _start(
    folder: Path, rank: int, seconds: float, scenario: str, num_tokens: int
) -> subprocess.Popen[str]:
    spool = folder / f"spool-{rank}"
    spool.mkdir()
    command = [sys.executable, "-m", "benchmarks.step_cost", "--rank", str(rank)]
    command += ["--folder", str(folder), "--seconds", str(seconds)]
    command += ["--scenario", scenario, "--tokens", str(num_tokens)]
    if scenario == "disk-full":
        mount = f'mount -t tmpfs -o size={DISK_SIZE} tmpfs "{spool}" && exec "$@"'
        command = ["unshare", "-rm", "sh", "-c", mount, "sh", *command]
    ours = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        command,
        env={**os.environ, **ours, **SCENARIOS[scenario]},
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
    )


def main() -> None:
    """Measure, and print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="duration of each scenario")
    parser.add_argument("--scenario", nargs="+", choices=SCENARIOS, default=["healthy"])
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens of a micro-batch")
    parser.add_argument("--json", type=Path, help="write the document here")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        (scenario,) = options.scenario
        train(
            options.seconds,
            scenario=scenario,
            num_tokens=options.tokens,
            rank=options.rank,
            folder=options.folder,
        )
    rows = [measure(options.seconds, one, options.tokens) for one in options.scenario]
    document = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "seconds": options.seconds,
        "rows": rows,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
