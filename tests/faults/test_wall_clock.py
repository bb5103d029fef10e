"""Setting the wall clock of a host while a rank trains and its agent sends (fault D1)."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from tests.faults.jumping_clock import JumpingClock
from tests.integration.programs import COMMAND, TIMEOUT_S, environment
from tests.support.collector.fake_collector import TOKEN, FakeCollector
from tests.support.collector.kept_cuts import decode_cuts
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.collector.fake_collector import Reply

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.slow,
    pytest.mark.skipif(
        platform.machine() != "x86_64", reason="libfaketime's package has a library for x86-64"
    ),
]

HOUR_S, DAY_S, NS_PER_S = 3_600, 86_400, 10**9
SPANS_A_CLOCK = 5
SPAN_S = 0.01

RANK = f"""
import sys, time
from rankscope import tracer
tracer.install()
for line in sys.stdin:
    for number in range({SPANS_A_CLOCK}):
        with tracer.span(line.strip()):
            time.sleep({SPAN_S})
    print(time.time_ns(), flush=True)
tracer.shutdown()
"""


class Seen:
    """Rows that a collector received, with their times."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []

    def __call__(self, path: str, body: bytes) -> Reply | None:
        if path == "/v1/spans":
            self.spans += [row for cut in decode_cuts(body) for row in cut.rows.spans.to_pylist()]
        if path == "/v1/rows/events":
            self.events += json.loads(body)["rows"]
        return None

    def named(self, name: str) -> list[dict[str, Any]]:
        """Return the spans of a name once each, in the order of recording."""
        by_row = {(row["segment"], row["row"]): row for row in self.spans if row["name"] == name}
        return [by_row[key] for key in sorted(by_row)]

    def has_steps(self, num_steps: int) -> bool:
        """Return whether this many steps of the wall clock were reported."""
        return len(self.steps_s()) >= num_steps

    def steps_s(self) -> list[int]:
        """Return the size of each reported step of the wall clock, in whole seconds."""
        steps = {row["at_ns"]: row for row in self.events if row["kind"] == "wall-clock-step"}
        shifts = [json.loads(steps[at_ns]["data"])["shift_ns"] for at_ns in sorted(steps)]
        return [round(shift_ns / NS_PER_S) for shift_ns in shifts]


def test_setting_the_wall_clock_moves_no_span(tmp_path: Path) -> None:
    # GIVEN a rank and its agent on a host whose wall clock can be set
    spool, clock, seen = tmp_path / "spool", JumpingClock(tmp_path / "clock"), Seen()
    own = environment(tmp_path, RANKSCOPE_TOKEN=TOKEN, **clock.environment())
    with FakeCollector() as collector:
        collector.misbehave = seen
        agent = subprocess.Popen(
            [*COMMAND, "agent", "--spool", str(spool), "--collector", collector.url,
             "--no-samples"],
            env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        rank = subprocess.Popen(
            [sys.executable, "-c", RANK],
            env={**own, "RANKSCOPE_TRACE": str(spool), "RANKSCOPE_RUN": "run"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            begun_ns = time.time_ns()
            wall_s = {name: record(rank, seen, name) for name in ["before"]}
            # WHEN it is set back an hour, and then forward a day
            for name, ahead_s, num_steps in (("back", -HOUR_S, 1), ("ahead", DAY_S - HOUR_S, 2)):
                clock.set(ahead_s)
                wall_s[name] = record(rank, seen, name)
                wait_until(partial(seen.has_steps, num_steps))
            ended_ns = time.time_ns()
        finally:
            for process in (rank, agent):
                process.terminate()
                process.communicate(timeout=TIMEOUT_S)

    # THEN the rank read another time of day
    assert wall_s["back"] - wall_s["before"] < -HOUR_S + TIMEOUT_S
    assert wall_s["ahead"] - wall_s["back"] > DAY_S - 1
    # AND its spans follow each other, at their times on the collector's clock
    spans = [span for name in ("before", "back", "ahead") for span in seen.named(name)]
    assert len(spans) == 3 * SPANS_A_CLOCK
    starts_ns = [span["start_ns"] for span in spans]
    assert begun_ns < starts_ns[0]
    assert starts_ns[-1] < ended_ns
    for span, following in pairwise(spans):
        assert span["start_ns"] + span["duration_ns"] <= following["start_ns"]
    assert all(SPAN_S * NS_PER_S <= span["duration_ns"] < 60 * NS_PER_S for span in spans)
    # AND both steps are events of the run
    assert seen.steps_s() == [-HOUR_S, DAY_S]


def record(rank: subprocess.Popen[str], seen: Seen, name: str) -> float:
    """Record spans of a name; return the rank's time of day in s after they have arrived."""
    assert rank.stdin is not None
    assert rank.stdout is not None
    rank.stdin.write(f"{name}\n")
    rank.stdin.flush()
    wall_ns = int(rank.stdout.readline())
    wait_until(lambda: len(seen.named(name)) >= SPANS_A_CLOCK)
    return wall_ns / NS_PER_S
