"""Gains of each switch of the trainer, from real runs.

    nice -n 15 python -m benchmarks.trainer [--only NAME ...] [--steps 8] [--out FILE.jsonl]
    python -m benchmarks.trainer --summary FILE.jsonl

Each run starts the trainer under torchrun (gloo processes, paced, traced), reads its spool into a
new store and runs `rankscope analyze --json`. The bubble is measured from the spans: the time from
the first forward to the last backward of a step, less the mean compute of a rank, over that
compute. It prints one line of JSON per run, then the tables. Paced runs depend little on the load,
as long as few segments overrun: the tables have that too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.store import open_store
from rankscope.collector.store.writer import StoreWriter
from rankscope.demo.training import Training

from .real_faults import worst_overrun

if TYPE_CHECKING:
    from collections.abc import Iterator


NUM_MICROBATCHES = 8
PIPELINE = ("--pp", "4", "--layers", "8", "--microbatches", str(NUM_MICROBATCHES))
CUBE = ("--layers", "4", "--microbatches", "4")
CUBE_SP = ("--pp", "2", "--dp", "2", "--tp", "2", "--sp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A run of the trainer."""

    name: str
    num_ranks: int
    flags: tuple[str, ...]
    pace_ms: int


def _pipeline(name: str, *flags: str) -> Switch:
    return Switch(name=name, num_ranks=4, flags=(*PIPELINE, *flags), pace_ms=80)


def _cube(name: str, *flags: str, num_ranks: int = 8) -> Switch:
    return Switch(name=name, num_ranks=num_ranks, flags=(*CUBE, *flags), pace_ms=80)


SWITCHES = (
    _pipeline("1f1b"),
    _pipeline("interleaved", "--schedule", "interleaved"),
    _pipeline("zero-bubble", "--schedule", "zero-bubble"),
    _pipeline("zero-bubble, 2 chunks", "--schedule", "zero-bubble", "--chunks", "2"),
    _pipeline("zbv", "--schedule", "zbv"),
    _pipeline("dualpipev", "--schedule", "dualpipev"),
    _cube("dp 4, ddp", "--dp", "ddp:4", num_ranks=4),
    _cube("dp 4, fsdp", "--dp", "fsdp:4", num_ranks=4),
    _cube("dp 4, hsdp", "--dp", "hsdp:4", num_ranks=4),
    _cube("tp 4", "--tp", "4", num_ranks=4),
    _cube("tp 4, sp", "--tp", "4", "--sp", num_ranks=4),
    _cube("cp 4", "--cp", "4", num_ranks=4),
    _cube("dp 4, experts on each rank", "--dp", "4", "--ep", "1", num_ranks=4),
    _cube("dp 4, ep 4", "--dp", "4", "--ep", "4", num_ranks=4),
    _cube("pp 2, dp 2, tp 2", "--pp", "2", "--dp", "2", "--tp", "2"),
    _cube("+ sp", *CUBE_SP),
    _cube("+ interleaved", *CUBE_SP, "--schedule", "interleaved"),
    _cube("+ zbv instead", *CUBE_SP, "--schedule", "zbv"),
)

SPANS = """
SELECT step, rank, kind, count() AS spans, min(start_ns) AS first_ns,
    max(start_ns + duration_ns) AS last_ns, sum(duration_ns) AS total_ns
FROM spans FINAL WHERE step >= 1 GROUP BY step, rank, kind
"""

IN_FLIGHT = """
SELECT max(held) AS held FROM (
    SELECT sum(change) OVER (PARTITION BY step, rank ORDER BY at_ns, change) AS held FROM (
        SELECT step, rank, start_ns AS at_ns, 1 AS change
        FROM spans FINAL WHERE step >= 1 AND kind = 'forward'
        UNION ALL
        SELECT step, rank, start_ns + duration_ns AS at_ns, -1 AS change
        FROM spans FINAL
        WHERE step >= 1 AND kind = 'backward' AND name != 'backward input'
    )
)
"""
"""Most chunks of a rank whose activations it holds at once, from forward to the last backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of a run."""

    name: str
    flags: str
    step_s: float
    tokens_per_s: float
    mfu: float | None
    bubble: float | None
    formula: float | None
    exposed_ratio: float | None
    """Exposed transfer, share of all ranks' time."""

    waiting_ratio: float | None
    bubble_ratio: float | None
    transfers_per_step: float
    """Communications of a rank in a step, sends and receives each."""

    state_kb: float
    """Weights, gradients and optimizer of the largest rank."""

    in_flight: float
    """Micro-batches of all layers of a rank whose activations it holds at most."""

    worst_overrun_ratio: float | None
    findings: tuple[str, ...]


