"""Ranks that no launcher has numbered, started as Lightning and Ray start theirs."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from tests.support.paths import PYTHON_PATH
from tests.support.ports import fixed_port
from tests.tracer.programs import AUTOSTART, run_python

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.multiproc]

TRAINING = """
import os, subprocess, sys
import torch
import torch.distributed as dist

def start(rank, **environ):
    command = [sys.executable, __file__, sys.argv[1], str(rank)]
    return subprocess.Popen(command, env={**os.environ, **environ})

def train(rank):
    address = f"tcp://127.0.0.1:{sys.argv[1]}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
"""

LIGHTNING = """
if len(sys.argv) == 2:
    child = start(1, LOCAL_RANK="1", WORLD_SIZE="2")
    train(0)
    sys.exit(child.wait())
train(int(sys.argv[2]))
"""

RAY = """
if len(sys.argv) == 2:
    workers = [start(rank) for rank in (0, 1)]
    sys.exit(max(worker.wait() for worker in workers))
train(int(sys.argv[2]))
os._exit(0)
"""
"""Its workers are killed when the training is done: no exit handler runs."""


@pytest.mark.parametrize(
    "start", [LIGHTNING, pytest.param(RAY, marks=pytest.mark.nightly)], ids=["lightning", "ray"]
)
def test_a_process_that_becomes_a_rank_is_recorded_as_that_rank(tmp_path: Path, start: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING + start)
    environ = {
        "PYTHONPATH": f"{AUTOSTART}{os.pathsep}{PYTHON_PATH}",
        "RANKSCOPE_TRACE": str(tmp_path / "spool"),
        "RANKSCOPE_RUN": "run",
    }

    done = run_python(script, str(fixed_port()), **environ)

    assert done.returncode == 0, done.stderr
    folders = {path.name[:9]: path for path in (tmp_path / "spool" / "run").iterdir()}
    assert sorted(folders) == ["e0-r00000", "e1-r00000", "e1-r00001"]
    states = {name: json.loads((path / "exit.json").read_text()) for name, path in folders.items()}
    assert {state["state"] for state in states.values()} == {"ended"}
    manifests = [json.loads((path / "manifest.json").read_text()) for path in folders.values()]
    assert sorted(one["world_size"] for one in manifests) == [1, 2, 2]
    assert len({one["job"] for one in manifests if one["world_size"] == 2}) == 1
