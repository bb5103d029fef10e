"""Entry points for notebooks and scripts. Importing the package loads nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.analysis.readers.bytedance.what_if import TraceWhatIf

    from .run import Run

__all__ = ["open_run", "what_if_file"]


def open_run(run_id: str, *, store: str | None = None) -> Run:
    """Open a stored run for reading: ``open_run("AR").verdict``; see `rankscope.run.open_run`."""
    from . import run

    return run.open_run(run_id, store=store)


def what_if_file(trace: Path, meta: Path) -> TraceWhatIf:
    """Return the slowdowns of a trace file without storing it.

    See `rankscope.sources.bytedance_file.what_if_file`.
    """
    from .sources import bytedance_file

    return bytedance_file.what_if_file(trace, meta)
