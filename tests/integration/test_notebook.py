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
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
PLOTLY = "application/vnd.plotly.v1+json"


def read_notebook(name: str) -> nbformat.NotebookNode:
    notebook: nbformat.NotebookNode = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    return notebook


def run_notebook(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run all cells; return what they show, as text. The user's store must stay as it is."""
    monkeypatch.setenv("RANKSCOPE_STORE", f"chdb://{folder / 'store-of-the-user'}")
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
    notebook = read_notebook(name)
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute(cwd=os.fspath(folder))
    assert not (folder / "store-of-the-user").exists()
    outputs = [one for cell in notebook.cells for one in cell.get("outputs", [])]
    _check_figures(outputs)
    return "".join(
        one.text if one.output_type == "stream" else one.get("data", {}).get("text/plain", "")
        for one in outputs
    )


def _check_figures(outputs: list[nbformat.NotebookNode]) -> None:
    """Check that each figure is in the page made of the notebook, and requests nothing."""
    shown = [one.data for one in outputs if "data" in one]
    pages = [data["text/html"] for data in shown if PLOTLY in data]
    libraries = [data for data in shown if "plotly.js v" in data.get("text/html", "")]
    assert all("Plotly.newPlot(" in page for page in pages)
    assert not any("src=" in page for page in pages)
    assert len(libraries) == (1 if pages else 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_command_that_fails_is_seen_and_no_output_is_committed(name: str) -> None:
    cells = read_notebook(name).cells
    lines = [line for cell in cells for line in cell.source.splitlines()]

    after = [lines[place + 1] for place, line in enumerate(lines) if line.startswith("!")]

    assert set(after) == {"assert _exit_code == 0"}
    assert not any("2>" in line for line in lines)
    assert all(not cell.outputs for cell in cells if cell.cell_type == "code")


@needs_traces
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # The event loop of jupyter.
def test_it_finds_the_slow_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKSCOPE_TRACE_DIR", str(TRACES.absolute()))

    text = run_notebook("find_the_slow_rank", tmp_path, monkeypatch)

    assert "slowdown S = 1.973" in text
    assert "dp 0, stage 0: that is rank 0" in text
    assert "rank 0 computes 2." in text
    assert "fixing rank 0 saves 23.5 s of each 46.6 s step (50%)" in text
    assert "rank 16 waits most; fixing it saves 0% of the lost time" in text
    assert "M_W = 1.002" in text


SAID = {
    "first_look": ("slow-compute: rank ", "a healthy rank 17 saves 8", "a step is "),
    "what_if": ("fixing rank 5 saves 2", "rank 1 0%, together 10"),
    "mfu": ("if every rank ran like the median", "a rank reaches "),
    "compare_two_runs": ("tuesday against monday: a step is ", "tuesday against tuesday: "),
    "hang": ("rank 9: after wait recv 52, step 6", "\n9    39\n"),
    "slow_link": ("\n4      5.9\n", "a healthy group saves 98% of the lost time"),
    "imported_profile": ("AddmmBackward0", "<run 'profiled': 1 ranks>"),
    "all_runs": ("week-4     slow-link", "<week-4 against week-1: a step is "),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["first_look", *(pytest.param(name, marks=pytest.mark.nightly) for name in [*SAID][1:])]
)
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


def test_a_notebook_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / f"{NAMES[0]}.ipynb").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(BadInputError, match="exists and is not replaced"):
        copy_notebooks(tmp_path)

    assert not (tmp_path / "elsewhere").exists()
