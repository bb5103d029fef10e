from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankscope.commands.compare import compare_stored
from rankscope.commands.simulate import simulate_run
from rankscope.simulation import SimulateOptions

if TYPE_CHECKING:
    from pathlib import Path

ALL = (None, None)


@pytest.mark.slow
def test_two_ranges_of_steps_differ_by_a_finding_and_two_runs_by_a_setting(tmp_path: Path) -> None:
    # GIVEN a run with a slow rank from step 4 on, and a run with another rank of another setting
    url = f"chdb://{tmp_path}/store"
    options = SimulateOptions(scenario="healthy", run_id="a", num_steps=8, dp=8, pp=1, tp=1)
    slow = ("slow-compute:rank=5,factor=1.5,steps=4-7",)
    simulate_run(replace(options, faults=slow, store_url=url))
    simulate_run(replace(options, run_id="b", pp=2, store_url=url))

    text = compare_stored(("a", "a"), ((None, 3), (4, None)), as_json=False, store_url=url)
    document = json.loads(compare_stored(("a", "b"), (ALL, ALL), as_json=True, store_url=url))

    sentence, settings, numbers, findings = text.split("\n\n")
    assert sentence.startswith("steps 4-7 against steps 0-3: a step takes 1.")
    assert settings == "no setting differs"
    assert numbers.splitlines()[0].split() == ["steps", "0-3", "steps", "4-7", "change"]
    assert findings.splitlines()[1].split()[:4] == ["new", "slow-compute", "critical", "5"]
    assert len(findings.splitlines()) == 2  # "healthy" is no finding that could be gone
    changed = {"setting": "layout.pp", "first": "1", "second": "2"}
    assert changed in document["settings"]
    assert [each["cause"] for each in document["disappeared"]] == ["slow-compute"]