def run_switch(switch: Switch, *, num_steps: int, folder: Path) -> Measured:
    """Train with a switch and measure the run."""
    spool, store_url = folder / "spool", f"chdb://{folder / 'store'}"
    spool.mkdir(parents=True)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(switch.num_ranks), "-m", "rankscope.trainer"),
        *("--steps", str(num_steps), "--paced", "--pace-ms", str(switch.pace_ms)),
        *("--trace", str(spool), *switch.flags),
    ]
    times = []
    with Training(command, run_id="switch", log=folder / "training.log") as training:
        while training.status is None:
            done = training.next_step(1.0)
            if done is not None:
                times.append(done.seconds)
        if training.status:
            raise RuntimeError(f"{switch.name}: {training.last_error()}")
    with (
        open_store(store_url) as store,
        closing(SpoolTail(spool, StoreWriter(store))) as tail,
    ):
        while tail.poll().num_cuts:
            pass
        rows, in_flight = store.rows(SPANS), store.rows(IN_FLIGHT)[0]["held"]
        (tokens,) = store.rows(
            "SELECT sum(num_tokens) / count(DISTINCT step) AS mean FROM steps FINAL WHERE step >= 1"
        )
    analyzed = subprocess.run(
        [sys.executable, "-m", "rankscope", "analyze", "switch", "--json", "--store", store_url],
        capture_output=True,
        text=True,
        check=True,
    )
    document = json.loads(analyzed.stdout)
    layout, step_s = document["layout"], median(times[1:])
    parts = document["waterfall"]["mean_ratio"]
    num_steps_seen = len({row["step"] for row in rows})
    is_pipeline = layout["pp"] > 1
    return Measured(
        name=switch.name,
        flags=" ".join(switch.flags),
        step_s=step_s,
        # Ranks of one tp or pp group train on the same tokens.
        tokens_per_s=tokens["mean"] / (layout["tp"] * layout["pp"]) / step_s,
        mfu=document["mfu"] and document["mfu"]["mean"],
        bubble=_bubble(rows) if is_pipeline and layout["tp"] == 1 else None,
        formula=_formula(document) if is_pipeline else None,
        exposed_ratio=parts["exposed_transfer"],
        waiting_ratio=parts["waiting"],
        bubble_ratio=sum(parts[name] or 0.0 for name in parts if name.startswith("bubble")),
        transfers_per_step=sum(
            row["spans"] for row in rows if row["kind"].endswith(("comm", "send", "recv"))
        )
        / (num_steps_seen * switch.num_ranks),
        state_kb=_largest_state(spool) / 1e3,
        in_flight=in_flight / layout["vpp"],
        worst_overrun_ratio=worst_overrun(spool),
        findings=tuple(finding["cause"] for finding in document["findings"]),
    )


def _bubble(rows: list[Any]) -> float:
    """Return the median bubble of the steps over the mean compute of a rank."""
    ratios: list[float] = []
    passes = [row for row in rows if row["kind"] in ("forward", "backward")]
    for step in {row["step"] for row in passes}:
        own = [row for row in passes if row["step"] == step]
        took = max(row["last_ns"] for row in own) - min(row["first_ns"] for row in own)
        compute = sum(row["total_ns"] for row in own) / len({row["rank"] for row in own})
        ratios.append(took / compute - 1)
    return median(ratios)


def _formula(document: dict[str, Any]) -> float | None:
    bubble = document["waterfall"]["bubble"]
    return bubble and float(bubble["formula_ratio"])


def _largest_state(spool: Path) -> float:
    states = [0]
    for path in spool.rglob("events.jsonl"):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event["kind"] == "memory":
                states.append(event["data"]["state_bytes"])
    return max(states)


def summary(runs: list[dict[str, Any]]) -> str:
    """Return the tables."""
    titles = (
        *("switch", "step, s", "tokens/s", "MFU", "bubble", "formula", "transfers", "exposed"),
        *("state, kB", "in flight", "overruns"),
    )
    lines = [f"| {' | '.join(titles)} |", f"| {' | '.join('---' for _ in titles)} |"]
    for run in runs:
        cells = (
            run["name"],
            f"{run['step_s']:.3f}",
            f"{run['tokens_per_s']:.0f}",
            _percent(run["mfu"]),
            _percent(run["bubble"]),
            _percent(run["formula"]),
            f"{run['transfers_per_step']:.0f}",
            _percent(run["exposed_ratio"]),
            f"{run['state_kb']:.0f}",
            f"{run['in_flight']:g}",
            _percent(run["worst_overrun_ratio"]),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1%}"


def run_all(names: list[str], *, num_steps: int) -> Iterator[Measured]:
    """Yield the runs, one after the other."""
    for switch in SWITCHES:
        if not names or switch.name in names:
            with tempfile.TemporaryDirectory(prefix="rankscope-trainer-") as folder:
                yield run_switch(switch, num_steps=num_steps, folder=Path(folder))


def main() -> None:
    """Run the switches, or summarise results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("trainer.jsonl"))
    parser.add_argument("--summary", type=Path, help="print the tables of an earlier run")
    options = parser.parse_args()
    if options.summary is None:
        with options.out.open("a") as out:
            for run in run_all(options.only, num_steps=options.steps):
                out.write(json.dumps(asdict(run)) + "\n")
                out.flush()
                print(f"{run.name}: {run.step_s:.3f} s, bubble {run.bubble}", file=sys.stderr)
    lines = (options.summary or options.out).read_text().splitlines()
    print(summary([json.loads(line) for line in lines]))


if __name__ == "__main__":
    main()
