"""The quantity in which a finding is seen, by rank or link and step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.analyze import analyze_run
from tests.support.rankscope.simulated_source import SimulatedSource
from tests.support.trainer.recorded import preset_scenario

if TYPE_CHECKING:
    from rankscope.analysis.report.report import RunReport


def analyze(name: str) -> RunReport:
    return analyze_run(SimulatedSource(preset_scenario(name, num_steps=12)), "simulated")


@pytest.mark.parametrize(
    ("scenario", "quantity", "least_s"),
    [
        ("data-stall", "input and gaps of the host", 0.1),
        ("gc-pause", "garbage collection and gaps of the host", 0.1),
        ("host-stall", "gaps of the host", 0.01),
        ("slow-link", "transfers", 0.01),
    ],
)
def test_the_culprit_has_the_largest_excess_of_the_guilty_quantity(
    scenario: str, quantity: str, least_s: float
) -> None:
    report = analyze(scenario)

    top, evidence = report.top_finding, report.evidence

    assert top.cause == scenario
    assert evidence is not None
    assert evidence.quantity == quantity
    row, column = np.unravel_index(np.nanargmax(evidence.excess_ns), evidence.excess_ns.shape)
    guilty = evidence.links[row] if evidence.links else (evidence.ranks[row],)
    assert set(guilty) & set(top.ranks)
    assert top.steps is not None
    assert top.steps[0] <= evidence.steps[column] <= top.steps[1]
    assert evidence.excess_ns[row, column] > least_s * 1e9
    # Beside a slow link, an alike one that is not slow is not shown as too fast.
    assert np.nanmin(evidence.excess_ns) > -0.3 * np.nanmax(evidence.excess_ns)
    # The proof is the bad gap or transfer itself: about as long as it is too long.
    proof = top.proof
    assert proof is not None
    assert proof.rank in top.ranks
    assert top.steps[0] <= proof.step <= top.steps[1]
    assert proof.excess_ns > least_s * 1e9 / 3
    assert 0 <= proof.begin_ns < proof.end_ns < 2 * proof.excess_ns + proof.begin_ns


def test_slow_compute_is_seen_in_the_compute() -> None:
    report = analyze("slow-compute")

    assert report.evidence is None
    proof = report.top_finding.proof
    assert proof is not None
    assert (proof.rank,) == report.top_finding.ranks
    # The planted factor is 1.5: a third of the span is too long.
    length_ns = proof.end_ns - proof.begin_ns
    assert 0.25 * length_ns < proof.excess_ns < 0.45 * length_ns
