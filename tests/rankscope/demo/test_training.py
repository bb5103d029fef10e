from __future__ import annotations

import os
import select
import sys
from pathlib import Path

import pytest

from rankscope.demo.plan import plan_demo
from rankscope.demo.training import StepDone, Training, read_step, training_command
from rankscope.tracer.topology import Layout

TIMEOUT_S = 60.0
STEP = "step 12 loss 3.214 time_s 0.61"


def test_only_the_step_lines_of_the_trainer_are_read() -> None:
    assert read_step(STEP + "\n") == StepDone(step=12, loss=3.214, seconds=0.61)
    assert read_step("paced: each local compute segment is padded") is None


def test_the_command_line_follows_the_plan() -> None:
    plan = plan_demo(
        layout=Layout(pp=3, dp=2, tp=2), num_steps=7, fault="slow-compute:rank=3,factor=1.6"
    )

    command = " ".join(training_command(plan, spool=Path("spool")))

    assert command.startswith(f"{sys.executable} -m torch.distributed.run --standalone")
    assert "--nproc-per-node 12 -m rankscope.trainer --paced --pace-ms 40" in command
    assert "--pp 3 --dp 2 --tp 2 --steps 7" in command
    assert command.endswith("--layers 3 --fault slow-compute:rank=3,factor=1.6 --trace spool")


def test_steps_are_returned_while_the_training_runs(tmp_path: Path) -> None:
    # The program does not end by itself: the step must arrive while it runs.
    program = f"print({STEP!r}, flush=True); import signal; signal.pause()"
    with Training([sys.executable, "-c", program], run_id="r", log=tmp_path / "log") as training:
        assert training.next_step(TIMEOUT_S) == StepDone(step=12, loss=3.214, seconds=0.61)
        assert training.status is None

    assert training.status is not None


def test_the_environment_holds_the_name_of_the_run(tmp_path: Path) -> None:
    program = "import os; print('step', os.environ['RANKSCOPE_RUN'], 'loss 1 time_s 1', flush=True)"
    with Training([sys.executable, "-c", program], run_id="7", log=tmp_path / "log") as training:
        step = training.next_step(TIMEOUT_S)

    assert step is not None
    assert step.step == 7


def test_leaving_the_context_ends_the_launcher_and_its_processes(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys;"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()']);"
        "print('step', child.pid, 'loss 1 time_s 1', flush=True); child.wait()"
    )
    with Training([sys.executable, "-c", program], run_id="r", log=tmp_path / "log") as training:
        step = training.next_step(TIMEOUT_S)
        assert step is not None
        child = os.pidfd_open(step.step)

    ending = select.poll()
    ending.register(child, select.POLLIN)
    ended = ending.poll(TIMEOUT_S * 1_000)
    os.close(child)
    assert ended


@pytest.mark.parametrize(
    ("stderr", "line"),
    [
        (
            "W1121 noise\ntrainer: fault 'x': unknown cause\nE1121 failed (exitcode: 2)\n",
            "trainer: fault 'x': unknown cause",
        ),
        (
            "Traceback (most recent call last):\n  File x\nRuntimeError: gloo lost rank 3\nthe end",
            "RuntimeError: gloo lost rank 3",
        ),
        ("only\nthis\n\n", "this"),
        ("", ""),
    ],
)
def test_the_last_error_is_the_line_with_the_reason(tmp_path: Path, stderr: str, line: str) -> None:
    program = f"import sys; sys.stderr.write({stderr!r}); print({STEP!r})"
    log = tmp_path / "log"
    with Training([sys.executable, "-c", program], run_id="r", log=log) as training:
        training.next_step(TIMEOUT_S)

    assert training.last_error() == line
    assert log.stat().st_size == len(stderr)
