from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankscope.commands.compare import (
    check_regression,
    compare_stored,
    format_comparison,
    parse_percent,
)
from rankscope.commands.simulate import simulate_run
from rankscope.errors import BadInputError, FailedError
from rankscope.simulation import SimulateOptions

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.dashboard.records.page_results import RunComparison

ALL = (None, None)


@pytest.mark.slow
def test_two_ranges_of_steps_differ_by_a_finding_and_two_runs_by_a_setting(tmp_path: Path) -> None:
    # GIVEN a run with a slow rank from step 4 on, and a run with another rank of another setting
    url = f"chdb://{tmp_path}/store"
    options = SimulateOptions(scenario="healthy", run_id="a", num_steps=8, dp=8, pp=1, tp=1)
    slow = ("slow-compute:rank=5,factor=1.5,steps=4-7",)
    simulate_run(replace(options, faults=slow, store_url=url))
    simulate_run(replace(options, run_id="b", pp=2, store_url=url))

    ranges = compare_stored(("a", "a"), ((None, 3), (4, None)), store_url=url)
    text = format_comparison(ranges, as_json=False)
    runs = compare_stored(("a", "b"), (ALL, ALL), store_url=url)
    document = json.loads(format_comparison(runs, as_json=True))

    sentence, settings, numbers, findings = text.split("\n\n")
    assert re.match(r"steps 4-7 against steps 0-3: a step is \d+ % slower", sentence)
    assert "noise unknown" in " ".join(sentence.split())
    assert settings == "no setting differs"
    assert numbers.splitlines()[0].split() == ["steps", "0-3", "steps", "4-7", "change"]
    assert findings.splitlines()[1].split()[:4] == ["new", "slow-compute", "critical", "5"]
    assert len(findings.splitlines()) == 2  # "healthy" is no finding that could be gone
    changed = {"setting": "layout.pp", "first": "1", "second": "2"}
    assert changed in document["settings"]
    (gone,) = document["disappeared"]
    assert (gone["cause"], gone["ranks"], gone["severity"]) == ("slow-compute", [5], "critical")
    assert not {"card", "proof"} & gone.keys(), "a picture is nothing for a script"


@pytest.mark.slow
def test_a_regression_fails_a_build_and_an_improvement_or_noise_does_not(tmp_path: Path) -> None:
    url = f"chdb://{tmp_path}/store"
    options = SimulateOptions(scenario="healthy", run_id="a", num_steps=12, dp=4, pp=1, tp=1)
    slow = ("slow-compute:rank=2,factor=1.5",)
    simulate_run(replace(options, store_url=url))
    simulate_run(replace(options, run_id="again", seed=5, store_url=url))
    simulate_run(replace(options, run_id="slow", faults=slow, store_url=url))

    def compared(first: str, second: str, steps: int | None = None) -> RunComparison:
        return compare_stored((first, second), ((None, steps), ALL), store_url=url)

    check_regression(compared("slow", "a"), 0.05)
    check_regression(compared("a", "again"), 0)
    slower = compared("a", "slow")
    check_regression(slower, 4)
    with pytest.raises(FailedError, match=r"a step of slow is \d+ % slower than one of a, more"):
        check_regression(slower, 0.05)
    with pytest.raises(BadInputError, match="unknown whether slow is slower than a"):
        check_regression(compared("a", "slow", steps=3), 0.05)


@pytest.mark.parametrize(("text", "ratio"), [("5%", 0.05), ("2.5 %", 0.025), ("0", 0.0)])
def test_a_percentage_is_read(text: str, ratio: float) -> None:
    assert parse_percent(text) == pytest.approx(ratio)


@pytest.mark.parametrize("text", ["", "%", "x", "-1%", "nan", "inf%"])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(BadInputError, match="is no percentage: give 5%"):
        parse_percent(text)
