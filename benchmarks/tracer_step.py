"""A training step traced and untraced, by one job whose tracing is turned on and off.

    python -m benchmarks.tracer_step [--only healthy agent-dead disk-full control] [--json FILE]

Two gloo ranks, each pinned to a core of its own, train a small mixture of experts by DDP. In turns
of a few timed steps, after one that is not timed, they are traced, T, or not, U, in the order
T U U T and U T T U: `tracer.install` before a traced turn, `tracer.shutdown` after it. Traced means
that what torch does is captured and a span by hand stands around each expert, so that a step has
about 1,000 records. Of each four turns one ratio is taken, traced over untraced; told are the
median ratio and its 95 % interval by bootstrap over starts of the job and over fours in them.

One job and not two: of two equal ones either is up to 3 % quicker in all its steps, by where its
memory lies (docs/decisions/0050-span-cost.md).

`cpu` is the same of the CPU time of both ranks, the tracer's thread included. `floor` is another
ratio, one a start: the first decile of its traced steps over that of the others. Whatever else uses
the machine makes steps slower and never quicker, so the quickest vary least.

Scenarios: ``healthy`` (room for all records), ``agent-dead`` (nobody takes the segments away and
the spool's budget is used up by the turn's first step), ``disk-full`` (a tmpfs of a few MiB, filled
up once the tracer has begun; needs user namespaces) and ``control`` (no turn is traced: what is not
1 there is noise).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.intervals import interval, interval_of_rounds
from benchmarks.step_rank import NUM_RANKS

SMALL_BYTES = 1 << 16
"""A segment that half a step fills."""

SCENARIOS = {
    "healthy": {},
    "agent-dead": {
        "RANKSCOPE_SEGMENT_BYTES": str(SMALL_BYTES),
        "RANKSCOPE_SPOOL_BYTES": str(2 * SMALL_BYTES),
    },
    "disk-full": {"RANKSCOPE_SEGMENT_BYTES": str(SMALL_BYTES)},
    "control": {},
}
DISK = "4m"
NUM_TIMED = 4
"""Timed steps of a turn, where nothing else is asked for."""

ORDERS = ("TUUT", "UTTU")


@dataclass(frozen=True)
class Step:
    """One timed step of the job.

    Attributes:
        wall_ns: From the first rank's begin to the last rank's end.
        cpu_ns: CPU time of both ranks.
    """

    wall_ns: int
    cpu_ns: int


@dataclass(frozen=True)
class Round:
    """What one start of the job showed, a value for each four turns."""

    wall_ratios: list[float]
    cpu_ratios: list[float]
    steps: list[tuple[str, Step]]
    """Each timed step, with the letter of its turn."""

    records_per_step: float
    dropped_per_step: float


def run_round(scenario: str, quads: int, num_timed: int, folder: Path) -> Round:
    """Start the job and let it take its turns."""
    order = "".join(ORDERS[quad % 2] for quad in range(quads))
    turns = order.replace("T", "N") if scenario == "control" else order
    ranks = [_start(folder, rank, scenario, turns, num_timed) for rank in range(NUM_RANKS)]
    try:
        told = [rank.communicate()[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank has failed: see its message above")
    steps = [_step(lines) for lines in zip(*(lines[:-1] for lines in told), strict=True)]
    counts = [[int(word) for word in lines[-1].split()] for lines in told]
    stored, dropped = (sum(rank[place] for rank in counts) for place in range(2))
    num_traced = NUM_RANKS * num_timed * order.count("T")
    per_quad = 4 * num_timed
    fours = [steps[at : at + per_quad] for at in range(0, len(steps), per_quad)]
    letters = [letter for letter in order for _ in range(num_timed)]
    return Round(
        wall_ratios=[
            _ratio([step.wall_ns for step in four], ORDERS[quad % 2])
            for quad, four in enumerate(fours)
        ],
        cpu_ratios=[
            _ratio([step.cpu_ns for step in four], ORDERS[quad % 2])
            for quad, four in enumerate(fours)
        ],
        steps=list(zip(letters, steps, strict=True)),
        records_per_step=(stored + dropped) / num_traced,
        dropped_per_step=dropped / num_traced,
    )


def _start(
    folder: Path, rank: int, scenario: str, turns: str, num_timed: int
) -> subprocess.Popen[str]:
    spool = folder / f"spool-{rank}"
    spool.mkdir()
    command = [sys.executable, "-m", "benchmarks.step_rank", "--rank", str(rank)]
    command += ["--rendezvous", str(folder / "rendezvous"), "--spool", str(spool)]
    command += ["--turns", turns, "--timed", str(num_timed)]
    if scenario == "disk-full":
        command.append("--full")
    return start_rank(command, scenario, spool)


def start_rank(command: list[str], scenario: str, spool: Path) -> subprocess.Popen[str]:
    """Start one rank of a job whose records go to ``spool``, an empty folder."""
    if scenario == "disk-full":
        mount = f'mount -t tmpfs -o size={DISK} tmpfs "{spool}" && exec "$@"'
        command = ["unshare", "-rm", "sh", "-c", mount, "sh", *command]
    ours = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        command,
        env={**os.environ, **ours, **SCENARIOS[scenario]},
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
    )


def _step(lines: tuple[str, ...]) -> Step:
    """Return what both ranks told of one step."""
    told = [[int(word) for word in line.split()[1:]] for line in lines]
    return Step(
        wall_ns=max(end for _, end, _ in told) - min(begin for begin, _, _ in told),
        cpu_ns=sum(cpu_ns for _, _, cpu_ns in told),
    )


def _ratio(times_ns: list[int], order: str) -> float:
    """Return traced over untraced of four turns."""
    sums = {"T": 0, "U": 0}
    for place, time_ns in enumerate(times_ns):
        sums[order[place * len(order) // len(times_ns)]] += time_ns
    return sums["T"] / sums["U"]


def summary(scenario: str, rounds: list[Round]) -> dict[str, object]:
    """Return one scenario's row of the document."""
    plain_ns = [step.wall_ns for r in rounds for turn, step in r.steps if turn == "U"]
    row: dict[str, object] = {
        "scenario": scenario,
        "step_ms": round(statistics.median(plain_ns) / 1e6, 1),
        "records_per_step": round(statistics.mean(r.records_per_step for r in rounds)),
        "dropped_per_step": round(statistics.mean(r.dropped_per_step for r in rounds)),
    }
    for name in ("wall", "cpu"):
        by_round: list[list[float]] = [getattr(r, f"{name}_ratios") for r in rounds]
        row[f"{name}_ratio"] = round(statistics.median(v for r in by_round for v in r), 4)
        row[f"{name}_interval"] = [round(end, 4) for end in interval_of_rounds(by_round)]
        row[f"{name}_by_round"] = [round(statistics.median(r), 4) for r in by_round]
        floors = [floor_ratio(r.steps, f"{name}_ns") for r in rounds]
        row[f"{name}_floor_ratio"] = round(statistics.median(floors), 4)
        row[f"{name}_floor_interval"] = [round(end, 4) for end in interval(floors)]
    return row


