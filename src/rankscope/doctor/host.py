"""The host that is checked: its files, the output of its tools, its environment."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TOOL_TIMEOUT_S = 3.0
"""Time for one tool. `nvidia-smi -q -x` takes about one second on eight GPUs."""

IDLE_TOOL_TIMEOUT_S = 120.0
"""Time for one tool if the host has nothing else to do: a diagnostic of DCGM takes a minute."""

KILL_WAIT_S = 0.1
MAX_BYTES = 4 << 20
"""Longest text that is read of a file or a tool."""

ADMIN_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")
COMMANDS = "commands"
"""Folder of a recorded host with the output of its tools: `nvidia-smi_-q_-x`, for example."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutput:
    """The text that a tool wrote, on both channels."""

    text: str
    status: int | None
    """Exit status; None: it did not end in time and was killed."""


def run_tool(command: tuple[str, ...], *, timeout_s: float = TOOL_TIMEOUT_S) -> ToolOutput | None:
    """Run a tool, and return its output; None if it is not installed.

    A tool that blocks in the driver cannot be killed. Then its process is left behind.
    """
    folders = os.pathsep.join((os.environ.get("PATH", os.defpath), *ADMIN_FOLDERS))
    executable = shutil.which(command[0], path=folders)
    if executable is None:
        return None
    # Not a pipe: a child of the tool may keep it open after the tool was killed.
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(  # noqa: S603  # names of this package, without a shell
                (executable, *command[1:]),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LC_ALL": "C"},
                start_new_session=True,
            )
        except OSError as problem:
            return ToolOutput(text=str(problem), status=1)
        status: int | None = None
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(KILL_WAIT_S)
        output.seek(0)
        return ToolOutput(text=output.read(MAX_BYTES).decode("utf-8", "replace"), status=status)


class Host:
    """A host as the checks read it. Threads may share it.

    Args:
        root: Folder that has the host's ``proc`` and ``sys``. Another one than ``/`` is a recorded
            host: its folder `COMMANDS` has the output of its tools, and others are not run.
        environment: Variables of the job. None: those of ``process``.
        name: Name in the results. None: the host name.
        spool: Folder of the tracer's records; None: ``RANKSCOPE_TRACE``, if set.
        store_url: URL of the store; None: the default.
        nccl_log: Text that NCCL wrote with ``NCCL_DEBUG=INFO``.
        process: Process whose limits and variables count; this one if it is None or has ended.
        expected_gpus: Number of GPUs that the host must have; None: as many as it shows.
        is_before_job: Whether no job may run here now.
        is_idle: Whether checks may take a minute, and use the GPUs.
        tool: Runs a tool. None: `run_tool`.
        pause: Waits for some seconds between two readings of a counter.
    """

    def __init__(  # noqa: PLR0913  # effects come in here
        self,
        *,
        root: Path = Path("/"),
        environment: Mapping[str, str] | None = None,
        name: str | None = None,
        spool: Path | None = None,
        store_url: str | None = None,
        nccl_log: str | None = None,
        process: int | None = None,
        expected_gpus: int | None = None,
        is_before_job: bool = False,
        is_idle: bool = False,
        tool: Callable[[tuple[str, ...]], ToolOutput | None] | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.root = root
        is_alive = process is not None and self.path(f"/proc/{process}").exists()
        self.process = str(process) if is_alive else "self"
        if environment is None:
            environment = (self._variables() if is_alive else None) or os.environ
        self.environment = environment
        self.name = name or socket.gethostname()
        trace = environment.get("RANKSCOPE_TRACE")
        self.spool = spool or (Path(trace) if trace else None)
        self.store_url = store_url
        self.nccl_log = nccl_log
        self.expected_gpus = expected_gpus
        self.is_before_job = is_before_job
        self.is_idle = is_idle
        timeout_s = IDLE_TOOL_TIMEOUT_S if is_idle else TOOL_TIMEOUT_S
        self._run_tool = tool or partial(run_tool, timeout_s=timeout_s)
        self._pause = pause
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._made: dict[str, Any] = {}

    @property
    def is_recorded(self) -> bool:
        """True if its files are a copy, so that nothing in it moves."""
        return self.root != Path("/")

    def path(self, absolute: str) -> Path:
        """Return the place of a file of the host."""
        return self.root / absolute.lstrip("/")

    def read(self, absolute: str | Path) -> str | None:
        """Return the stripped text of a file of the host; None if it cannot be read."""
        path = absolute if isinstance(absolute, Path) else self.path(absolute)
        with suppress(OSError), path.open("rb") as file:
            return file.read(MAX_BYTES).decode("utf-8", "replace").strip()
        return None

    def glob(self, pattern: str) -> list[Path]:
        """Return the files of the host that match, in order of their names."""
        return sorted(self.root.glob(pattern.lstrip("/")))

    def tool(self, *command: str) -> ToolOutput | None:
        """Return the output of a tool, which is run once; None if it is not installed."""
        return self.once(" ".join(command), lambda: self.tool_again(*command))

    def first_tool(self, command: tuple[str, ...], *recorded: tuple[str, ...]) -> ToolOutput | None:
        """Return the output of a command; of a recorded host also that of its other forms."""
        commands = (command, *recorded) if self.is_recorded else (command,)
        return next(filter(None, (self.tool(*each) for each in commands)), None)

    def tool_text(self, command: tuple[str, ...], *recorded: tuple[str, ...]) -> str:
        """Return the text of the same; "" if the tool is not installed."""
        output = self.first_tool(command, *recorded)
        return "" if output is None else output.text

    def tool_again(self, *command: str) -> ToolOutput | None:
        """Run a tool, even if it was run before, and return its output."""
        if not self.is_recorded:
            return self._run_tool(command)
        text = self.read(f"{COMMANDS}/{'_'.join(command)}")
        return None if text is None else ToolOutput(text=text, status=0)

    def once(self, key: str, make: Callable[[], T]) -> T:
        """Return what ``make`` returned for this key the first time."""
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._made:
                self._made[key] = make()
            made: T = self._made[key]
            return made

    def pause(self, seconds: float) -> None:
        """Wait between two readings; not for a recorded host."""
        if not self.is_recorded:
            self._pause(seconds)

    def _variables(self) -> dict[str, str]:
        """Return the variables with which the process was started; {} if they cannot be read."""
        text = self.read(f"/proc/{self.process}/environ") or ""
        pairs = (entry.partition("=") for entry in text.split("\0") if "=" in entry)
        return {name: value for name, _, value in pairs}


def is_container(host: Host) -> bool:
    """Return whether the host is a container."""
    if host.path("/.dockerenv").exists() or host.path("/run/.containerenv").exists():
        return True
    if "KUBERNETES_SERVICE_HOST" in host.environment or "container" in host.environment:
        return True
    groups = host.read("/proc/1/cgroup") or ""
    return any(word in groups for word in ("docker", "kubepods", "containerd", "libpod", "lxc"))
