"""The training of a demo, in processes of its own, and the steps that it reports."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Self

from ..errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from rankscope.collector.spool.tail import SpoolTail

    from .plan import DemoPlan

STEP_LINE = re.compile(r"step (?P<step>\d+) loss (?P<loss>\S+) time_s (?P<seconds>\S+)")
STEP_TIMEOUT_S = 0.5
POLL_S = 2.0
"""Between two polls of the spool: the ranks need the cores more than the store does."""

GRACE_S = 15.0
"""Time for the launcher to end the ranks, which are in sessions of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """A step as the trainer prints it."""

    step: int
    loss: float
    seconds: float


def require_torch() -> None:
    """Check that the trainer can run here.

    Raises:
        BadInputError: torch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise BadInputError(
            "torch is not installed, and the demo needs it:"
            ' pip install "rankscope[embedded,trainer]"'
        )


def training_command(plan: DemoPlan, *, spool: Path) -> list[str]:
    """Return the command line of a training on this host."""
    layout = plan.layout
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(layout.world_size), "-m", "rankscope.trainer"),
        *("--paced", "--pace-ms", f"{plan.pace_ms:g}"),
        *("--pp", str(layout.pp), "--dp", str(layout.dp), "--tp", str(layout.tp)),
        *("--steps", str(plan.num_steps), "--layers", str(plan.num_layers)),
        *("--fault", plan.spec, "--trace", str(spool)),
    ]


class Training:
    """A training in a process group of its own, which ends when the context is left.

    Args:
        command: Command line.
        run_id: Name of the run. It is passed in the environment, because torchrun takes ``--run``
            for an abbreviation of a flag of its own.
        log: File for stderr.
        environment: Further variables.
    """

    def __init__(
        self,
        command: list[str],
        *,
        run_id: str,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command = command
        self._run_id = run_id
        self._log = log
        self._environment = environment or {}
        self._lines: SimpleQueue[str] = SimpleQueue()

    def __enter__(self) -> Self:
        environment = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "RANKSCOPE_RUN": self._run_id,
            **self._environment,
        }
        with self._log.open("wb") as log:
            # A process group of its own: Ctrl-C reaches only this process, which ends the group.
            self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and arguments
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        self._reader = Thread(target=self._read, name="training output", daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_group(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        self._end_group(signal.SIGKILL)
        self._process.wait()
        self._reader.join(GRACE_S)

    @property
    def status(self) -> int | None:
        """Exit status; None while it runs."""
        return self._process.poll()

    def next_step(self, timeout_s: float) -> StepDone | None:
        """Return the next step that is printed; None if there is none within ``timeout_s``."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except Empty:
            return None
        return read_step(line)

    def follow(self, tail: SpoolTail) -> Iterator[StepDone]:
        """Yield the steps until it ends, and store what it records meanwhile."""
        next_poll_s = 0.0
        while self.status is None:
            step = self.next_step(STEP_TIMEOUT_S)
            if step is not None:
                yield step
            if time.monotonic() >= next_poll_s:
                tail.poll()
                next_poll_s = time.monotonic() + POLL_S

    def last_error(self) -> str:
        """Return the line of stderr that most likely says why it failed; "" if there is none."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        lines = [line.strip() for line in lines if line.strip()]
        ours = [line for line in lines if line.startswith("trainer:")]
        errors = [line for line in lines if re.search(r"\b\w*(Error|Exception): ", line)]
        return next(iter([*ours, *errors, *lines[-1:]]), "")[:300]

    def _read(self) -> None:
        if self._process.stdout is None:
            return
        with self._process.stdout as output:
            for line in output:
                self._lines.put(line)

    def _end_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return


def read_step(line: str) -> StepDone | None:
    """Return the step of a line of the trainer's output; None for any other line."""
    found = STEP_LINE.match(line)
    if found is None:
        return None
    return StepDone(
        step=int(found["step"]), loss=float(found["loss"]), seconds=float(found["seconds"])
    )
