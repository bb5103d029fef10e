"""Gains of each switch of the trainer, from real runs.

    nice -n 15 python -m benchmarks.trainer [--only NAME ...] [--steps 6] [--out FILE.jsonl]
    python -m benchmarks.trainer --summary FILE.jsonl

Each run starts the trainer under torchrun (gloo processes, paced, traced), reads its spool into a
new store and analyses it. The bubble is measured from the spans: the time from
the first forward to the last backward of a step, less the mean compute of a rank, over that
compute. It writes one line of JSON per run, then prints the table, with the median of the runs of
each switch. Paced runs depend little on the load, as long as few segments overrun: the table has
both. To add a switch, add a row to `SWITCHES`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.report.document import to_document
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.store import open_store
from rankscope.collector.store.writer import StoreWriter
from rankscope.demo.training import Training
from rankscope.sources.store_source import StoreSource

from .real_faults import worst_overrun

if TYPE_CHECKING:
    from collections.abc import Iterator


PIPELINE = "--pp 4 --layers 8 --microbatches 8"
SMALL = "--layers 4 --microbatches 4"
CUBE = f"{SMALL} --pp 2 --dp 2 --tp 2"
NETWORK = "--fault slow-link:src=0,dst=1,factor=10"
"""10 MB/s between two ranks, so that transfers take time and no core."""

WEIGHTS = f"--dp 2 --layers 4 --hidden 256 --ffn 512 --microbatches 2 --pace-ms 200 {NETWORK}"
ROWS = f"--hidden 512 --ffn 128 --seq 128 --microbatch-size 4 {NETWORK}"
PRODUCTS = f"--tp 2 --layers 2 --microbatches 2 --pace-ms 400 {ROWS}"
SENDS = f"--pp 2 --layers 4 --microbatches 4 --pace-ms 200 {ROWS}"
PACE_MS = 120
RUN = "switch"


@dataclass(frozen=True, slots=True)
class Switch:
    """A run of the trainer."""

    name: str
    num_ranks: int
    flags: str
    before: str | None = None
    """Name of the run without the switch; None if this is one."""


SWITCHES = (
    Switch("1f1b", 4, PIPELINE),
    Switch("interleaved", 4, f"{PIPELINE} --schedule interleaved", "1f1b"),
    Switch("zero-bubble", 4, f"{PIPELINE} --schedule zero-bubble", "1f1b"),
    Switch("zero-bubble, 2 chunks", 4, f"{PIPELINE} --schedule zero-bubble --chunks 2", "1f1b"),
    Switch("zbv", 4, f"{PIPELINE} --schedule zbv", "1f1b"),
    Switch("dualpipev", 4, f"{PIPELINE} --schedule dualpipev", "1f1b"),
    Switch("dp 4, ddp", 4, f"{SMALL} --dp ddp:4"),
    Switch("dp 4, fsdp", 4, f"{SMALL} --dp fsdp:4", "dp 4, ddp"),
    Switch("dp 4, hsdp", 4, f"{SMALL} --dp hsdp:4", "dp 4, ddp"),
    Switch("tp 4", 4, f"{SMALL} --tp 4"),
    Switch("tp 4, sp", 4, f"{SMALL} --tp 4 --sp", "tp 4"),
    Switch("cp 4", 4, f"{SMALL} --cp 4"),
    Switch("dp 4, experts on each rank", 4, f"{SMALL} --dp 4 --ep 1"),
    Switch("dp 4, ep 4", 4, f"{SMALL} --dp 4 --ep 4", "dp 4, experts on each rank"),
    Switch("pp 2, dp 2, tp 2", 8, CUBE),
    Switch("+ scatter-gather", 8, f"{CUBE} --scatter-gather", "pp 2, dp 2, tp 2"),
    Switch("+ sp", 8, f"{CUBE} --sp", "pp 2, dp 2, tp 2"),
    Switch("+ sp, interleaved", 8, f"{CUBE} --sp --schedule interleaved", "+ sp"),
    Switch("+ sp, zbv", 8, f"{CUBE} --sp --schedule zbv", "+ sp"),
    Switch("dp 2, slow network", 2, WEIGHTS),
    Switch("+ overlap of dp", 2, f"{WEIGHTS} --overlap dp", "dp 2, slow network"),
    Switch("tp 2, slow network", 2, PRODUCTS),
    Switch("+ overlap of tp", 2, f"{PRODUCTS} --overlap tp", "tp 2, slow network"),
    Switch("+ parallel block", 2, f"{PRODUCTS} --parallel-block", "tp 2, slow network"),
    Switch("tp 2, sp, slow network", 2, f"{PRODUCTS} --sp"),
    Switch("+ overlap of tp and sp", 2, f"{PRODUCTS} --sp --overlap tp", "tp 2, sp, slow network"),
    Switch("pp 2, slow network", 2, SENDS),
    Switch("+ overlap of pp", 2, f"{SENDS} --overlap pp", "pp 2, slow network"),
    Switch("+ sp, zbv, ddp", 8, f"{CUBE} --dp ddp:2 --sp --schedule zbv", "+ sp, zbv"),
)

SPANS = """
SELECT step, rank, kind, count() AS spans, min(start_ns) AS first_ns,
    max(start_ns + duration_ns) AS last_ns, sum(duration_ns) AS total_ns,
    sum(num_bytes) AS bytes,
    countIf(kind != 'wait' AND (group_id != 0 OR src_rank >= 0)) AS transfers
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

    sent_kb: float
    """Bytes that a rank sends to other stages in a step."""

    state_kb: float
    """Weights, gradients and optimizer of the largest rank."""

    in_flight: float
    """Micro-batches of all layers of a rank whose activations it holds at most."""

    worst_overrun_ratio: float | None
    load: float
    """Load average of the machine at the end of the run, over a minute."""

    findings: tuple[str, ...]


