"""A wall clock that a test sets while a process runs: libfaketime, before any other library.

The monotonic clock is the machine's own, as where somebody sets the time of a real host.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path


class JumpingClock:
    """The wall clock of the processes that get its environment.

    Args:
        path: The file that tells by how much it is off; made here.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.set(0)

    def set(self, seconds: int) -> None:
        """Let the wall clock be so many seconds ahead of the machine's, from now on."""
        beside = self._path.with_suffix(".new")
        beside.write_text(f"{seconds:+d}s\n")
        beside.rename(self._path)  # a process that looks meanwhile sees the one or the other

    def environment(self) -> dict[str, str]:
        """Return what a process must be started with."""
        return {
            "LD_PRELOAD": str(library()),
            "FAKETIME_TIMESTAMP_FILE": str(self._path),
            "FAKETIME_NO_CACHE": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_FORCE_MONOTONIC_FIX": "0",
        }


def library() -> Path:
    """Return the shared library that the package ``libfaketime`` brings, without loading it."""
    spec = importlib.util.find_spec("libfaketime")
    assert spec is not None
    assert spec.origin is not None
    (found,) = Path(spec.origin).parent.rglob("libfaketime.so.1")
    return found
