"""The process of a job: its output, signals and exit status are its own."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

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

    Threads that start in the block take no signal, and processes must get the mask back.
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

    It shares stdin, stdout, stderr and the process group with this process. A signal of the
    terminal (Ctrl-C) reaches both, so only what another process sends is passed on.

    Args:
        command: Program and arguments.
        environment: Its whole environment.
        mask: Its blocked signals, of `signals_blocked`, within which this is called.
        before_stop: Called before Ctrl-Z stops this process, too.

    Raises:
        CommandStartError: There is no such program, or it cannot be executed.
    """
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
        if received.si_code <= 0:  # sent by a process, and not by the kernel for a terminal
            os.kill(job, number)
        if number == signal.SIGTSTP:
            before_stop()
            os.kill(os.getpid(), signal.SIGSTOP)
