"""Verdicts on small jobs that are written as users of the frameworks write them.

    python -m benchmarks.real_scripts record FOLDER [--only JOB ...] [--repeats 5]
    python -m benchmarks.real_scripts judge FOLDER [--out FILE.md]

`record` runs each script of `jobs/` under torchrun and ``python -m rankscope.tracer`` (four gloo
ranks, no edit, nothing declared): without a fault several times, and once with a slow rank, a slow
loader and a CPU hog, from a quarter of the run on. Runs that are there already are not repeated.
`judge` reads the spools into new stores, runs `rankscope analyze --json`, and prints the tables.
It keeps each `analysis.json` beside its spool; delete them to analyse again.

The scripts need torch, transformers, accelerate and lightning. A layer sleeps most of its time, so
that four ranks fit onto two cores. On a busy machine a run without a fault may be slow on one rank:
the tables have the evidence.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JOBS_FOLDER = Path(__file__).parent / "jobs"
NUM_RANKS = 4
HEALTHY = "healthy"
FAULTS = ("slow-rank", "slow-loader", "cpu-hog")
LIMIT_S = 300
PEAK_FLOPS = "1e11"
"""Of one rank; any number gives an MFU where everything else is known."""

ALARMS = {"critical", "warning"}

COMPUTE = frozenset({"slow-compute", "clock-throttle"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A script, and which findings are right for a fault in it."""

    culprit: int = 2
    """Rank with the fault."""

    has_loader: bool = False
    reads: int | None = None
    """Rank with a slow loader if not the culprit: in a pipeline the first stage reads tokens."""

    is_stage: bool = False
    """Whether a rank is a whole stage, so that a slow rank is a slow stage."""


JOBS = {
    "ddp": Job(),
    "nanogpt": Job(),
    "fsdp2": Job(),
    "tensor_parallel": Job(),
    "pipeline_mesh": Job(reads=1),
    "pipeline_plain": Job(reads=0, is_stage=True),
    "hf_trainer": Job(has_loader=True),
    "accelerate_loop": Job(has_loader=True),
    "lightning_fit": Job(has_loader=True),
}


def culprit_of(job: Job, fault: str) -> int:
    """Return the rank that has the fault."""
    return job.reads if fault == "slow-loader" and job.reads is not None else job.culprit


def right_causes(job: Job, fault: str) -> frozenset[str]:
    """Return the causes that name a fault correctly."""
    if fault == "slow-loader":
        # Without a loader a batch that is made late looks like any other delay.
        return frozenset({"data-stall"} if job.has_loader else {"data-stall", "host-stall"})
    if fault == "cpu-hog":
        return COMPUTE | {"host-stall"}
    return COMPUTE | {"stage-imbalance"} if job.is_stage else COMPUTE


def record_run(name: str, fault: str, folder: Path) -> None:
    """Run one job into ``folder``, traced."""
    job = JOBS[name]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environ = {
        **os.environ,
        "RANKSCOPE_TRACE": str(folder / "spool"),
        "RANKSCOPE_RUN": folder.name,
        "RANKSCOPE_PEAK_FLOPS": PEAK_FLOPS,
        "REAL_SCRIPTS_FAULT": "" if fault == HEALTHY else fault,
        "REAL_SCRIPTS_CULPRIT": str(culprit_of(job, fault)),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(NUM_RANKS), "-m", "rankscope.tracer"),
        str(JOBS_FOLDER / f"{name}.py"),
    ]
    with (folder / "log").open("wb") as log:
        done = subprocess.run(
            command, env=environ, stdout=log, stderr=log, timeout=LIMIT_S, check=False
        )
    (folder / "status").write_text(str(done.returncode))


