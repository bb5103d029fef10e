"""`rankscope doctor`: problems of the installation, the store and the spool."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.store.store import open_store
from rankscope.commands.doctor import KNOWN_VARIABLES, State, run_checks
from rankscope.job.spool_place import file_system
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path


def problems(store: Path, **environment: str) -> list[str]:
    """Return the problems that do not depend on this machine: its disk, its C compiler."""
    checks = run_checks(store_url=f"chdb://{store}", environment=environment)
    return [
        f"{check.state} {check.name}: {check.text}"
        for check in checks
        if check.state is not State.OK
        and check.name in {"environment", "store", "spool"}
        and " are free at " not in check.text
    ]


def test_the_variables_are_those_that_the_sources_read() -> None:
    folders = [ROOT / name for name in ("src", "tracer", "collector", "analysis", "trainer")]
    files = {path.resolve() for folder in folders for path in folder.rglob("*.py")}
    found = {
        name
        for path in files
        if path.name != "doctor.py"
        for name in re.findall(r"\bRANKSCOPE_[A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8"))
    }
    assert found | {"RANKSCOPE_TRACE_DIR"} == KNOWN_VARIABLES


def test_a_mistyped_variable_and_a_disabled_tracer_are_named(tmp_path: Path) -> None:
    assert problems(tmp_path / "none") == []

    found = problems(tmp_path / "none", RANKSCOPE_TRACES="/x", RANKSCOPE_DISABLE="1", HOME="/root")

    assert found == [
        "warning environment: RANKSCOPE_DISABLE=1: no job of this environment is traced. Unset it",
        "warning environment: nothing reads RANKSCOPE_TRACES: check the spelling (docs/tracer.md)",
    ]
    assert not (tmp_path / "none").exists()


def test_a_spool_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    (found,) = problems(tmp_path / "none", RANKSCOPE_TRACE=str(tmp_path / "file"))

    assert found.startswith("error spool: RANKSCOPE_TRACE=")
    assert found.endswith("is no folder, so nothing is traced: give a folder")


def test_the_file_system_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    shared = tmp_path / "a b"
    (shared / "deep").mkdir(parents=True)
    mounts = tmp_path / "mounts"
    point = str(shared).replace(" ", r"\040")
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/x {point} nfs4 rw 0 0\n")

    assert file_system(shared / "deep", mounts) == "nfs4"
    assert file_system(tmp_path, mounts) == "ext4"
    assert file_system(tmp_path, tmp_path / "missing") == ""


@pytest.mark.slow
def test_a_store_is_opened_and_one_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    with open_store(f"chdb://{tmp_path}/store"):
        pass
    assert problems(tmp_path / "store") == []

    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "mine.txt").write_text("no store")
    (found,) = problems(tmp_path / "broken")
    assert found.startswith("error store: ")
