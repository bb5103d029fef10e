"""The process of a job: its output, signals and exit status are its own."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

PASSED_ON = frozenset(
    {
        signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT,
        signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGTSTP,
    }
)  # fmt: skip
"""Signals that the job gets if another process sends them to this one."""

WAITED = PASSED_ON | {signal.SIGCHLD}
LOOK_S = 0.5
"""Time after which it is seen that the job has ended, if a thread of a library takes SIGCHLD."""

TO_GROUP_S = 0.05
"""Time in which a signal reaches all processes of the group: a supervisor may send it one by one,
and `timeout` sends it to its child before the group."""

CHANGED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python ignores, and the job must not."""

NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit statuses of a command that cannot be started, as of a shell, `env` and `nice`."""

SIGNALLED = 128
"""Exit status of a process that a signal ended, less the number of the signal, as of a shell."""


class CommandStartError(Exception):
    """A command that cannot be started.

    Args:
        program: The program.
        number: Number of the error of the system.
    """

    def __init__(self, program: str, number: int) -> None:
        super().__init__(f"can't run {program}: {os.strerror(number)}")
        self.status = NOT_FOUND if number == errno.ENOENT else NOT_EXECUTABLE
        """The exit status that a shell would have."""


def check_program(program: str) -> None:
    """Check that a program can be executed.

    Raises:
        CommandStartError: There is none of this name, or it is not executable.
    """
    if shutil.which(program) is None:
        raise CommandStartError(program, errno.EACCES if Path(program).exists() else errno.ENOENT)


@contextmanager
def signals_blocked() -> Iterator[set[int]]:
    """Keep `PASSED_ON` and SIGCHLD for `run_command` until the block ends; yield the mask before.

    Threads that start in the block take no signal, and processes must get the mask back. No thread
    may run before, such as those of numpy: the kernel gives it what this one blocks.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, WAITED)
    try:
        yield set(mask)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def run_command(
    command: tuple[str, ...],
    environment: Mapping[str, str],
    *,
    mask: set[int],
    before_stop: Callable[[], None],
) -> int:
    """Run a command to its end and return its exit status; 128 + n if signal n ended it.

    It shares stdin, stdout, stderr and the process group with this process. What the terminal
    (Ctrl-C) or another process sends to the group reaches both, so only a signal to this process
    alone is passed on.

    Args:
        command: Program and arguments.
        environment: Its whole environment.
        mask: Its blocked signals, of `signals_blocked`, within which this is called.
        before_stop: Called before Ctrl-Z stops this process, too.

    Raises:
        CommandStartError: There is no such program, or it cannot be executed.
    """
    with GroupWitness() as witness:
        try:
            job = os.posix_spawnp(
                command[0], command, environment, setsigmask=mask, setsigdef=CHANGED_BY_PYTHON
            )
        except OSError as error:
            raise CommandStartError(command[0], error.errno or errno.ENOEXEC) from error
        while True:
            received = signal.sigtimedwait(WAITED, LOOK_S)
            if received is None or received.si_signo == signal.SIGCHLD:
                pid, status = os.waitpid(job, os.WNOHANG)
                if pid == job:
                    code = os.waitstatus_to_exitcode(status)
                    return code if code >= 0 else SIGNALLED - code
                continue
            number = received.si_signo
            is_of_terminal = received.si_code > 0  # sent by the kernel, and not by a process
            if not witness.has_received(number) and not is_of_terminal:
                os.kill(job, number)
            if number == signal.SIGTSTP:
                before_stop()
                os.kill(os.getpid(), signal.SIGSTOP)


class GroupWitness:
    """A process of this process group that takes no signal: those to the whole group stay pending.

    It ends with this process, however that ends. Use it while `PASSED_ON` is blocked: it inherits
    that.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with suppress(OSError):  # without it, a signal to the group reaches the job twice
            self._process = subprocess.Popen(
                ["cat"],  # noqa: S607  # it waits for the end of its input, which this process has
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def has_received(self, number: int) -> bool:
        """Return whether a signal that this process has just taken went to the whole group.

        If it did, and comes once more within `TO_GROUP_S`, that counts as the same signal.
        """
        time.sleep(TO_GROUP_S)
        if self._process is None or not is_pending(self._process.pid, number):
            return False
        signal.sigtimedwait({number}, 0)
        self.__exit__()
        self.__enter__()
        return True


def is_pending(pid: int, number: int) -> bool:
    """Return whether a process has a signal pending; False if the system does not say.

    Source: proc_pid_status(5), ShdPnd.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    pending = next((line.split()[1] for line in lines if line.startswith("ShdPnd:")), "0")
    return bool(int(pending, 16) >> (number - 1) & 1)
