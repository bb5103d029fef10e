"""A job from its command to its verdict: run, traced, observed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Self

import rankscope.tracer.autostart
from rankscope.collector.identity import check_run_name
from rankscope.collector.store.location import data_folder, default_store_url

from ..doctor.places import MOUNTS, NETWORK_FILE_SYSTEMS, file_system, nearest_folder
from ..server.signals import sigterm_as_interrupt
from ..terminal.lines import say, terminal_width
from .command import CommandStartError, check_program, run_command, signals_blocked
from .live_line import LiveLine
from .observer import SPOOL, Message, Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

OBSERVER_LOG = "observer.log"
OBSERVER_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
"""It computes in few threads, beside the ranks. All else is as for the job, whose settings it
checks."""

CLOSE_S = 10.0
"""Time in which the store is closed."""

MAX_SCRIPT = 40
"""Characters of the script in the name of a run: the time needs 16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """Flags of `rankscope run`."""

    command: tuple[str, ...]
    name: str | None
    serve: bool
    port: int | None
    store_url: str | None


def run_job(options: JobOptions) -> int:
    """Run a command traced, print the verdict to stderr, and return the command's exit status.

    What goes wrong with the records is one line; the command runs in any case.

    Raises:
        RunNameError: ``--name`` is not a valid name.
    """
    name = (
        check_run_name(options.name)
        if options.name is not None
        else os.environ.get("RANKSCOPE_RUN") or name_run(options.command)
    )
    try:
        check_program(options.command[0])
        return _run(options, name)
    except CommandStartError as error:
        say(str(error))
        return error.status


def _run(options: JobOptions, name: str) -> int:
    observer, environment = None, dict(os.environ)
    try:
        folder = make_job_folder(name)
        settings = Settings(
            folder=str(folder),
            store_url=options.store_url or default_store_url(),
            serve=options.serve,
            port=options.port,
            width=terminal_width(),
        )
        environment = traced(os.environ, folder=folder, run=name)
        observer = Observer(settings)
    except OSError as error:
        say(f"not diagnosed: {error.strerror}: {error.filename}")
    with ExitStack() as stack:
        with signals_blocked() as mask:
            line = stack.enter_context(LiveLine(observer.format_status if observer else str))
            if observer is not None:
                stack.enter_context(observer)
            status = run_command(options.command, environment, mask=mask, before_stop=line.hide)
        if observer is not None:
            with suppress(KeyboardInterrupt), sigterm_as_interrupt():
                _finish(observer, line, serves=options.serve and sys.stderr.isatty())
    return status


def make_job_folder(name: str) -> Path:
    """Make the folder of a job: in the data folder, or a temporary one if that is on a network.

    Raises:
        OSError: It cannot be made.
    """
    jobs = data_folder() / "jobs"
    if file_system(nearest_folder(jobs), MOUNTS).startswith(NETWORK_FILE_SYSTEMS):
        return Path(tempfile.mkdtemp(prefix=f"rankscope-{name}-"))
    jobs.mkdir(mode=0o700, parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=jobs))


def _finish(observer: Observer, line: LiveLine, *, serves: bool) -> None:
    """Print the verdict; then serve until Ctrl-C if ``serves``."""
    verdict = observer.wait_for_verdict()
    line.close()
    sys.stderr.write(f"{verdict}\n")
    sys.stderr.flush()
    if serves:
        say("the dashboard is served until Ctrl-C")
        observer.wait_for_end()


def traced(environment: Mapping[str, str], *, folder: Path, run: str) -> dict[str, str]:
    """Return the environment of a job whose Python processes are traced.

    Args:
        environment: That of the job without the tracer.
        folder: Folder of the job; its records go into `SPOOL` there.
        run: Name of the run.
    """
    autostart = str(Path(rankscope.tracer.autostart.__file__).parent)
    path = environment.get("PYTHONPATH")
    return {
        **environment,
        "PYTHONPATH": f"{autostart}{os.pathsep}{path}" if path else autostart,
        "RANKSCOPE_TRACE": str(folder / SPOOL),
        "RANKSCOPE_RUN": run,
    }


def name_run(command: tuple[str, ...]) -> str:
    """Return a name made of the script, or else the module or program, and the time in UTC."""
    scripts = [Path(word).stem for word in command if word.endswith(".py")]
    modules = [after.rpartition(".")[2] for word, after in pairwise(command) if word == "-m"]
    chosen = next(iter([*scripts, *modules[-1:], Path(command[0]).name]))
    kept = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in chosen)
    return f"{kept.strip('-')[:MAX_SCRIPT] or 'run'}-{datetime.now(UTC):%Y%m%d-%H%M%S}"


class Observer:
    """The process beside the job, and what it has said so far (`observer`).

    Args:
        settings: What it is to do.

    Raises:
        OSError: It could not be started.
    """

    def __init__(self, settings: Settings) -> None:
        self._status = "starting"
        self._verdict = ""
        self._has_verdict = threading.Event()
        self._log = Path(settings.folder) / OBSERVER_LOG
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603  # our own module
                [sys.executable, "-P", "-m", f"{__package__}.observer"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **OBSERVER_ENVIRONMENT},
                start_new_session=True,  # a Ctrl-C at the terminal is for the job
            )
        self._reader = threading.Thread(target=self._read, name="observer", daemon=True)
        self._write(json.dumps(asdict(settings)))

    def __enter__(self) -> Self:
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()  # which ends it
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            self._process.wait(CLOSE_S)  # the next command may need the store

    def format_status(self) -> str:
        """Return the line to show while the job runs."""
        return f"rankscope | {self._status}"

    def wait_for_verdict(self) -> str:
        """Return the verdict of the job, which has ended, or why there is none."""
        self._write("ended")
        self._has_verdict.wait()
        return self._verdict

    def wait_for_end(self) -> None:
        """Wait until the process ends: it serves meanwhile."""
        self._process.wait()

    def _write(self, line: str) -> None:
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()

    def _read(self) -> None:
        if self._process.stdout is None:
            return
        with self._process.stdout as output:
            for line in output:
                kind, text = json.loads(line)
                if kind == Message.STATUS:
                    self._status = text
                elif kind == Message.LINE:
                    say(text)
                else:
                    self._verdict = text
                    self._has_verdict.set()
        self._verdict = self._verdict or f"rankscope: no diagnosis: see {self._log}"
        self._has_verdict.set()
