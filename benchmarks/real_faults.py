"""Accuracy of the diagnosis on real processes with labelled faults.

    python -m benchmarks.real_faults [--repeats 2] [--first 0] [--only CAUSE ...] [--seed 1]
                                     [--out FILE.jsonl] [--keep FOLDER]
    python -m benchmarks.real_faults --summary FILE.jsonl

Each run starts the trainer under torchrun (8 gloo processes, pp 2 x dp 2 x tp 2, paced) with one
fault, reads its spool into a new store, and runs `rankscope analyze --json`. Ranks, strengths and
onsets are random by the seed. It prints one line of JSON per run, then the table. Run nothing else
beside it: with more than 5 % of overrun segments a paced run is insufficient evidence, and is
counted separately. The spool of a run with a wrong diagnosis is kept.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankscope.analysis.report.report import Finding
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.store import open_store
from rankscope.collector.store.writer import StoreWriter
from rankscope.demo.plan import OTHER_NAMES, QUIET, names_fault
from rankscope.demo.training import Training
from rankscope.tracer.spool import STALL_NS
from rankscope.tracer.topology import Layout
from rankscope.trainer.faults.spec import ENDING_CAUSES, TRAINER_FAULTS, FaultCause, parse_fault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random

HEALTHY = "healthy"
LAYOUT = Layout(pp=2, dp=2, tp=2)
PACE_MS, BULKY_PACE_MS = 60, 90
NUM_STEPS = 16
NUM_STEPS_SHORT = 8
"""Number of steps if only the ending or the manifests matter."""

BULKY = ("--seq", "256", "--microbatch-size", "4")
"""Activations of 256 KiB, on which the speed of a link shows (`faults.links`). They need more CPU
time, and so a slower pace."""

POLL_S = 2.0
START_S = 90.0
STALL_MARGIN_S = 15.0
MAX_DRAINS = 20
VARIABLES = ("NCCL_IB_DISABLE=1", "NCCL_ALGO=Tree", "CUDA_LAUNCH_BLOCKING=1", "OMP_NUM_THREADS=2")


def _onset(rng: Random) -> str:
    return f"steps={rng.randint(4, 9)}-{NUM_STEPS - 1}"


def _rank(rng: Random, first: int = 0, last: int = LAYOUT.world_size - 1) -> str:
    return f"rank={rng.randint(first, last)}"


def _between(rng: Random, least: float, most: float) -> str:
    return f"{rng.uniform(least, most):.2f}"


def _spans(number: int) -> str:
    return "yes" if number % 2 == 0 else "no"


def _link(rng: Random, number: int) -> str:
    """Return a tensor-parallel, a pipeline and a data-parallel pair of ranks in turn."""
    rank = rng.randint(0, 7)
    return f"src={rank},dst={rank ^ (1, 4, 2)[number % 3]}"


def _setting(rng: Random) -> str:
    variable, value = rng.choice(VARIABLES).split("=")
    return f"variable={variable},value={value}"


CRASH_KINDS = TRAINER_FAULTS.crash_kinds

SPECS: dict[str, Callable[[Random, int], str]] = {
    HEALTHY: lambda rng, n: "none",
    "slow-compute": lambda rng, n: (
        f"slow-compute:{_rank(rng)},factor={_between(rng, 1.2, 2)},{_onset(rng)}"
    ),
    "clock-throttle": lambda rng, n: (
        f"clock-throttle:{_rank(rng)},factor={_between(rng, 1.2, 1.6)},{_onset(rng)}"
    ),
    "stage-imbalance": lambda rng, n: (
        f"stage-imbalance:stage={rng.randint(0, 1)},factor={_between(rng, 1.2, 1.7)}"
    ),
    "host-stall": lambda rng, n: f"host-stall:{_rank(rng)},ms={rng.randint(30, 70)},{_onset(rng)}",
    # Not a rank of the second stage, which waits for its first activation anyway.
    "data-stall": lambda rng, n: (
        f"data-stall:{_rank(rng, 0, 3)},ms={rng.randint(300, 700)},spans={_spans(n)},{_onset(rng)}"
    ),
    "gc-pause": lambda rng, n: (
        f"gc-pause:ms={rng.randint(150, 300)},probability=0.1,spans={_spans(n)}"
    ),
    "launch-skew": lambda rng, n: (
        f"launch-skew:ms={rng.randint(500, 900)},stage={rng.randint(0, 1)},tp={rng.randint(0, 1)}"
    ),
    "checkpoint": lambda rng, n: (
        f"checkpoint:every={rng.randint(3, 5)},ms={rng.randint(500, 1000)},spans={_spans(n)}"
    ),
    "sequence-imbalance": lambda rng, n: f"sequence-imbalance:spread={_between(rng, 0.25, 0.4)}",
    "slow-link": lambda rng, n: (
        f"slow-link:{_link(rng, n)},factor={rng.randint(25, 60)},{_onset(rng)}"
    ),
    "misconfiguration": lambda rng, n: f"misconfiguration:{_rank(rng)},{_setting(rng)}",
    "crash": lambda rng, n: (
        f"crash:{_rank(rng)},step={rng.randint(3, 6)},kind={CRASH_KINDS[n % len(CRASH_KINDS)]}"
    ),
    "hang": lambda rng, n: f"hang:{_rank(rng)},step={rng.randint(3, 6)}",
}
"""Texts of the faults by cause, from the random numbers of a run and its number."""

SHORT = frozenset({"misconfiguration", "crash", "hang"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RealRun:
    """A run and its findings."""

    cause: str
    fault: str
    findings: tuple[dict[str, Any], ...]
    """Findings without their evidence."""

    verdict: str
    """"right", "wrong", "insufficient" if the machine was too busy, or "failed" without a
    result."""

    onset_error: int | None
    """Onset of the finding minus that of the fault; None without such a finding or onset."""

    worst_overrun_ratio: float | None
    step_s: float | None
    """Median step."""

    analyze_s: float
    run_s: float
    num_others: int
    """Alarms other than that of the fault."""

    spool: str
    """Kept spool of a run that is not right; else ""."""


def run_one(cause: str, number: int, *, seed: int, keep: Path) -> RealRun:
    """Train with one fault and analyse the run."""
    begin = time.monotonic()
    spec = SPECS[cause](random.Random(f"{seed}/{cause}/{number}"), number)
    name = f"real-{cause}-{seed}-{number}"
    folder = keep / name
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "spool").mkdir(parents=True)
    store_url = f"chdb://{folder / 'store'}"
    command = _training_command(cause, spec, seed=seed + number, spool=folder / "spool")
    with Training(command, run_id=name, log=folder / "training.log") as training:
        times = _collect(training, store_url, folder / "spool", is_hang=cause == FaultCause.HANG)
        # A job that hangs is analysed while it hangs, as a user would.
        document, analyze_s = _analyze(name, store_url)
    findings = tuple(map(_finding, document.get("findings", ())))
    fault = parse_fault(spec)
    verdict = _verdict(findings, spec)
    num_others = _num_others(findings, cause, () if fault is None else fault.culprits(LAYOUT))
    first = None if fault is None or fault.cause in ENDING_CAUSES else fault.first_step
    run = RealRun(
        cause=cause,
        fault=spec,
        findings=tuple(
            {key: value for key, value in asdict(finding).items() if key != "evidence"}
            for finding in findings
        ),
        verdict=verdict,
        onset_error=_onset_error(findings, cause, first),
        worst_overrun_ratio=worst_overrun(folder / "spool"),
        step_s=sorted(times)[len(times) // 2] if times else None,
        analyze_s=analyze_s,
        run_s=time.monotonic() - begin,
        num_others=num_others,
        spool="" if verdict == "right" and not num_others else str(folder / "spool"),
    )
    if not run.spool:
        shutil.rmtree(folder)
    return run


def _training_command(cause: str, spec: str, *, seed: int, spool: Path) -> list[str]:
    num_steps = NUM_STEPS_SHORT if cause in SHORT else NUM_STEPS
    is_bulky = cause == FaultCause.SLOW_LINK
    pace_ms = BULKY_PACE_MS if is_bulky else PACE_MS
    sizes = (("--pp", LAYOUT.pp), ("--dp", LAYOUT.dp), ("--tp", LAYOUT.tp))
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(LAYOUT.world_size), "-m", "rankscope.trainer"),
        *(word for flag, size in sizes for word in (flag, str(size))),
        *("--steps", str(num_steps), "--layers", str(LAYOUT.pp), "--seed", str(seed)),
        *("--paced", "--pace-ms", str(pace_ms), "--fault", spec, "--trace", str(spool)),
        *(BULKY if is_bulky else ()),
    ]


def _collect(training: Training, store_url: str, spool: Path, *, is_hang: bool) -> list[float]:
    """Store spans until the training ends or has hung for some time; return its step times."""
    times: list[float] = []
    stall_s = STALL_NS / 1e9 + STALL_MARGIN_S
    moved = time.monotonic() + START_S - stall_s
    with open_store(store_url) as store, closing(SpoolTail(spool, StoreWriter(store))) as tail:
        while training.status is None:
            step = training.next_step(POLL_S)
            if step is not None:
                times.append(step.seconds)
                moved = time.monotonic()
            tail.poll()
            if is_hang and time.monotonic() - moved > stall_s:
                return times
        for _ in range(MAX_DRAINS):
            progress = tail.poll()
            if progress.num_cuts == 0 and progress.num_running == 0:
                break
    return times


def _analyze(run_id: str, store_url: str) -> tuple[dict[str, Any], float]:
    begin = time.monotonic()
    done = subprocess.run(  # The interpreter and arguments are ours.
        [sys.executable, "-m", "rankscope", "analyze", run_id, "--json", "--store", store_url],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        print(done.stderr[-1000:], file=sys.stderr)
        return {}, time.monotonic() - begin
    document: dict[str, Any] = json.loads(done.stdout)
    return document, time.monotonic() - begin


def _finding(plain: dict[str, Any]) -> Finding:
    return Finding(
        cause=plain["cause"],
        ranks=tuple(plain["ranks"]),
        steps=None if plain["steps"] is None else (plain["steps"][0], plain["steps"][1]),
        slowdown=plain["slowdown"],
        recoverable_ratio=plain["recoverable_ratio"],
        confidence=plain["confidence"],
        evidence=plain["evidence"],
    )


def _verdict(findings: tuple[Finding, ...], spec: str) -> str:
    if not findings:
        return "failed"
    if findings[0].cause == "insufficient-evidence" and "overran" in findings[0].evidence:
        return "insufficient"
    return "right" if names_fault(findings, parse_fault(spec), LAYOUT) else "wrong"


def _onset_error(findings: tuple[Finding, ...], cause: str, first: int | None) -> int | None:
    for finding in findings:
        if finding.cause in _names(cause) and finding.steps is not None and first is not None:
            return finding.steps[0] - first
    return None


def _names(cause: str) -> frozenset[str]:
    """Return the causes that are correct for a fault."""
    others = (str(other) for known, other in OTHER_NAMES.items() if known == cause)
    return frozenset({cause, *others})


def _num_others(findings: tuple[Finding, ...], cause: str, culprits: tuple[int, ...]) -> int:
    names = _names(cause)
    alarms = (finding for finding in findings if finding.cause not in QUIET)
    return sum(
        finding.cause not in names or not set(finding.ranks) <= set(culprits) for finding in alarms
    )


def worst_overrun(spool: Path) -> float | None:
    """Return the largest share of overrun segments of a rank, as printed by the trainer."""
    ratios = []
    for path in spool.rglob("events.jsonl"):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        paces = [event["data"] for event in events if event["kind"] == "pace"]
        ratios += [pace["num_overruns"] / pace["num_segments"] for pace in paces[-1:]]
    return max(ratios, default=None)


def summary(runs: list[dict[str, Any]]) -> str:
    """Return the tables: by cause, and each run."""
    lines = [
        "| cause | runs | right | wrong | too busy | failed | other alarms | onset error, steps |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for cause in SPECS:
        mine = [run for run in runs if run["cause"] == cause]
        if not mine:
            continue
        counts = [
            sum(run["verdict"] == word for run in mine)
            for word in ("right", "wrong", "insufficient", "failed")
        ]
        errors = [str(run["onset_error"]) for run in mine if run["onset_error"] is not None]
        num_others = sum(run["num_others"] for run in mine if run["verdict"] in ("right", "wrong"))
        row = (cause, len(mine), *counts, num_others, ", ".join(errors) or "-")
        lines.append(f"| {' | '.join(map(str, row))} |")
    lines += [
        "",
        "| fault | findings | verdict | worst overruns | step, s | analysis, s |",
        "| --- | --- | --- | --- | --- | --- |",
        *map(_run_row, runs),
    ]
    return "\n".join(lines)


def _run_row(run: dict[str, Any]) -> str:
    alarms = [one for one in run["findings"] if one["cause"] not in QUIET] or run["findings"]
    alarm_text = "; ".join(_format_finding(one) for one in alarms)
    overruns, step_s = run["worst_overrun_ratio"], run["step_s"]
    cells = (
        f"`{run['fault']}`",
        alarm_text,
        run["verdict"],
        "-" if overruns is None else f"{overruns:.1%}",
        "-" if step_s is None else f"{step_s:.2f}",
        f"{run['analyze_s']:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def _format_finding(finding: dict[str, Any]) -> str:
    ranks = finding["ranks"]
    who = f" {'+'.join(map(str, ranks))}" if ranks and len(ranks) < LAYOUT.world_size else ""
    steps = finding["steps"]
    when = "" if steps is None else f", steps {steps[0]}-{steps[1]}"
    return f"{finding['cause']}{who}{when}"


def run_all(causes: list[str], numbers: range, *, seed: int, keep: Path) -> Iterator[RealRun]:
    """Yield the runs, one after the other, because the ranks need all cores."""
    for number in numbers:
        for cause in causes:
            yield run_one(cause, number, seed=seed, keep=keep)


def main() -> None:
    """Run the jobs, or summarise results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="number of the first repeat")
    parser.add_argument("--only", nargs="*", choices=tuple(SPECS), default=(), metavar="CAUSE")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("real-faults.jsonl"))
    parser.add_argument("--keep", type=Path, help="folder for spools; default: a temporary one")
    parser.add_argument("--summary", type=Path, help="print the tables of an earlier run")
    options = parser.parse_args()
    if options.summary is None:
        keep = options.keep or Path(tempfile.mkdtemp(prefix="rankscope-real-faults-"))
        causes = list(options.only or SPECS)
        numbers = range(options.first, options.first + options.repeats)
        with options.out.open("a") as out:
            for run in run_all(causes, numbers, seed=options.seed, keep=keep):
                out.write(json.dumps(asdict(run)) + "\n")
                out.flush()
                print(f"{run.verdict}: {run.fault}", file=sys.stderr)
    lines = (options.summary or options.out).read_text().splitlines()
    print(summary([json.loads(line) for line in lines]))


if __name__ == "__main__":
    main()
