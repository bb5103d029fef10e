"""Nothing of the tracer is in what a traced job saves, copies or compiles."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.paths import ROOT
from tests.support.tracer.reading import dropped, read_spans
from tests.tracer.programs import run_python

if TYPE_CHECKING:
    from pathlib import Path

    Outcomes = dict[str, Any]

pytestmark = [pytest.mark.slow, pytest.mark.multiproc]

JOB = ROOT / "tests" / "tracer" / "jobs" / "saving_job.py"

LAUNCHED, INSTALLED = "by the launcher", "by the script"


def run_job(folder: Path, *options: str | Path, **environ: str) -> Any:  # noqa: ANN401  # JSON
    """Run the job in a folder; return what it printed."""
    folder.mkdir(exist_ok=True)
    variables = {"RANKSCOPE_TRACE": str(folder.parent / "spool"), "RANKSCOPE_RUN": folder.name}
    ran = run_python(*options, cwd=folder, **variables, **environ)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the spool and of each job's files."""
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def untraced(folder: Path) -> Outcomes:
    """Return the outcomes of the job without a tracer."""
    files = folder / "untraced"
    outcomes: Outcomes = run_job(files, JOB, "save", files)
    return outcomes


@pytest.fixture(
    scope="module", params=[LAUNCHED, pytest.param(INSTALLED, marks=pytest.mark.nightly)]
)
def traced(folder: Path, request: pytest.FixtureRequest) -> tuple[Path, Outcomes]:
    """Return the folder and the outcomes of the traced job."""
    if request.param == LAUNCHED:
        files = folder / "launched"
        return files, run_job(files, "-m", "rankscope.tracer", JOB, "save", files)
    files = folder / "installed"
    return files, run_job(files, JOB, "save", files, INSTALLS="1")


def test_each_way_to_save_copy_or_compile_has_the_outcome_of_an_untraced_job(
    untraced: Outcomes, traced: tuple[Path, Outcomes]
) -> None:
    assert len(untraced) > 30
    for name, outcome in untraced.items():
        assert traced[1][name] == outcome, name


def test_the_untraced_job_can_do_all_of_it(untraced: Outcomes) -> None:
    assert [name for name, it in untraced.items() if "Error" in str(it)[:20]] == []
    assert untraced["fsdp"][1][0] == "AssertionError"  # FSDP2 refuses a deep copy
    assert untraced["save_model"][1] == 0  # hooks of a loaded copy


def test_every_file_loads_without_rankscope(
    folder: Path, untraced: Outcomes, traced: tuple[Path, Outcomes]
) -> None:
    before, after = run_job(folder / "loading", JOB, "load", folder / "untraced", traced[0])

    assert len(before) > 15
    assert after == before


def test_the_job_was_traced_meanwhile_without_an_error(
    folder: Path, traced: tuple[Path, Outcomes]
) -> None:
    (process,) = (folder / "spool" / traced[0].name).iterdir()
    kinds = {row.kind for row in read_spans(process)}

    assert dropped(process) == {}
    assert {"forward", "backward", "optimizer", "data", "checkpoint"} <= kinds
