"""Active tests with real gloo processes, each of which has the name of a host of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from rankscope.doctor.active.trials import ACTIVE_TESTS, judge_speeds
from rankscope.doctor.result import State
from tests.support.paths import ROOT
from tests.support.ports import fixed_port

if TYPE_CHECKING:
    from pathlib import Path

NUM_HOSTS = 6

WORKER = """
import json, os, sys, time
from dataclasses import asdict
from rankscope.doctor.active import measure, trials

class Paced(measure.Collectives):
    '''Collectives that take a fixed time more on slow hosts, and much longer than noise.'''

    pause_s = 0.15 if os.environ["RANK"] in sys.argv[2].split(",") else 0.03

    def _median(self, work, group):
        def paced():
            time.sleep(self.pause_s)
            work()
        return super()._median(paced, group)

found = trials.run_tests(sys.argv[1], collectives=Paced)
if found is not None:
    print(json.dumps([(host, asdict(result)) for host, result in found]))
"""


def run_hosts(bad: str) -> list[tuple[str, dict[str, str]]]:
    """Run the tests on hosts of one rank, and return the results of rank 0."""
    shared = {
        **os.environ, "PYTHONPATH": str(ROOT / "src"), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(fixed_port()), "WORLD_SIZE": str(NUM_HOSTS), "LOCAL_RANK": "0",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, f"n{rank}", bad],
            env={**shared, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(NUM_HOSTS)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * NUM_HOSTS
    found: list[tuple[str, dict[str, str]]] = json.loads(outputs[0])
    return found


@pytest.mark.multiproc
@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize(
    "bad",
    [
        pytest.param("", marks=pytest.mark.nightly),
        pytest.param("2", marks=pytest.mark.nightly),
        "1,4",
    ],
    ids=["none", "one", "two"],
)
def test_paced_hosts_are_named_by_their_groups(bad: str) -> None:
    found = run_hosts(bad)

    groups = {host: result["state"] for host, result in found if result["check"] == "groups"}
    named = [host for host, state in groups.items() if state == State.ERROR]
    assert named == [f"n{rank}" for rank in filter(None, bad.split(","))]
    assert len(groups) == NUM_HOSTS
    assert {result["check"] for _, result in found} == {test.name for test in ACTIVE_TESTS}


@pytest.mark.multiproc
@pytest.mark.slow
def test_a_host_alone_gets_measurements_and_no_verdict(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rankscope", "doctor", "--active", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HOME": str(tmp_path)}
    environment.pop("RANKSCOPE_STORE", None)

    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=240
    )

    checks = json.loads(done.stdout)["checks"]
    measured = {c["check"]: c for c in checks if c["section"] == "active tests"}
    assert "TFLOP/s" in measured["matmul"]["reason"]
    assert measured["groups"]["state"] == State.NOT_APPLICABLE


def test_a_slow_device_is_compared_with_its_peers() -> None:
    parts = [("n1", f"GPU {index}") for index in range(8)]
    speeds = [700.0, 702.0, 698.0, 701.0, 520.0, 699.0, 700.0, 703.0]

    (found,) = judge_speeds("matmul", parts, speeds)

    host, name, outcome = found
    assert (host, name, outcome.state, outcome.part) == ("n1", "matmul", State.ERROR, "GPU 4")
    assert outcome.reason == "520 TFLOP/s, 26% below the median of its 7 peers (700 TFLOP/s)"


def test_two_devices_have_no_verdict() -> None:
    ((_, _, outcome),) = judge_speeds("matmul", [("n1", "GPU 0"), ("n1", "GPU 1")], [700.0, 300.0])

    assert outcome.state is State.NOT_APPLICABLE
    assert outcome.reason == "300 to 700 TFLOP/s; fewer than 3 peers: no verdict"
