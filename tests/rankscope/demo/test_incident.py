"""The demo of an incident, from the lost rank to the goodput."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.store.store import open_store
from rankscope.demo.incident import FAULTY_RANK, HOSTS, SPARE, WIDTH

if TYPE_CHECKING:
    from pathlib import Path

WITHIN_S = 280


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.nightly  # two trainings of four processes: 90 s
@pytest.mark.timeout(300)
def test_the_lost_host_is_excluded_and_the_job_goes_on_with_the_spare(tmp_path: Path) -> None:
    url = f"chdb://{tmp_path}/store"
    done = subprocess.run(
        [sys.executable, "-m", "rankscope", "demo", "--incident", "--store", url],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        timeout=WITHIN_S,
    )

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines[:-2])) <= WIDTH  # the last two are addresses
    said = {line[8:17].strip(): line[18:] for line in lines if line[5:6] == "s"}
    lost = HOSTS[FAULTY_RANK]
    assert said["lost"] == f"the process of rank {FAULTY_RANK} on {lost} is gone"
    assert said["exclude"].startswith(lost)
    assert SPARE in said["restart"]
    assert lost not in said["restart"]
    parts = {line.split()[0] for line in lines if line.endswith(" %")}
    assert {"productive", "repeated", "detection", "restart", "start-up"} <= parts
    assert "/run/incident-" in lines[-1]
    assert not [*tmp_path.glob("rankscope-incident-*")]
    with open_store(url) as store:
        states = store.rows("SELECT DISTINCT epoch, exit_state FROM ranks FINAL")
    assert {row["exit_state"] for row in states} <= {"ended", "failed", "lost"}
