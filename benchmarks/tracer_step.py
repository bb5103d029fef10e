"""A training step traced and untraced, two jobs that take turns step by step.

    python -m benchmarks.tracer_step [--only healthy agent-dead disk-full] [--json FILE]

Two jobs of two gloo ranks, each rank pinned to a core of its own, train the same small mixture of
experts by DDP. In one of them what torch does is captured, and a span by hand stands around each
expert, so that a step has about 1,000 records; the other never imports the tracer. The jobs take
turns in the order T U U T and U T T U, and whoever does not have its turn is stopped (SIGSTOP), its
background thread too: all that tracing costs falls into the turns of the traced job. Of each four
steps one ratio is taken, traced over untraced; told are the median ratio and its 95 % interval by
bootstrap. Both jobs are started anew in each of ``--starts`` rounds, since where a process lies in
memory makes it quicker or slower as a whole; the bootstrap draws rounds first, then fours.

`cpu` is the same of the CPU time of both ranks, the tracer's thread included.

Three scenarios: ``healthy`` (room for all records), ``agent-dead`` (nobody takes the segments away
and the spool's budget is used up: each record is dropped), ``disk-full`` (a tmpfs of a few MiB,
filled up after the tracer began, so that no further segment can be made).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.intervals import interval_of_rounds
from benchmarks.step_rank import NUM_RANKS, NUM_WARM_STEPS

SMALL_BYTES = 1 << 16
"""A segment that one step fills."""

SCENARIOS = {
    "healthy": {},
    "agent-dead": {
        "RANKSCOPE_SEGMENT_BYTES": str(SMALL_BYTES),
        "RANKSCOPE_SPOOL_BYTES": str(4 * SMALL_BYTES),
    },
    "disk-full": {"RANKSCOPE_SEGMENT_BYTES": str(SMALL_BYTES)},
}
DISK = "8m"
ORDERS = ("TUUT", "UTTU")


@dataclass(frozen=True)
class Turn:
    """One step of one job.

    Attributes:
        wall_ns: From the first rank's begin to the last rank's end.
        cpu_ns: CPU time of both ranks since their turn before.
    """

    wall_ns: int
    cpu_ns: int


class Job:
    """Two ranks that train a step when told to, and are stopped in between."""

    def __init__(self, folder: Path, scenario: str | None) -> None:
        """Start the ranks; ``scenario`` None: untraced."""
        folder.mkdir()
        self._ranks = [_start(folder, rank, scenario) for rank in range(NUM_RANKS)]
        self._cpu_ns = 0
        self._traced = scenario is not None
        self.step()

    def step(self) -> Turn:
        """Let the job train one step."""
        for rank in self._ranks:
            rank.send_signal(signal.SIGCONT)
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write("step\n")
            rank.stdin.flush()
        told = [[int(word) for word in self._line(rank)] for rank in self._ranks]
        for rank in self._ranks:
            rank.send_signal(signal.SIGSTOP)
        before_ns, self._cpu_ns = self._cpu_ns, sum(cpu_ns for _, _, cpu_ns in told)
        wall_ns = max(end for _, end, _ in told) - min(begin for begin, _, _ in told)
        return Turn(wall_ns=wall_ns, cpu_ns=self._cpu_ns - before_ns)

    def end(self) -> tuple[int, int]:
        """End the ranks; return how many records they stored and dropped."""
        stored = dropped = 0
        for rank in self._ranks:
            rank.send_signal(signal.SIGCONT)
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self._ranks:
            if self._traced:
                words = self._line(rank)
                stored, dropped = stored + int(words[0]), dropped + int(words[1])
            rank.wait()
        return stored, dropped

    def kill(self) -> None:
        """End the ranks at once, whatever they do."""
        for rank in self._ranks:
            rank.kill()

    def _line(self, rank: subprocess.Popen[str]) -> list[str]:
        assert rank.stdout is not None
        words = rank.stdout.readline().split()
        if not words:
            raise SystemExit(f"a rank ended with {rank.wait()}: see its message above")
        return words


def _start(folder: Path, rank: int, scenario: str | None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.step_rank", "--rank", str(rank)]
    command += ["--rendezvous", str(folder / "rendezvous")]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if scenario is not None:
        environ |= SCENARIOS[scenario]
        spool = folder / f"spool-{rank}"
        spool.mkdir()
        command += ["--spool", str(spool)]
        if scenario == "disk-full":
            mount = f'mount -t tmpfs -o size={DISK} tmpfs "{spool}" && exec "$@"'
            command = ["unshare", "-rm", "sh", "-c", mount, "sh", *command, "--full"]
    return subprocess.Popen(
        command,
        env=environ,
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@dataclass(frozen=True)
class Round:
    """What one start of both jobs showed, a value for each four steps."""

    wall_ratios: list[float]
    cpu_ratios: list[float]
    plain_ms: list[float]
    records_per_step: float
    dropped_per_step: float


def run_round(scenario: str, quads: int, folder: Path) -> Round:
    """Start both jobs and let them take turns."""
    jobs = {"T": Job(folder / "traced", scenario), "U": Job(folder / "untraced", None)}
    try:
        fours = []
        for quad in range(quads):
            turns: dict[str, list[Turn]] = {"T": [], "U": []}
            for letter in ORDERS[quad % 2]:
                turns[letter].append(jobs[letter].step())
            fours.append(turns)
        stored, dropped = jobs["T"].end()
        jobs["U"].end()
    finally:
        for job in jobs.values():
            job.kill()
    num_steps = NUM_RANKS * (NUM_WARM_STEPS + 1 + 2 * quads)
    return Round(
        wall_ratios=[_ratio(turns, "wall_ns") for turns in fours],
        cpu_ratios=[_ratio(turns, "cpu_ns") for turns in fours],
        plain_ms=[turn.wall_ns / 1e6 for turns in fours for turn in turns["U"]],
        records_per_step=(stored + dropped) / num_steps,
        dropped_per_step=dropped / num_steps,
    )


def _ratio(turns: dict[str, list[Turn]], field: str) -> float:
    traced, plain = (sum(getattr(turn, field) for turn in turns[job]) for job in "TU")
    return float(traced / plain)


def summary(scenario: str, rounds: list[Round]) -> dict[str, object]:
    """Return one scenario's row of the document."""
    row: dict[str, object] = {
        "scenario": scenario,
        "step_ms": round(statistics.median(v for r in rounds for v in r.plain_ms), 1),
        "records_per_step": round(statistics.mean(r.records_per_step for r in rounds)),
        "dropped_per_step": round(statistics.mean(r.dropped_per_step for r in rounds)),
    }
    for name in ("wall", "cpu"):
        by_round: list[list[float]] = [getattr(r, f"{name}_ratios") for r in rounds]
        row[f"{name}_ratio"] = round(statistics.median(v for r in by_round for v in r), 4)
        row[f"{name}_interval"] = [round(end, 4) for end in interval_of_rounds(by_round)]
        row[f"{name}_by_round"] = [round(statistics.median(r), 4) for r in by_round]
    return row


def measure(scenarios: list[str], starts: int, quads: int) -> dict[str, object]:
    """Run all rounds and return the document."""
    import torch

    start_ns = time.monotonic_ns()
    found: dict[str, list[Round]] = {scenario: [] for scenario in scenarios}
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    for _ in range(starts):
        for scenario in scenarios:
            with tempfile.TemporaryDirectory(dir=memory) as name:
                found[scenario].append(run_round(scenario, quads, Path(name)))
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "starts": starts,
        "quads": quads,
        "rows": [summary(scenario, rounds) for scenario, rounds in found.items()],
        "duration_s": round((time.monotonic_ns() - start_ns) / 1e9),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=8, help="how often both jobs are started")
    parser.add_argument("--quads", type=int, default=20, help="fours of steps in each round")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--json", type=Path, help="write the document here")
    options = parser.parse_args()
    document = measure(options.only, options.starts, options.quads)
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
