"""The notebooks, from their first cell to their last."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import nbformat
import pytest
from nbclient import NotebookClient

from rankscope.commands.notebooks import copy_notebooks
from rankscope.errors import BadInputError
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

    assert "slowdown S = 1.973" in text
    assert "dp 0, stage 0: that is rank 0" in text
    assert "rank 0 computes 2." in text
    assert "fixing rank 0 saves 100%" in text
    assert "M_W = 1.002" in text


SAID = {
    "first_look": ("slow-compute: rank ", "of the lost time comes back", "a step takes 1."),
    "what_if": ("fixing rank 5 saves 2", "rank 1 0%, together 10"),
    "mfu": ("if every rank ran like the median", "a rank reaches "),
    "compare_two_runs": ("tuesday against monday: a step takes 1.", "tuesday against tuesday: "),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAID)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # The event loop of jupyter.
def test_a_notebook_over_simulated_runs_needs_no_download(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = run_notebook(name, tmp_path, monkeypatch)

    assert [part for part in SAID[name] if part not in text] == []


def test_the_notebooks_are_copied_and_none_is_replaced(tmp_path: Path) -> None:
    copies = copy_notebooks(tmp_path / "new")

    assert [path.stem for path in copies] == sorted([*SAID, "find_the_slow_rank"])
    assert copies[0].read_bytes() == (FOLDER / copies[0].name).read_bytes()
    with pytest.raises(BadInputError, match="exists and is not replaced: give another folder"):
        copy_notebooks(tmp_path / "new")
