"""Fuzzing with some hundred inputs; `make fuzz` runs for minutes, guided by coverage."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.spool.tail import SpoolTail
from tests.faults.fuzzing import ProcessFolder, mutated_file
from tests.support.collector.kept_cuts import KeptCuts
from tests.support.collector.spool_builder import SpoolBuilder

if TYPE_CHECKING:
    from pathlib import Path

NUM_MUTANTS = 60
"""Inputs per seed."""


@pytest.mark.slow
def test_any_file_of_a_process_leaves_agent_and_collector_running(tmp_path: Path) -> None:
    chooser = random.Random(11)
    folder = ProcessFolder(tmp_path)
    found: Counter[int] = Counter()

    for seed in folder.seeds():
        assert folder.try_file(seed) == 3
        found.update(folder.try_file(mutated_file(seed, chooser)) for _ in range(NUM_MUTANTS))

    assert set(found) >= {0, 3}, found


@pytest.mark.parametrize("run_id", ["", "two words", "-", "../up", "naïve"])
def test_a_folder_with_an_invalid_run_is_reported_and_left_unchanged(
    tmp_path: Path, run_id: str
) -> None:
    strange = SpoolBuilder(tmp_path / "strange", run_id="run")
    strange.rename(run_id)
    strange.span("kept")
    strange.end()
    other = SpoolBuilder(tmp_path / "strange", run_id="run", rank=1)
    other.span("fine")
    other.end()
    sink = KeptCuts()
    tail = SpoolTail(tmp_path / "strange", sink)

    problems = tail.poll().problems + tail.poll().problems

    assert [cut.key.rank for cut in sink.cuts] == [1]
    (line,) = problems
    assert str(strange.folder) in line
    assert "left unchanged" in line
    assert repr(run_id) in line
    assert strange.segment.exists()
