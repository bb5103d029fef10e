"""A wall clock that a test sets while a process runs, by libfaketime.

The monotonic clock is not changed, as when the time of a real host is set.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path


class JumpingClock:
    """Wall clock of the processes that are started with its environment.

    Args:
        path: File for the offset, created here.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.set(0)

    def set(self, seconds: int) -> None:
        """Set the wall clock ahead of the machine's by some seconds."""
        beside = self._path.with_suffix(".new")
        beside.write_text(f"{seconds:+d}s\n")
        beside.rename(self._path)  # A process that reads meanwhile gets the old or the new offset.

    def environment(self) -> dict[str, str]:
        """Return the environment variables for a process."""
        return {
            "LD_PRELOAD": str(library()),
            "FAKETIME_TIMESTAMP_FILE": str(self._path),
            "FAKETIME_NO_CACHE": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_FORCE_MONOTONIC_FIX": "0",
        }


def library() -> Path:
    """Return the path of the shared library in the package ``libfaketime``."""
    spec = importlib.util.find_spec("libfaketime")
    assert spec is not None
    assert spec.origin is not None
    (found,) = Path(spec.origin).parent.rglob("libfaketime.so.1")
    return found
