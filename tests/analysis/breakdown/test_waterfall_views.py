"""The waterfall of a report in seconds and MFU points, by step and by position."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rankscope.analysis.breakdown.waterfall import Part
from rankscope.analysis.breakdown.waterfall_views import WaterfallBy, list_rows, split_step
from rankscope.analysis.report.report import Mfu
from tests.support.dashboard.analysed import SLOW_RANK, analysed_report

MFU = Mfu(convention="", mean=0.9, by_step=dict.fromkeys(range(8), 0.3))


def test_the_parts_sum_to_the_step_and_cost_mfu_points_by_their_share() -> None:
    report = replace(analysed_report(), mfu=MFU)
    actual_s = report.step_time_s.actual
    assert actual_s is not None

    parts = {one.part: one for one in split_step(report)}

    assert sum(one.seconds for one in parts.values()) == pytest.approx(actual_s, rel=0.02)
    assert sum(one.ratio for one in parts.values()) == pytest.approx(1.0)
    useful, waiting = parts[Part.USEFUL_COMPUTE], parts[Part.WAITING]
    # THEN the MFU of these steps, not of the whole run, is that of useful compute
    assert useful.mfu_ratio == pytest.approx(0.3)
    assert waiting.mfu_ratio == pytest.approx(0.3 * waiting.ratio / useful.ratio)


def test_points_are_unknown_unless_each_step_has_its_mfu() -> None:
    few = replace(MFU, by_step={0: 0.3})
    for mfu in (None, few):
        assert {one.mfu_ratio for one in split_step(replace(analysed_report(), mfu=mfu))} == {None}


def test_rows_by_step_stage_and_rank_have_the_time_of_a_mean_step() -> None:
    report = analysed_report()
    whole = sum(one.seconds for one in split_step(report))
    waiting = [Part(name) for name in report.waterfall.parts].index(Part.WAITING)  # type: ignore[union-attr]

    by_step, by_stage, by_rank = (
        list_rows(report, by) for by in (WaterfallBy.STEP, WaterfallBy.STAGE, WaterfallBy.RANK)
    )

    assert by_step is not None
    assert by_stage is not None
    assert by_rank is not None
    assert (by_step.numbers, by_stage.numbers, by_rank.numbers) == (
        tuple(range(8)),
        (0, 1),
        tuple(range(8)),
    )
    for rows in (by_step, by_stage, by_rank):
        assert rows.seconds.sum(axis=1).mean() == pytest.approx(whole)
    # AND the slow rank waits least
    assert int(np.argmin(by_rank.seconds[:, waiting])) == SLOW_RANK
    # AND an axis of one position is the whole run
    assert list_rows(report, WaterfallBy.CP) is None
