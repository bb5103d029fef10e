"""Active tests with real gloo processes, each of which has the name of a host of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed  # noqa: F401  # once, before the ranks are forked

from rankscope.doctor.active.measure import Collectives
from rankscope.doctor.active.trials import ACTIVE_TESTS, judge_speeds, run_tests
from rankscope.doctor.result import State
from tests.support.paths import ROOT
from tests.support.ports import fixed_port
from tests.support.tracer.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

NUM_HOSTS = 6


class Paced(Collectives):
    """Collectives that take a fixed time more on slow hosts, and much longer than noise."""

    pause_s = 0.03

    def _median(self, work: Callable[[], object], group: Any) -> float:  # noqa: ANN401
        def paced() -> None:
            time.sleep(self.pause_s)
            work()

        return super()._median(paced, group)


def main(rank: int, num_hosts: int, folder: Path, bad: Sequence[str]) -> None:
    """Run the tests on a host of one rank; the first one saves the results."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_hosts), "LOCAL_RANK": "0"}
    if str(rank) in bad:
        Paced.pause_s = 0.15
    found = run_tests(f"n{rank}", collectives=Paced)
    if found is not None:
        results = [(host, asdict(result)) for host, result in found]
        (folder / "found.json").write_text(json.dumps(results))


@pytest.mark.multiproc
@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize(
    "bad",
    [
        pytest.param("", marks=pytest.mark.nightly),
        pytest.param("2", marks=pytest.mark.nightly),
        "1 4",
    ],
    ids=["none", "one", "two"],
)
def test_paced_hosts_are_named_by_their_groups(bad: str, tmp_path: Path) -> None:
    port = str(fixed_port())
    run_ranks(
        __name__, NUM_HOSTS, tmp_path, *bad.split(), MASTER_ADDR="127.0.0.1", MASTER_PORT=port
    )

    found = json.loads((tmp_path / "found.json").read_text())
    groups = {host: result["state"] for host, result in found if result["check"] == "groups"}
    named = [host for host, state in groups.items() if state == State.ERROR]
    assert named == [f"n{rank}" for rank in bad.split()]
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
