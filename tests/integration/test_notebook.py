"""The notebook, from its first cell to its last."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.paths import ROOT
from tests.support.traces import TRACES, needs_traces

if TYPE_CHECKING:
    from pathlib import Path

NOTEBOOK = ROOT / "notebooks" / "find_the_slow_rank.ipynb"


def read_notebook() -> nbformat.NotebookNode:
    notebook: nbformat.NotebookNode = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    return notebook


def test_it_is_committed_without_outputs() -> None:
    notebook = read_notebook()

    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code")


@needs_traces
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # The event loop of jupyter.
def test_it_finds_the_slow_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKSCOPE_STORE", f"chdb://{tmp_path / 'store'}")
    monkeypatch.setenv("RANKSCOPE_TRACE_DIR", str(TRACES.absolute()))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    notebook = read_notebook()

    NotebookClient(notebook, timeout=120, kernel_name="python3").execute(cwd=os.fspath(tmp_path))

    printed = [
        output.text
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "stream"
    ]
    text = "".join(printed)
    assert "117,216 spans of 16 traced ranks, 44 steps" in text
    assert "slowdown S = 1.973" in text
    assert "dp 0, stage 0: that is rank 0" in text
    assert "rank 0 computes 2." in text
    assert "M_W = 1.002" in text
