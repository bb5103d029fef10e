"""A store whose files are damaged (fault C6): reported in plain words, and kept for recovery."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankscope.commands.simulate import simulate_run
from rankscope.simulation import SimulateOptions
from tests.integration.programs import rankscope, serving

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.multiproc

FILL = """
import sys
from rankscope.collector.store.store import open_store
with open_store("chdb://" + sys.argv[1]) as store:
    store.insert_rows("owners", [{"run_id": "first", "at_ns": 1}])
    store.command("SYSTEM STOP MERGES owners")
    store.insert_rows("owners", [{"run_id": "second", "at_ns": 2}])
"""

READ = """
import sys
from rankscope.collector.store.store import read_damage
from rankscope.collector.errors import StoreError
from rankscope.collector.store.store import open_store
try:
    with open_store("chdb://" + sys.argv[1]) as store:
        print([row["run_id"] for row in store.rows("SELECT run_id FROM owners ORDER BY run_id")])
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
    """A store with two parts in table ``owners``."""
    path = tmp_path / "store"
    run(FILL, path)
    return path


def table_files(folder: Path, table: str, pattern: str) -> list[Path]:
    """Return files of a table; the engine names its folder by a uuid."""
    (described,) = folder.rglob(f"{table}.sql")
    uuid = described.read_text().partition("UUID '")[2][:36]
    return sorted((folder / "store" / uuid[:3] / uuid).rglob(pattern))


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_store_that_the_engine_cannot_read_is_left_unchanged(folder: Path) -> None:
    (described,) = folder.rglob("owners.sql")
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
    part = table_files(folder, "owners", "data.bin")[0]
    os.truncate(part, 3)

    for _ in range(2):
        rows, *lines = run(READ, folder).splitlines()
        assert rows in {"['first']", "['second']"}
        (line,) = lines
        assert line.startswith("table owners has lost the rows of 1 damaged parts")
    kept = [path for path in table_files(folder, "owners", "data.bin") if "detached" in path.parts]
    assert [path.stat().st_size for path in kept] == [3]


def test_corrupt_rows_are_an_error(folder: Path) -> None:
    for part in table_files(folder, "owners", "data.bin"):
        part.write_bytes(bytes(byte ^ 0xFF for byte in part.read_bytes()))
    before = files_of(folder)

    answer = run(READ, folder)

    assert answer.startswith(f"StoreDamagedError table owners of the store {folder} has a damaged")
    assert answer.endswith("restore the store from a backup, and check the disk\n")
    assert before <= files_of(folder)


@pytest.mark.slow
def test_a_flipped_bit_is_named_by_every_command_also_through_a_server(tmp_path: Path) -> None:
    store = tmp_path / "store"
    options = SimulateOptions(scenario="healthy", run_id="r", num_ranks=4, num_steps=10)
    simulate_run(replace(options, store_url=f"chdb://{store}"))
    largest = max(table_files(store, "spans", "data.bin"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 4
    largest.write_bytes(content)
    expected = (
        rf"rankscope: table spans of the store {store} has a damaged part at {largest.parent}/"
        r" \(Checksum doesn't match.*\): restore the store from a backup, and check the disk\n"
    )

    def check(*arguments: str) -> None:
        done = rankscope(*arguments, store=store)
        assert (done.returncode, done.stdout) == (1, "")
        assert re.fullmatch(expected, done.stderr), done.stderr

    check("analyze", "r")
    check("export", "r", "--format", "csv", "--out", str(tmp_path / "r.csv"))
    assert rankscope("runs", store=store).returncode == 0
    with serving(store=store):
        check("analyze", "r")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(("r", "."))] == []
