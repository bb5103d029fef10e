"""Time from a fault of real processes to its alert.

    python -m benchmarks.real_alerts [--repeats 1] [--only CAUSE ...] [--seed 1]

Each run starts `rankscope serve` with a receiver, and the trainer under torchrun (8 gloo processes,
pp 2 x dp 2 x tp 2, paced) with one fault. It prints the alerts of the first message that names the
fault, and times from the end of the last step without it: to the end of the third step that has it,
to the first message of any alert, and to the one that names cause and ranks. Run nothing else
beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, Any

from rankscope import query
from rankscope.demo.training import Training
from rankscope.trainer.faults.spec import ENDING_CAUSES, parse_fault
from tests.integration.programs import serving
from tests.support.receiver import Receiver

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankscope.trainer.faults.spec import Fault

PACE_MS = 60
NUM_STEPS = 40
WAIT_S = 240.0
POLL_S = 0.2

KILLED = "kill -9"
STOPPED = "kill -STOP"
STOPPED_RANK = 5

FAULTS: dict[str, Callable[[random.Random], str]] = {
    "slow-compute": lambda rng: f"slow-compute:rank={rng.randint(0, 7)},factor=1.6,steps=12-39",
    "host-stall": lambda rng: f"host-stall:rank={rng.randint(0, 7)},ms=120,steps=12-39",
    "data-stall": lambda rng: f"data-stall:rank={rng.randint(0, 3)},ms=600,spans=yes,steps=12-39",
    "crash": lambda rng: f"crash:rank={rng.randint(0, 7)},step=12,kind=exception",
    KILLED: lambda rng: f"crash:rank={rng.randint(0, 7)},step=12,kind=kill",
    "hang": lambda rng: f"hang:rank={rng.randint(0, 7)},step=12",
    STOPPED: lambda _: "none",
}
"""Text of each fault; a stopped process is stopped by the benchmark."""

STEP_END = "SELECT max(end_ns) AS at_ns FROM steps FINAL WHERE step = {step:Int32}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertRun:
    """A run and its alert."""

    fault: str
    alerts: tuple[str, ...]
    """Rule, cause and ranks of each alert until the fault's."""

    step: int | None
    """Step that the alert names first."""

    three_steps_s: float | None
    """Time that the first three steps with the fault took."""

    first_s: float | None
    """Time until the first message."""

    alert_s: float | None
    """Time until the one that names cause and ranks."""

    url: str


def measure(name: str, spec: str) -> AlertRun:
    """Train with a fault beside a server, and wait for its alert."""
    receiver = Receiver()
    fault = parse_fault(spec)
    onset = 12 if fault is None or fault.cause in ENDING_CAUSES else fault.first_step
    with tempfile.TemporaryDirectory() as folder:
        spool, store, config = (Path(folder) / part for part in ("spool", "store", "alerts.toml"))
        config.write_text(
            f'group_interval_s = 1.0\n[[receivers]]\nname = "bot"\nurl = "{receiver.url}"\n'
        )
        with (
            serving("--spool", str(spool), "--config", str(config), store=store),
            Training(
                _command(spec, spool), run_id="real", log=Path(folder) / "training.log"
            ) as training,
        ):
            stopped = None
            seen: list[dict[str, Any]] = []
            found, first_ns, found_ns = None, 0, 0
            begin = time.monotonic()
            while found is None and time.monotonic() - begin < WAIT_S:
                step = training.next_step(POLL_S) if training.status is None else None
                if name == STOPPED and step is not None and step.step == onset - 1:
                    stopped = _rank_pid(spool, STOPPED_RANK)
                    os.kill(stopped, signal.SIGSTOP)
                try:
                    message = json.loads(receiver.bodies.get(timeout=POLL_S))
                except Empty:
                    continue
                found_ns = time.time_ns()
                first_ns = first_ns or found_ns
                seen += message["alerts"]
                found = next((each for each in seen if _names(each, fault)), None)
            if stopped is not None:
                os.kill(stopped, signal.SIGCONT)
            times = [_step_end(store, step) for step in (onset - 1, onset + 2)]
    receiver.close()
    return AlertRun(
        fault=STOPPED if name == STOPPED else spec,
        alerts=tuple(
            f"{each['rule']} {each['cause']} {','.join(map(str, each['ranks']))}".strip()
            for each in seen
        ),
        step=None if found is None or not found["steps"] else found["steps"][0],
        three_steps_s=(times[1] - times[0]) / 1e9 if all(times) else None,
        first_s=(first_ns - times[0]) / 1e9 if first_ns else None,
        alert_s=None if found is None else (found_ns - times[0]) / 1e9,
        url="" if found is None else found["url"],
    )


def _command(spec: str, spool: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", "8", "-m", "rankscope.trainer", "--pp", "2", "--dp", "2"),
        *("--tp", "2", "--steps", str(NUM_STEPS), "--layers", "2", "--paced"),
        *("--pace-ms", str(PACE_MS), "--fault", spec, "--trace", str(spool)),
    ]


def _rank_pid(spool: Path, rank: int) -> int:
    (manifest,) = spool.glob(f"*/e*-r{rank:05d}-*/manifest.json")
    return int(json.loads(manifest.read_text())["pid"])


def _names(alert: dict[str, Any], fault: Fault | None) -> bool:
    """Return whether an alert is that of the fault; its ranks are in the table."""
    cause, ranks = ("hang", {STOPPED_RANK}) if fault is None else (fault.cause, {*fault.ranks})
    return bool(alert["cause"] == cause and ranks <= {*alert["ranks"]})


def _step_end(store: Path, step: int) -> int:
    """Return the end of a step over all ranks, Unix ns; 0 if it has none."""
    found = query(STEP_END, store=f"chdb://{store}", step=step).to_pylist()
    return int(found[0]["at_ns"])


def main() -> None:
    """Run the faults and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=list(FAULTS))
    options = parser.parse_args()
    print("| fault | alerts | first step | three steps, s | first alert, s | its own alert, s |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for number in range(options.repeats):
        for name in options.only:
            spec = FAULTS[name](random.Random(f"{options.seed}/{name}/{number}"))
            run = measure(name, spec)
            times = (run.three_steps_s, run.first_s, run.alert_s)
            shown = ("-" if each is None else f"{each:.1f}" for each in times)
            row = (run.fault, "; ".join(run.alerts) or "none", run.step, *shown)
            print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
