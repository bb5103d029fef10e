"""`rankscope run`: a job prints and ends as without it, and its verdict follows."""

from __future__ import annotations

import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from rankscope.commands.runs import list_runs
from tests.integration.programs import COMMAND, job_environment
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.multiproc]

TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node=4")

TRAINING = """
import os, sys
import torch

torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(12):
    loss = model(torch.randn(8, 64)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, flush=True)
print(sys.argv[1:], sys.stdin.read(), file=sys.stderr)
sys.exit(int(os.environ.get("STATUS", "0")))
"""


def start(
    folder: Path, *command: str, stdin: str = "", **changed: str
) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(TRAINING)
    return subprocess.run(
        command,
        cwd=folder,
        env=job_environment(folder, **changed),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def rankscope(*arguments: str) -> tuple[str, ...]:
    return (*COMMAND, *arguments)


def stored_runs(folder: Path) -> str:
    return list_runs(as_json=False, store_url=f"chdb://{folder / 'store'}")


def test_a_training_prints_and_ends_as_without_it(tmp_path: Path) -> None:
    command = ("python", "train.py", "--name", "of the script", "--", "--serve")
    traced = start(
        tmp_path, *rankscope("run", "--name", "mine", *command), stdin="some\ninput", STATUS="3"
    )

    assert traced.returncode == 3
    assert traced.stdout.split() == [str(step) for step in range(12)]
    printed = "['--name', 'of the script', '--', '--serve'] some\ninput\n"
    assert traced.stderr.startswith(f"{printed}rankscope: ")
    said = traced.stderr.removeprefix(printed)
    assert "report:    rankscope analyze mine" in said
    assert "\x1b" not in said
    assert stored_runs(tmp_path).splitlines()[1].startswith("mine ")
    assert list((tmp_path / "data" / "rankscope" / "jobs").iterdir()) == []


def test_all_ranks_of_a_launcher_are_one_run_with_a_verdict(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "torchrun_ddp.py")
    traced = start(tmp_path, *rankscope("run", *TORCHRUN, script), SLOW_RANK="1")

    assert traced.returncode == 0, traced.stderr
    assert "Rank 1 " in traced.stderr
    assert "proof: rankscope serve, then /timeline?run=torchrun-ddp-" in " ".join(
        traced.stderr.split()
    )
    _, line = stored_runs(tmp_path).splitlines()
    assert line.startswith("torchrun-ddp-")
    assert line.split()[1:5] == ["rankscope", "ended", "4", "20"]


def test_a_job_runs_if_its_store_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    script = 'mkdir "$RANKSCOPE_TRACE"; echo hi'
    command = ("run", "--store", f"chdb://{tmp_path}/file", "bash", "-c", script)
    traced = start(tmp_path, *rankscope(*command))

    assert (traced.returncode, traced.stdout) == (0, "hi\n")
    assert traced.stderr.startswith("rankscope: no diagnosis: ")
    assert "rankscope import" in traced.stderr


def test_a_megabyte_of_output_is_the_same_to_the_byte(tmp_path: Path) -> None:
    script = "import sys, os; os.write(1, bytes(range(256)) * 4096); os.kill(os.getpid(), 9)"
    command = rankscope("run", "python", "-c", script)
    traced = subprocess.run(
        command, env=job_environment(tmp_path), capture_output=True, check=False
    )

    assert traced.stdout == bytes(range(256)) * 4096
    assert traced.returncode == 137


def test_a_signal_ends_the_job_and_not_its_verdict(tmp_path: Path) -> None:
    script = "trap 'echo stopped; exit 9' TERM; echo ready; while :; do sleep 0.05; done"
    with subprocess.Popen(
        rankscope("run", "bash", "-c", script),
        env=job_environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        said, errors = process.communicate(timeout=120)

    assert (process.returncode, said) == (9, "stopped\n")
    assert errors.startswith("rankscope: no process was traced")
