"""A training step traced and untraced, from micro-batches of one job that are either.

    python -m benchmarks.step_blocks [--seconds 600] [--tokens 32] [--scenario ...] [--json FILE]

The job of `benchmarks.tracer_step`: two gloo ranks, each pinned to a core of its own, train a small
mixture of experts by DDP, 8 micro-batches a step. Before each micro-batch a letter is drawn, the
same on both ranks: T, traced, with a span by hand around each expert; or U, untraced, with the
tracer out of the process: its hooks are off, what it has replaced is as it was, the kernels
of communication are out of torch's dispatcher. The last micro-batch of a step has with it what ends
a step: communication of gradients and loss, the optimizer, `tracer.step`.

Whatever else uses the machine lasts longer than a micro-batch, so neighbours see the same of it,
which two whole steps do not. Told, each with a 95 % interval by bootstrap over steps:

* what a micro-batch takes more when traced: half of (median of T after U) - (median of U after T),
  each of the difference of two neighbours;
* the same of the last one, from its differences to the one before, by the letter of that: in CPU
  time of its thread, for it waits for the other rank;
* what the tracer's background thread takes a step, its CPU time, which no letter turns off;
* the ratio of a step: all of these over the step's time untraced.

Scenarios as there: ``healthy``, ``agent-dead``, ``disk-full``. A ``control`` draws letters and
traces nothing: what is not 0 there is noise.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.step_rank import NUM_MICROBATCHES, NUM_RANKS, TOKENS
from benchmarks.tracer_step import SCENARIOS, start_rank

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Sequence

    from torch.nn.parallel import DistributedDataParallel

    from benchmarks.step_rank import Job

NUM_UNTIMED = 4
"""Steps at the begin."""

LEAST_STEPS = 50
"""Of both ranks: in fewer some order of letters does not come up in every draw."""

BOOTSTRAPS = 300
MODULE_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)

Step = tuple[str, list[int]]
"""The letters of a step's micro-batches, and what each took, ns: by the wall clock, but the last,
which waits for the other rank, in CPU time of its thread."""


class Switch:
    """Takes the tracer out of the process and puts it back, between two micro-batches."""

    def __init__(self, model: DistributedDataParallel) -> None:
        """Watch what `tracer.install` is going to replace; call `installed` after it."""
        from rankscope.tracer import patches as patch
        from rankscope.tracer.capture import intercept

        self._model = model
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
        for name in ("_launches", "_functional_waits"):
            setattr(intercept, name, self._noting(getattr(intercept, name)))
        self._callbacks = list(gc.callbacks)

    def installed(self) -> None:
        """Note the hooks of the tracer, which is on."""
        self._callbacks = [it for it in gc.callbacks if it not in self._callbacks]
        import torch.optim.optimizer as optimizers

        self._on_hooks = [self._model.__dict__[name] for name in MODULE_HOOKS]
        self._off_hooks = [type(hooks)() for hooks in self._on_hooks]
        self._global: list[tuple[Any, dict[int, Any]]] = [
            (hooks, dict(hooks))
            for hooks in (
                optimizers._global_optimizer_pre_hooks,
                optimizers._global_optimizer_post_hooks,
            )
        ]

    def turn(self, letter: str, *, is_last: bool) -> None:
        """Have the tracer in the process or not, for the next micro-batch."""
        is_on = letter == "T"
        if is_last and is_on is not self._has_kernels:
            self._turn_kernels(is_on)
        if is_on is not self._is_on:
            self._is_on = is_on
            self._turn(is_on)

    def _turn(self, is_on: bool) -> None:  # noqa: FBT001
        for owner, name, original, replacement in self._patches:
            setattr(owner, name, replacement if is_on else original)
        for name, hooks in zip(
            MODULE_HOOKS, self._on_hooks if is_on else self._off_hooks, strict=True
        ):
            self._model.__dict__[name] = hooks
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


def train(seconds: float, *, scenario: str, tokens: int, rank: int, folder: Path) -> None:
    """Be one rank: print what the background thread takes a step, and each step."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    from benchmarks.step_rank import Job, counted
    from rankscope import tracer

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    store = FileStore(str(folder / "rendezvous"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    job = Job(folder / f"spool-{rank}", fills_disk=scenario == "disk-full")
    is_traced = scenario != "control"
    blocks = Blocks(job, tokens, tracer.step if is_traced else None)
    for _ in range(NUM_UNTIMED):  # DDP makes its buckets anew after the first
        blocks.step("U" * NUM_MICROBATCHES)
    if is_traced:
        switch = Switch(blocks.model)
        job.begin_tracing()
        switch.installed()
        blocks.switch = switch
    for _ in range(NUM_UNTIMED):
        blocks.step("T" * NUM_MICROBATCHES)
    letters, steps = random.Random(7), []
    before = counted(job.spool) if is_traced else (0, 0)
    until_s, begin_cpu_s = time.monotonic() + seconds, background_s()
    is_over = torch.zeros(())
    while not is_over:
        drawn = "".join(letters.choice("TU") for _ in range(NUM_MICROBATCHES))
        steps.append((drawn, blocks.step(drawn)))
        is_over.fill_(time.monotonic() >= until_s)
        dist.all_reduce(is_over)
    taken_s = background_s() - begin_cpu_s
    dist.barrier()
    after = counted(job.spool) if is_traced else (0, 0)
    stored, dropped = (now - then for now, then in zip(after, before, strict=True))
    told = {"background_ns": taken_s * 1e9 / len(steps), "stored": stored, "dropped": dropped}
    print(json.dumps({**told, "steps": steps}))
    sys.stdout.flush()
    os._exit(0)  # the switch has left nothing as the tracer's goodbye wants it


def background_s() -> float:
    """Return the CPU time of the tracer's thread so far; 0 where there is none."""
    for thread in threading.enumerate():
        if thread.name == "rankscope-spool" and thread.ident is not None:
            return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return 0.0


class Blocks:
    """The steps of one rank, timed by micro-batch."""

    def __init__(self, job: Job, tokens: int, tell: Callable[..., None] | None) -> None:
        self.model = job.model
        self.switch: Switch | None = None
        self._job = job
        self._tokens = tokens
        self._tell = tell

    def step(self, letters: str) -> list[int]:
        """Train one step, each micro-batch by its letter; return what each took, ns."""
        times = []
        self._job.begin_step()
        for index, letter in enumerate(letters):
            is_last = index == len(letters) - 1
            is_traced = letter == "T" and self.switch is not None
            if self.switch is not None:
                self.switch.turn(letter, is_last=is_last)
            if is_last:
                # After kernels came or went torch looks the next call up anew; it is not timed.
                self._job.meet()
            self._job.run_experts(traced=is_traced)
            clock = time.thread_time_ns if is_last else time.monotonic_ns
            begin_ns = clock()
            self._job.microbatch(self._tokens, is_last=is_last)
            if is_last:
                self._job.end_step(self._tell if is_traced else None, self._tokens)
            times.append(clock() - begin_ns)
            if is_last and self.switch is not None and not is_traced and self._tell is not None:
                self._tell()
        return times


Pair = tuple[str, int]
"""Letters of two neighbours, and what the later takes more, ns."""


def pairs_of(step: Step) -> tuple[list[Pair], Pair]:
    """Return a step's neighbours among all but the last micro-batch, and the last two."""
    letters, times = step
    pairs = [(letters[at : at + 2], times[at + 1] - times[at]) for at in range(len(times) - 1)]
    return pairs[:-1], pairs[-1]


def costs_of(steps: Sequence[Step]) -> tuple[float, float]:
    """Return what a micro-batch takes more when traced, and what the last of a step does, ns."""
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
    """Return what was found, from what the ranks told."""
    steps: list[Step] = [(letters, times) for rank in ranks for letters, times in rank["steps"]]
    if len(steps) < LEAST_STEPS:
        raise SystemExit(f"only {len(steps)} steps of both ranks: ask for more --seconds")
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

    dice = random.Random(7)
    draws = [figures(dice.choices(steps, k=len(steps))) for _ in range(BOOTSTRAPS)]
    row: dict[str, object] = {
        "steps_of_both_ranks": len(steps),
        "step_ms": round(plain_ns / 1e6, 1),
        "records_of_a_traced_step": round(sum(rank["stored"] for rank in ranks) / num_traced),
        "dropped_of_a_traced_step": round(sum(rank["dropped"] for rank in ranks) / num_traced),
        "background_us_a_step": round(background_ns / 1e3),
    }
    names = ("microbatch_more_us", "last_microbatch_more_us", "step_more_us")
    for place, (name, value) in enumerate(zip(names, figures(steps), strict=True)):
        row[name] = round(value / 1e3)
        row[f"{name}_interval"] = [round(end / 1e3) for end in _ends(draws, place)]
    row["ratio"] = round(1 + figures(steps)[2] / plain_ns, 4)
    row["ratio_interval"] = [round(1 + end / plain_ns, 4) for end in _ends(draws, 2)]
    return row


def _ends(draws: Sequence[tuple[float, ...]], place: int) -> list[float]:
    values = sorted(draw[place] for draw in draws)
    return [values[int(0.025 * len(values))], values[int(0.975 * len(values))]]


def measure(seconds: float, scenario: str, tokens: int) -> dict[str, object]:
    """Run the two ranks of the job; return what was found."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as name:
        running = [_start(Path(name), rank, seconds, scenario, tokens) for rank in range(NUM_RANKS)]
        try:
            told = [rank.communicate()[0] for rank in running]
        finally:
            for rank in running:
                rank.kill()
    if any(rank.returncode for rank in running):
        raise SystemExit("a rank has failed: see its message above")
    found = summary([json.loads(one) for one in told])
    return {"scenario": scenario, "tokens_of_a_microbatch": tokens, **found}


def _start(
    folder: Path, rank: int, seconds: float, scenario: str, tokens: int
) -> subprocess.Popen[str]:
    spool = folder / f"spool-{rank}"
    spool.mkdir()
    command = [sys.executable, "-m", "benchmarks.step_blocks", "--rank", str(rank)]
    command += ["--folder", str(folder), "--seconds", str(seconds)]
    command += ["--scenario", scenario, "--tokens", str(tokens)]
    return start_rank(command, scenario, spool)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="of each scenario")
    parser.add_argument("--scenario", nargs="+", choices=SCENARIOS, default=["healthy"])
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a micro-batch")
    parser.add_argument("--json", type=Path, help="write the document here")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        (scenario,) = options.scenario
        train(
            options.seconds,
            scenario=scenario,
            tokens=options.tokens,
            rank=options.rank,
            folder=options.folder,
        )
    import torch

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
