from __future__ import annotations

import numpy as np

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.causes.host_gaps import find_common_pauses
from rankscope.analysis.replay.model import Place
from rankscope.tracer.span import NONE
from tests.analysis.replay.test_cycles import FORWARD, source_of
from tests.support.analysis.gap_builders import gaps_with


def test_a_job_in_which_one_rank_computes_in_one_step_is_analysed() -> None:
    # GIVEN three ranks, three steps, and a single forward
    source = source_of([(0, 0, FORWARD, 1, 1, 0, NONE)], num_ranks=3, num_steps=3, end_ns=100)

    report = analyze_run(source, source.info.run_id)

    assert [finding.cause for finding in report.findings] == ["insufficient-evidence"]


def test_a_common_pause_covers_only_its_own_place_in_the_step() -> None:
    # GIVEN 300 ms after the compute of step 3, and 4 ms before a forward in all steps
    gaps = gaps_with(
        [(3, rank, Place.OTHER, 300) for rank in range(4)]
        + [(step, rank, Place.FORWARD, 4) for step in range(12) for rank in range(4)],
        stage=[0] * 4,
        num_steps=12,
    )

    pauses = find_common_pauses(gaps)

    assert np.flatnonzero(~pauses.other_steps).tolist() == [3]
    assert np.argwhere(pauses.places).tolist() == [[Place.OTHER, 3]]
    assert pauses.covers_gap.sum() == 4
