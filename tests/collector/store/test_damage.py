"""A store whose files are damaged (fault C6): reported in plain words, and kept for recovery."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.integration.programs import rankscope

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.multiproc

FILL = """
import sys
from rankscope.collector.store.store import open_store
with open_store("chdb://" + sys.argv[1]) as store:
    store.insert_rows("clock", [{"host": "first", "at_ns": 1}])
    store.command("SYSTEM STOP MERGES clock")
    store.insert_rows("clock", [{"host": "second", "at_ns": 2}])
"""

READ = """
import sys
from rankscope.collector.store.store import read_damage
from rankscope.collector.errors import StoreError
from rankscope.collector.store.store import open_store
try:
    with open_store("chdb://" + sys.argv[1]) as store:
        print([row["host"] for row in store.rows("SELECT host FROM clock ORDER BY host")])
        print(*read_damage(store), sep="\\n")
except StoreError as error:
    print(type(error).__name__, error)
"""


def run(program: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with two parts in table ``clock``."""
    path = tmp_path / "store"
    run(FILL, path)
    return path


def clock_files(folder: Path, pattern: str) -> list[Path]:
    """Return files of table ``clock``; the engine names its folder by a uuid."""
    (described,) = folder.rglob("clock.sql")
    uuid = described.read_text().partition("UUID '")[2][:36]
    return sorted((folder / "store" / uuid[:3] / uuid).rglob(pattern))


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_store_that_the_engine_cannot_read_is_left_unchanged(folder: Path) -> None:
    (described,) = folder.rglob("clock.sql")
    described.write_text("garbage")
    before = files_of(folder)

    done = rankscope("runs", store=folder)

    assert (done.returncode, done.stdout) == (2, "")
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"rankscope: cannot open the store at {folder}: ")
    assert "keep the folder for recovery, and pass another --store" in line
    assert before <= files_of(folder)


def test_a_damaged_part_is_kept_and_reported(folder: Path) -> None:
    assert run(READ, folder) == "['first', 'second']\n\n"
    part = clock_files(folder, "data.bin")[0]
    os.truncate(part, 3)

    for _ in range(2):
        rows, *lines = run(READ, folder).splitlines()
        assert rows in {"['first']", "['second']"}
        (line,) = lines
        assert line.startswith("table clock has lost the rows of 1 damaged parts")
    kept = [path for path in clock_files(folder, "data.bin") if "detached" in path.parts]
    assert [path.stat().st_size for path in kept] == [3]


def test_corrupt_rows_are_an_error(folder: Path) -> None:
    for part in clock_files(folder, "data.bin"):
        part.write_bytes(bytes(byte ^ 0xFF for byte in part.read_bytes()))
    before = files_of(folder)

    assert run(READ, folder).startswith("StoreQueryError Code: ")
    assert before <= files_of(folder)
