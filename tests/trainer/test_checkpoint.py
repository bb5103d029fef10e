"""Checkpoints of the trainer: bit-identical resumption, kills at several moments, a restart."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import pytest
import torch

from rankscope.trainer.checkpoint import PARTIAL, find_newest, list_steps, read_tensors
from tests.support.paths import ROOT
from tests.support.trainer.job import run_trainer, trainer_command, trainer_environment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Nine jobs of real processes, each of which imports torch: two minutes.
pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.nightly]

NUM_STEPS, EVERY = 12, 3
WITHIN_S = 120.0
STEP_LINE = re.compile(r"step (\d+) loss (\S+)")


def flags(folder: Path, *more: str) -> tuple[str, ...]:
    return (
        *("--steps", str(NUM_STEPS), "--layers", "2", "--microbatches", "2"),
        *("--checkpoint", str(folder), "--checkpoint-every", str(EVERY), *more),
    )


def losses(stdout: str) -> dict[int, str]:
    """Return the last printed loss of each step."""
    return {int(step): loss for step, loss in STEP_LINE.findall(stdout)}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return read_tensors(folder / f"step-{NUM_STEPS:08d}", names=None)


def assert_equal(one: Path, other: Path) -> None:
    expected, found = tensors(one), tensors(other)
    assert expected.keys() == found.keys()
    assert any(name.startswith("optimizer.") for name in found)
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str]]:
    """Checkpoints and losses of a job of one process that nothing interrupts."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = run_trainer(*flags(folder), num_ranks=1)
    assert done.returncode == 0, done.stderr
    return folder, losses(done.stdout)


def kill_when(folder: Path, moment: Callable[[], bool]) -> str:
    """Start a job of one process, kill it at a moment, and return its output."""
    log = folder.with_suffix(".log")
    with (
        log.open("w") as output,
        subprocess.Popen(
            trainer_command(*flags(folder), num_ranks=1),
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=trainer_environment() | {"PYTHONUNBUFFERED": "1"},
        ) as job,
    ):
        until_s = time.monotonic() + WITHIN_S
        while not moment() and job.poll() is None and time.monotonic() < until_s:
            time.sleep(0.001)
        os.kill(job.pid, signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL
    return log.read_text()


def test_a_killed_job_goes_on_from_the_last_whole_checkpoint_bit_by_bit(
    tmp_path: Path, undisturbed: tuple[Path, dict[int, str]]
) -> None:
    folder = tmp_path / "checkpoints"
    printed: dict[int, str] = {}
    seen: list[int | None] = []

    def is_partial(step: int) -> bool:
        return (folder / f"step-{step:08d}{PARTIAL}").exists()

    # WHEN it is killed before the first save, while files are written, and between two saves
    for moment in (
        lambda: "step 1 " in folder.with_suffix(".log").read_text(),
        lambda: is_partial(EVERY),
        lambda: is_partial(2 * EVERY),
        lambda: bool(find_newest(folder)) and "step 7 " in folder.with_suffix(".log").read_text(),
    ):
        printed |= losses(kill_when(folder, moment))
        seen.append(find_newest(folder) if folder.exists() else None)
        for whole in list_steps(folder):
            assert read_tensors(folder / f"step-{whole:08d}", names=None)
    done = run_trainer(*flags(folder), num_ranks=1)

    # THEN what was whole stays whole, and nothing differs from a job that was not killed
    assert done.returncode == 0, done.stderr
    assert seen[0] is None
    assert [step for step in seen if step] == sorted(step for step in seen if step)
    assert f"resumed before step {seen[-1]}" in done.stdout
    assert printed | losses(done.stdout) == undisturbed[1]
    assert_equal(undisturbed[0], folder)
    assert not [*folder.glob(f"*{PARTIAL}")]
    assert len(list_steps(folder)) == 2


def test_a_restart_by_torchrun_is_the_next_epoch_and_loses_no_bit(tmp_path: Path) -> None:
    """Four ranks, two of each data-parallel group: one reads, and sends to the other."""
    layout = ("--dp", "2", "--tp", "2")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    expected = run_trainer(*flags(whole, *layout), num_ranks=4)
    assert expected.returncode == 0, expected.stderr
    command = trainer_command(
        *flags(killed, *layout, "--fault", "crash:rank=2,step=7,kind=kill"),
        *("--trace", str(tmp_path / "spool"), "--run-name", "restarted"),
        num_ranks=4,
    )
    command.insert(command.index("--standalone") + 1, "--max-restarts=1")

    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=trainer_environment(),
        timeout=2 * WITHIN_S,
    )

    assert done.returncode == 0, done.stderr
    assert "resumed before step 6" in done.stdout
    assert losses(done.stdout) == losses(expected.stdout)
    assert_equal(whole, killed)
    folders = {path.name.split("-")[0] for path in (tmp_path / "spool/restarted").glob("e*-r*")}
    assert folders == {"e0", "e1"}
