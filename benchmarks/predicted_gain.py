"""Predicted gain of a fix, against the gain of a second training without the fault.

    python -m benchmarks.predicted_gain [--repeats 3] [--only LAYOUT ...] [--out FILE.jsonl]
    python -m benchmarks.predicted_gain --summary FILE.jsonl

For each layout the trainer runs under torchrun (four gloo processes, paced): with a slow rank, and
again without it. From the first run alone, `open_run(...).play(step).fix(finding)` predicts the
step without the fault, and the report the seconds saved per step; the second run says what they
are. It prints one line of JSON per pair of runs, then the table. More than 5 % of overrun segments
make a run too busy to count (docs/trainer.md#paced-mode).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import rankscope
from benchmarks.real_faults import worst_overrun
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.store import open_store
from rankscope.collector.store.writer import StoreWriter
from rankscope.demo.training import Training
from rankscope.tracer.span import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankscope.run import Run

PACE_MS = 120
"""Long segments: a late wake-up on a busy machine is a smaller share of one."""

NUM_STEPS = 10
POLL_S = 2.0
MAX_DRAINS = 20
TOO_BUSY_RATIO = 0.05
"""Share of overrun segments of a rank above which the diagnosis has insufficient evidence."""

HEALTHY = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A layout and its fault."""

    pp: int
    dp: int
    tp: int
    microbatches: int
    fault: str

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.tp


