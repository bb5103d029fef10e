"""How a rank ends on purpose: it dies, or it stands still for ever."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from ..errors import PlantedCrashError
from .spec import CrashKind

EXIT_STATUS = 1


def die(kind: CrashKind, *, rank: int, step: int) -> NoReturn:
    """End this process as ``kind`` says.

    Raises:
        PlantedCrashError: The kind is an exception.
        MemoryError: The kind is host-oom: the kernel was asked for more than there is.
    """
    if kind is CrashKind.EXIT:
        os._exit(EXIT_STATUS)
    if kind is CrashKind.KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind is CrashKind.HOST_OOM:
        bytearray(sys.maxsize)
    raise PlantedCrashError(rank=rank, step=step)


def stand_still() -> NoReturn:
    """Never return; a signal still ends the process."""
    while True:
        signal.pause()
