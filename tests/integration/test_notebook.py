"""The notebooks, from their first cell to their last."""

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

FOLDER = ROOT / "notebooks"


def read_notebook(name: str) -> nbformat.NotebookNode:
    notebook: nbformat.NotebookNode = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    return notebook


def run_notebook(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run all cells with a store of their own; return what they show, as text."""
    monkeypatch.setenv("RANKSCOPE_STORE", f"chdb://{folder / 'store'}")
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
    notebook = read_notebook(name)
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute(cwd=os.fspath(folder))
    outputs = [one for cell in notebook.cells for one in cell.get("outputs", [])]
    return "".join(
        one.text if one.output_type == "stream" else one.get("data", {}).get("text/plain", "")
        for one in outputs
    )


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.ipynb")))
def test_it_is_committed_without_outputs(name: str) -> None:
    notebook = read_notebook(name)

    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code")


@needs_traces
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # The event loop of jupyter.
def test_it_finds_the_slow_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKSCOPE_TRACE_DIR", str(TRACES.absolute()))

    text = run_notebook("find_the_slow_rank", tmp_path, monkeypatch)

    assert "117,216 spans of 16 traced ranks, 44 steps" in text
    assert "slowdown S = 1.973" in text
    assert "dp 0, stage 0: that is rank 0" in text
    assert "rank 0 computes 2." in text
    assert "M_W = 1.002" in text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # The event loop of jupyter.
def test_the_first_look_needs_no_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = run_notebook("first_look", tmp_path, monkeypatch)

    assert "slow-compute: rank " in text
    assert "of the lost time comes back" in text
    assert "first-look against before: a step takes 1." in text
