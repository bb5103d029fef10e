"""One line to whoever runs the job."""

from __future__ import annotations

import contextlib
import os
import sys


def tell(text: str) -> None:
    """Write a line to stderr; where the job has closed or lost its stderr, nobody is told."""
    line = f"rankscope: {text}\n"
    with contextlib.suppress(Exception):
        own = sys.__stderr__
        if own is None or sys.stderr is not own:
            sys.stderr.write(line)
            return
        # Past its buffer: what cannot be written, to a log on a full disk, would stay in it,
        # and a process that cannot empty it at its end exits with 120.
        os.write(own.fileno(), line.encode("utf-8", "replace"))