def floor_ratio(steps: list[tuple[str, Step]], field: str) -> float:
    """Return the first decile of one start's traced steps over that of its untraced ones.

    Args:
        steps: Each with the letter of its turn.
        field: Which time of a `Step`.
    """
    times: dict[str, list[int]] = {"T": [], "U": []}
    for turn, step in steps:
        times[turn].append(getattr(step, field))
    traced, plain = (statistics.quantiles(times[turn], n=10)[0] for turn in "TU")
    return traced / plain


def run_all(
    scenarios: list[str], starts: int, quads: int, num_timed: int
) -> dict[str, list[Round]]:
    """Return the rounds of each scenario, taken in turn."""
    found: dict[str, list[Round]] = {scenario: [] for scenario in scenarios}
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    for _ in range(starts):
        for scenario in scenarios:
            with tempfile.TemporaryDirectory(dir=memory) as name:
                found[scenario].append(run_round(scenario, quads, num_timed, Path(name)))
    return found


def document_of(found: dict[str, list[Round]], quads: int, num_timed: int) -> dict[str, object]:
    """Return what was found, beside machine and versions."""
    import torch

    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "starts": max(len(rounds) for rounds in found.values()),
        "quads": quads,
        "timed_steps_per_turn": num_timed,
        "rows": [summary(scenario, rounds) for scenario, rounds in found.items()],
    }


def raw_of(found: dict[str, list[Round]]) -> str:
    """Return a line for each timed step: scenario, start, turn, wall clock and CPU time, ns."""
    return "".join(
        f"{scenario} {start} {turn} {step.wall_ns} {step.cpu_ns}\n"
        for scenario, rounds in found.items()
        for start, one in enumerate(rounds)
        for turn, step in one.steps
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=6, help="how often the job is started")
    parser.add_argument("--quads", type=int, default=8, help="fours of turns in each start")
    parser.add_argument("--timed", type=int, default=NUM_TIMED, help="timed steps of a turn")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--json", type=Path, help="write the document here")
    parser.add_argument("--raw", type=Path, help="write every step here, a line each")
    options = parser.parse_args()
    start_ns = time.monotonic_ns()
    found = run_all(options.only, options.starts, options.quads, options.timed)
    document = document_of(found, options.quads, options.timed)
    document["duration_s"] = round((time.monotonic_ns() - start_ns) / 1e9)
    if options.raw is not None:
        options.raw.write_text(raw_of(found))
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