TRIALS = {
    "dp": Trial(pp=1, dp=4, tp=1, microbatches=2, fault="slow-compute:rank=2,factor=1.5"),
    "pp": Trial(pp=4, dp=1, tp=1, microbatches=4, fault="slow-compute:rank=1,factor=1.5"),
    "tp": Trial(pp=1, dp=2, tp=2, microbatches=2, fault="slow-compute:rank=3,factor=1.5"),
    "pp-dp": Trial(pp=2, dp=2, tp=1, microbatches=4, fault="slow-compute:rank=0,factor=1.8"),
    "host": Trial(pp=1, dp=4, tp=1, microbatches=2, fault="host-stall:rank=1,ms=150"),
    "data": Trial(pp=2, dp=2, tp=1, microbatches=4, fault="data-stall:rank=1,ms=500"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A run with a fault, its predicted step without, and the run without."""

    layout: str
    fault: str
    cause: str
    """Cause of the top finding."""

    ranks: tuple[int, ...]
    faulty_s: float
    """Median step of the run with the fault, as each of the others over the steps in the replay."""

    replayed_s: float
    """The same, replayed as recorded."""

    predicted_s: float
    """Replayed with the finding fixed."""

    reported_s: float | None
    """Step with the fault, less what the report says that the fix saves: mean, not median."""

    healthy_s: float
    """Median step of the run without the fault."""

    overrun_ratio: float
    """Largest share of overrun segments of a rank, in both runs."""

    @property
    def gain_error(self) -> float:
        """Predicted over real saving of a step, less 1."""
        return (self.faulty_s - self.predicted_s) / (self.faulty_s - self.healthy_s) - 1

    @property
    def step_error(self) -> float:
        """Predicted over real step without the fault, less 1."""
        return self.predicted_s / self.healthy_s - 1

    @property
    def is_busy(self) -> bool:
        """Return whether the machine was too busy for the pace."""
        return self.overrun_ratio > TOO_BUSY_RATIO or self.cause == "insufficient-evidence"


def measure(layout: str, number: int, *, folder: Path) -> Pair:
    """Train with the fault and without, and compare the second run with the prediction."""
    trial = TRIALS[layout]
    url = f"chdb://{folder / f'{layout}-{number}'}"
    overruns = []
    for fault in (trial.fault, HEALTHY):
        name = f"{layout}-{'healthy' if fault == HEALTHY else 'faulty'}"
        spool = folder / f"spool-{name}"
        _train(trial, fault, name, spool=spool, store_url=url)
        overruns.append(worst_overrun(spool) or 0.0)
        shutil.rmtree(spool)
    with rankscope.open_run(f"{layout}-faulty", store=url) as run:
        report, finding = run.report, run.report.top_finding
        plays = [run.play(step) for step in report.steps]
        fixed = [play.fix(finding) for play in plays] if finding.saved_s else plays
        saved_s = finding.saved_s
        faulty_s = _median_step_s(run)
        mean_s = report.step_time_s.actual
    with rankscope.open_run(f"{layout}-healthy", store=url) as run:
        healthy_s = _median_step_s(run)
    shutil.rmtree(folder / f"{layout}-{number}")
    return Pair(
        layout=layout,
        fault=trial.fault,
        cause=finding.cause,
        ranks=finding.ranks,
        faulty_s=faulty_s,
        replayed_s=median(play.recorded_ns for play in plays) / NS_PER_S,
        predicted_s=median(play.played_ns for play in fixed) / NS_PER_S,
        reported_s=None if saved_s is None or mean_s is None else mean_s - saved_s,
        healthy_s=healthy_s,
        overrun_ratio=max(overruns),
    )


def _median_step_s(run: Run) -> float:
    times = run.report.actual_s_by_step
    return median(seconds for step in run.report.steps if (seconds := times.get(step)) is not None)


def _train(trial: Trial, fault: str, run: str, *, spool: Path, store_url: str) -> None:
    """Run the trainer to its end and store its records."""
    spool.mkdir(parents=True)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(trial.world_size), "-m", "rankscope.trainer"),
        *("--pp", str(trial.pp), "--dp", str(trial.dp), "--tp", str(trial.tp)),
        *("--microbatches", str(trial.microbatches), "--layers", str(trial.pp)),
        *("--steps", str(NUM_STEPS), "--paced", "--pace-ms", str(PACE_MS)),
        *("--fault", fault, "--trace", str(spool)),
    ]
    with (
        Training(command, run_id=run, log=spool.with_suffix(".log")) as training,
        open_store(store_url) as store,
        closing(SpoolTail(spool, StoreWriter(store))) as tail,
    ):
        while training.status is None:
            training.next_step(POLL_S)
        if training.status:
            raise RuntimeError(f"the training failed: {training.last_error()}")
        for _ in range(MAX_DRAINS):
            progress = tail.poll()
            if progress.num_cuts == 0 and progress.num_running == 0:
                return


def summary(pairs: Iterable[Pair]) -> str:
    """Return the table: the median of each layout over its pairs."""
    lines = [
        (
            "| layout | fault | pairs (too busy) | with fault, s | replayed, s | predicted, s"
            " | real, s | step error | gain error | gain errors |"
        ),
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    by_layout: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_layout.setdefault(pair.layout, []).append(pair)
    for layout, every in by_layout.items():
        mine = [pair for pair in every if not pair.is_busy] or every
        faulty, replayed, predicted, healthy = (
            median(getattr(pair, name) for pair in mine)
            for name in ("faulty_s", "replayed_s", "predicted_s", "healthy_s")
        )
        cells = (
            layout,
            f"`{mine[0].fault}`",
            f"{len(every)} ({sum(pair.is_busy for pair in every)})",
            *(f"{seconds:.3f}" for seconds in (faulty, replayed, predicted, healthy)),
            f"{median(pair.step_error for pair in mine):+.1%}",
            f"{median(pair.gain_error for pair in mine):+.1%}",
            ", ".join(f"{pair.gain_error:+.1%}" for pair in every),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the pairs, or summarise results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=tuple(TRIALS), default=(), metavar="LAYOUT")
    parser.add_argument("--out", type=Path, default=Path("predicted-gain.jsonl"))
    parser.add_argument("--summary", type=Path, help="print the table of an earlier run")
    options = parser.parse_args()
    if options.summary is None:
        folder = Path(tempfile.mkdtemp(prefix="rankscope-predicted-gain-"))
        with options.out.open("a") as out:
            for number in range(options.repeats):
                for layout in options.only or TRIALS:
                    pair = measure(layout, number, folder=folder)
                    out.write(json.dumps(asdict(pair)) + "\n")
                    out.flush()
                    print(f"{layout}: gain error {pair.gain_error:+.1%}", file=sys.stderr)
    lines = (options.summary or options.out).read_text().splitlines()
    print(summary(_read(json.loads(line)) for line in lines))


def _read(plain: dict[str, Any]) -> Pair:
    return Pair(**{**plain, "ranks": tuple(plain["ranks"])})


if __name__ == "__main__":
    main()
