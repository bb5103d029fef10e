"""The command and the notebook entry: parses, wires the packages together, prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.analysis.readers.bytedance.what_if import TraceWhatIf

    from .run import Run

__all__ = ["open_run", "what_if_file"]


def open_run(run_id: str, *, store: str | None = None) -> Run:
    """Open a stored run for reading: ``open_run("AR").verdict``.

    What it needs is loaded here and not with the package. See `rankscope.run.open_run`.
    """
    from . import run

    return run.open_run(run_id, store=store)


def what_if_file(trace: Path, meta: Path) -> TraceWhatIf:
    """Replay a trace file in the ByteDance format every way that the paper names, past the store.

    See `rankscope.sources.bytedance_file.what_if_file`.
    """
    from .sources import bytedance_file as trace_file

    return trace_file.what_if_file(trace, meta)