def record(folder: Path, *, names: list[str], repeats: int) -> None:
    """Record the runs that are not in ``folder`` yet, one after the other."""
    runs = [(name, fault, 1) for name in names for fault in FAULTS]
    runs += [(name, HEALTHY, n) for n in range(1, repeats + 1) for name in names]
    for name, fault, number in runs:
        run = folder / f"{name}-{fault}-{number}"
        if not (run / "status").exists():
            print(run.name, file=sys.stderr)
            record_run(name, fault, run)


def analyze(run: Path) -> dict[str, Any]:
    """Return the analysis of a recorded run; raise if there is none."""
    kept = run / "analysis.json"
    if kept.exists():
        known: dict[str, Any] = json.loads(kept.read_text())
        return known
    with tempfile.TemporaryDirectory() as folder:
        store = ("--store", f"chdb://{folder}/store")
        rankscope = (sys.executable, "-m", "rankscope")
        subprocess.run(
            [*rankscope, "import", str(run / "spool"), "--format", "rankscope", *store],
            check=True,
            capture_output=True,
        )
        done = subprocess.run(
            [*rankscope, "analyze", run.name, "--json", *store], check=True, capture_output=True
        )
    document: dict[str, Any] = json.loads(done.stdout)
    kept.write_bytes(done.stdout)
    return document


def judge_run(name: str, fault: str, document: dict[str, Any]) -> tuple[bool, str]:
    """Return whether the verdict is right, and the findings that decide."""
    job = JOBS[name]
    alarms = [one for one in document["findings"] if one["severity"] in ALARMS]
    texts = [_format_finding(one) for one in alarms] or ["no rank is slow"]
    if fault == HEALTHY:
        return not alarms, "; ".join(texts)
    top = alarms[0] if alarms else {"cause": "", "ranks": []}
    is_right = top["cause"] in right_causes(job, fault) and top["ranks"] == [culprit_of(job, fault)]
    return is_right, "; ".join(texts)


def _format_finding(finding: dict[str, Any]) -> str:
    ranks = finding["ranks"]
    who = f" {', '.join(map(str, ranks))}" if len(ranks) < NUM_RANKS else " all"
    steps = finding["steps"]
    when = f", steps {steps[0]}-{steps[1]}" if steps else ""
    return f"{finding['cause']}{who}{when}, saves {finding['recoverable_ratio'] or 0:.0%}"


def judge(folder: Path) -> str:
    """Return the tables of all runs in ``folder``."""
    rows = [
        "| job | fault | rank | right | verdicts | MFU |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, job in JOBS.items():
        for fault in (HEALTHY, *FAULTS):
            runs = sorted(folder.glob(f"{name}-{fault}-*"))
            results, mfu = [], "-"
            for run in runs:
                if not (run / "status").exists():
                    continue  # it is being recorded
                if (run / "status").read_text() != "0":
                    results.append((False, "the job failed"))
                    continue
                document = analyze(run)
                results.append(judge_run(name, fault, document))
                mfu = "known" if document["mfu"] else "n/a"
                print(run.name, results[-1], file=sys.stderr)
            if results:
                wrong = [text for is_right, text in results if not is_right]
                shown = dict.fromkeys(wrong or [results[0][1]])
                rank = "-" if fault == HEALTHY else culprit_of(job, fault)
                right = f"{len(results) - len(wrong)} of {len(results)}"
                rows.append(
                    f"| {name} | {fault} | {rank} | {right} | {'<br>'.join(shown)} | {mfu} |"
                )
    return "\n".join(rows)


def main() -> None:
    """Record runs, or judge recorded ones."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("action", choices=("record", "judge"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", choices=tuple(JOBS), metavar="JOB")
    parser.add_argument("--repeats", type=int, default=5, help="runs without a fault")
    parser.add_argument("--out", type=Path, help="file for the tables; default: printed only")
    options = parser.parse_args()
    if options.action == "record":
        record(options.folder, names=options.only or list(JOBS), repeats=options.repeats)
        return
    tables = judge(options.folder)
    if options.out is not None:
        options.out.write_text(f"{tables}\n")
    print(tables)


if __name__ == "__main__":
    main()
