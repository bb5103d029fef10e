"""Other processes on the core of a rank: they compute, or copy memory. Linux only."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Set

CPU_PROGRAM = """
import os
while os.getppid() == {parent}:
    for _ in range(1_000_000):
        pass
"""

MEMORY_PROGRAM = """
import os
source, target = bytearray({size}), bytearray({size})
while os.getppid() == {parent}:
    target[:] = source
"""

COPIED_BYTES = 64 << 20
"""More than the caches of a core, so that each copy goes through the memory."""


class Hogs:
    """Processes that share a core with this rank; they end when it does.

    Args:
        program: What each of them runs.
    """

    def __init__(self, program: str) -> None:
        self._program = program.format(parent=os.getpid(), size=COPIED_BYTES)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._cores: Set[int] = os.sched_getaffinity(0)

    def run(self, num: int) -> None:
        """Let ``num`` processes run beside this rank, on one core; 0 ends them."""
        if num == len(self._processes):
            return
        for process in self._processes:
            process.kill()
            process.wait()
        cores = {max(self._cores)} if num else self._cores
        os.sched_setaffinity(0, cores)
        # They inherit the core of the thread that starts them.
        command = [sys.executable, "-S", "-c", self._program]
        self._processes = [
            subprocess.Popen(command)  # noqa: S603  # our own interpreter and program
            for _ in range(num)
        ]
