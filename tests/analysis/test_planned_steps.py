from __future__ import annotations

import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.trainer.faults.spec import parse_simulated_faults
from rankscope.trainer.simulator.scenario import Scenario
from tests.support.rankscope.simulated_source import SimulatedSource


@pytest.mark.parametrize(
    ("fault", "planned"),
    [
        ("checkpoint:every=6,ms=900", (5, 11, 17)),
        ("checkpoint:every=1,steps=12-14,ms=900", (12, 13, 14)),
        ("slow-compute:rank=1,factor=1.5,steps=8-19", ()),
    ],
)
def test_planned_pauses_are_named_by_step(fault: str, planned: tuple[int, ...]) -> None:
    faults = parse_simulated_faults([fault])

    report = analyze_run(SimulatedSource(Scenario(num_steps=20, faults=faults)), "simulated")

    assert report.planned_steps == planned
