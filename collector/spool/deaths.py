"""Times at which processes of this host end, to the millisecond, and their exit status.

A process that is killed leaves no record, and its launcher ends the others within a tenth of a
second: a poll finds all of them gone at once, and which of them was the first is lost.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from .liveness import Liveness, read_liveness

if TYPE_CHECKING:
    from rankscope.tracer.spool import SpoolIdentity

JOIN_S = 5.0

PIDFD_INFO = struct.Struct("=QQ11Ii")
PIDFD_GET_INFO = 3 << 30 | PIDFD_INFO.size << 16 | 0xFF << 8 | 11
PIDFD_INFO_EXIT = 1 << 3
"""Source: Linux 6.15, ``include/uapi/linux/pidfd.h``: the exit status is there from the moment at
which the process's parent has read it."""


class DeathWatch:
    """A thread that waits for the ends of processes.

    Without `os.pidfd_open` (Linux 5.3) it knows none.
    """

    def __init__(self) -> None:
        self._died_ns: dict[int, int] = {}
        """Monotonic time of this host by descriptor."""

        self._epoll: select.epoll | None = None
        self._wake = -1
        self._thread: threading.Thread | None = None

    def follow(self, identity: SpoolIdentity) -> int | None:
        """Wait for the end of a process; return its descriptor, or None if it can't be watched."""
        if not hasattr(os, "pidfd_open"):
            return None
        try:
            pidfd = os.pidfd_open(identity.pid)
        except (OSError, OverflowError):  # gone, forbidden, or no pid: the file is damaged
            return None
        # Only now: the descriptor stays that of this process, even if its pid is used again.
        if read_liveness(identity) is not Liveness.ALIVE:
            os.close(pidfd)
            return None
        epoll = self._epoll or self._start()
        self._died_ns.pop(pidfd, None)  # of an earlier process whose end came while it was left
        epoll.register(pidfd, select.EPOLLIN)
        return pidfd

    def died_ns(self, pidfd: int) -> int | None:
        """Return when a process ended, in monotonic time of this host; None if it runs.

        On a busy machine the thread may not have seen an end yet that the caller has noticed.
        """
        if pidfd not in self._died_ns and _has_ended(pidfd):
            return self._died_ns.setdefault(pidfd, time.monotonic_ns())
        return self._died_ns.get(pidfd)

    @staticmethod
    def exit_status(pidfd: int) -> int | None:
        """Return the status of a process as ``waitpid`` gives it; None if the kernel does not say.

        Kernels before 6.15 do not, nor does any while the parent has not read it.
        """
        info = bytearray(PIDFD_INFO.size)
        info[:8] = PIDFD_INFO_EXIT.to_bytes(8, "little")
        try:
            fcntl.ioctl(pidfd, PIDFD_GET_INFO, info)
        except OSError:
            return None
        mask, *_, status = PIDFD_INFO.unpack(info)
        return status if mask & PIDFD_INFO_EXIT else None

    def leave(self, pidfd: int) -> None:
        """Stop waiting for a process."""
        self._died_ns.pop(pidfd, None)
        if self._epoll is not None:
            with suppress(FileNotFoundError):  # it has ended
                self._epoll.unregister(pidfd)
        os.close(pidfd)

    def close(self) -> None:
        """End the thread."""
        if self._thread is None or self._epoll is None:
            return
        os.eventfd_write(self._wake, 1)
        self._thread.join(JOIN_S)
        self._epoll.close()
        os.close(self._wake)
        self._epoll = self._thread = None

    def _start(self) -> select.epoll:
        self._epoll, self._wake = select.epoll(), os.eventfd(0)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._thread = threading.Thread(
            target=self._run, args=(self._epoll,), name="deaths", daemon=True
        )
        self._thread.start()
        return self._epoll

    def _run(self, epoll: select.epoll) -> None:
        while True:
            ended = [descriptor for descriptor, _ in epoll.poll()]
            now_ns = time.monotonic_ns()
            if self._wake in ended:
                return
            # On a busy machine several at once; the kernel lists them in the order of their ends.
            for order, descriptor in enumerate(ended):
                self._died_ns.setdefault(descriptor, now_ns + order)
                with suppress(OSError):  # it has been left meanwhile
                    epoll.unregister(descriptor)


def _has_ended(pidfd: int) -> bool:
    """Return whether the process of a descriptor has ended; `select` takes none above 1,023."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
