"""Faults that are planted by name are found, by their own cause or by what they make slow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.demo.plan import QUIET
from rankscope.trainer.faults.spec import parse_simulated_faults
from tests.support.rankscope.simulated_source import SimulatedSource
from tests.support.trainer.recorded import preset_scenario

RANK = 9

FOUND = {
    "recompile": "recompile",
    "evaluation": "evaluation",
    "cpu-hog": "host-stall",
    "memory-hog": "data-stall",
    "mismatch": "hang",
}
"""Causes of findings by named scenario. A processor's load shows in the gaps between launches, that
of memory in the loader, because devices have a memory of their own."""

SPECIAL = {
    f"network-jitter:src={RANK},dst=11,factor=10,steps=8-23": "slow-link",
    f"throttle-ramp:rank={RANK},factor=1.5,steps=8-23": "clock-throttle",
    f"slow-loader-worker:rank={RANK},ms=250,steps=8-23": "data-stall",
}


@pytest.mark.parametrize(("name", "cause"), FOUND.items())
def test_a_named_scenario_is_found(name: str, cause: str) -> None:
    source = SimulatedSource(preset_scenario(name))
    (label,) = source.labels

    report = analyze_run(source, "simulated")

    (finding,) = (found for found in report.findings if set(found.ranks) == set(label.ranks))
    alarms = {found.cause for found in report.findings if found.severity == "critical"}
    assert (label.cause, finding.cause) == (cause, cause)
    assert alarms <= {cause}
    assert (cause in QUIET) == (name == "evaluation")


@pytest.mark.parametrize(("spec", "cause"), SPECIAL.items())
def test_a_special_form_is_found(spec: str, cause: str) -> None:
    scenario = replace(preset_scenario("healthy"), faults=parse_simulated_faults([spec]))
    source = SimulatedSource(scenario)

    report = analyze_run(source, "simulated")

    finding = report.top_finding
    assert finding.cause == cause
    assert RANK in finding.ranks
    assert finding.steps is not None
    assert 8 <= finding.steps[0] <= 14