def run_switch(switch: Switch, *, num_steps: int, folder: Path) -> Measured:
    """Train with a switch and measure the run."""
    spool, store_url = folder / "spool", f"chdb://{folder / 'store'}"
    spool.mkdir(parents=True)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(switch.num_ranks), "-m", "rankscope.trainer"),
        *("--steps", str(num_steps), "--paced", "--pace-ms", str(PACE_MS)),
        *("--trace", str(spool), *switch.flags.split()),
    ]
    times = []
    with Training(command, run_id=RUN, log=folder / "training.log") as training:
        while training.status is None:
            done = training.next_step(1.0)
            if done is not None:
                times.append(done.seconds)
        if training.status:
            raise RuntimeError(f"{switch.name}: {training.last_error()}")
    load = os.getloadavg()[0]
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
        document = to_document(analyze_run(StoreSource(store), RUN))
    layout, step_s = document["layout"], median(times[1:])
    parts = document["waterfall"]["mean_ratio"]
    num_steps_seen = len({row["step"] for row in rows})
    is_pipeline = layout["pp"] > 1
    return Measured(
        name=switch.name,
        flags=switch.flags,
        step_s=step_s,
        # Ranks of one tp or pp group train on the same tokens.
        tokens_per_s=tokens["mean"] / (layout["tp"] * layout["pp"]) / step_s,
        mfu=document["mfu"] and document["mfu"]["mean"],
        bubble=_bubble(rows) if is_pipeline and layout["tp"] == 1 else None,
        formula=_formula(document) if is_pipeline else None,
        exposed_ratio=parts["exposed_transfer"],
        waiting_ratio=parts["waiting"],
        bubble_ratio=sum(parts[name] or 0.0 for name in parts if name.startswith("bubble")),
        transfers_per_step=sum(row["transfers"] for row in rows)
        / (num_steps_seen * switch.num_ranks),
        sent_kb=sum(row["bytes"] for row in rows if row["kind"] == "pp-send")
        / (num_steps_seen * switch.num_ranks * 1e3),
        state_kb=_largest_state(spool) / 1e3,
        in_flight=in_flight / layout["vpp"],
        worst_overrun_ratio=worst_overrun(spool),
        load=load,
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
    """Return the table, in the order of `SWITCHES`."""
    titles = (
        *("switch", "step, s", "tokens/s", "gain", "MFU", "bubble", "formula", "transfers"),
        *("sent, kB", "exposed", "state, kB", "in flight", "overruns", "load"),
    )
    lines = [f"| {' | '.join(titles)} |", f"| {' | '.join('---' for _ in titles)} |"]
    medians = {
        switch.name: _medians([run for run in runs if run["name"] == switch.name])
        for switch in SWITCHES
    }
    for switch in SWITCHES:
        run, before = medians[switch.name], medians.get(switch.before or "")
        if run:
            gain = before and run["tokens_per_s"] / before["tokens_per_s"] - 1
            cells = (
                switch.name,
                f"{run['step_s']:.3f}",
                f"{run['tokens_per_s']:.0f}",
                f"{gain:+.1%}" if gain else "",
                *(_percent(run[name]) for name in ("mfu", "bubble", "formula")),
                f"{run['transfers_per_step']:.0f}",
                f"{run['sent_kb']:.0f}",
                _percent(run["exposed_ratio"]),
                f"{run['state_kb']:.0f}",
                f"{run['in_flight']:g}",
                _percent(run["worst_overrun_ratio"]),
                f"{run['load']:.0f}",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each measurement over the runs of a switch."""
    numbers = {
        name: [run[name] for run in runs if isinstance(run[name], int | float)]
        for name in (runs[0] if runs else ())
    }
    return {name: median(values) if values else None for name, values in numbers.items()}


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.1%}"


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
    parser.add_argument("--steps", type=int, default=6)
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
