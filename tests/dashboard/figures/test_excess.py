from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rankscope.analysis.report.report import RankStepExcess, Severity, StepTimes
from rankscope.dashboard.figures.excess import excess_figure, excess_note, join_neighbours
from rankscope.tracer.topology import Layout
from tests.support.dashboard.builders import report, traces


def test_cells_hold_milliseconds_by_rank_and_step() -> None:
    made = replace(
        report(),
        step_time_s=StepTimes(actual=0.1, replayed=None, ideal=None),
        excess=RankStepExcess(
            ranks=(3, 9),
            steps=(10, 40),
            excess_ns=np.array([[20e6, -1e6], [np.nan, 0.0]]),
        ),
    )

    cells = traces(excess_figure(made))[0]

    assert list(cells.x) == ["10", "40"]
    assert list(cells.y) == ["3", "9"]
    assert np.array_equal(cells.z, [[20.0, -1.0], [np.nan, 0.0]], equal_nan=True)
    # The 99th percentile of (0, 1, 20), and the same on the other side of neutral.
    assert (cells.zmin, cells.zmax) == pytest.approx((-19.62, 19.62))


@pytest.mark.parametrize(
    ("excess_ns", "unit", "highest"),
    [
        (1e6, "excess (ms)", 100.0),  # noise stays pale: 5 % of the step time
        (26e9, "excess (s)", 26.0),
    ],
)
def test_the_scale_and_its_unit_suit_the_longest_time(
    excess_ns: float, unit: str, highest: float
) -> None:
    made = replace(
        report(),
        step_time_s=StepTimes(actual=2.0, replayed=None, ideal=None),
        excess=RankStepExcess(ranks=(0,), steps=(0,), excess_ns=np.array([[excess_ns]])),
    )

    (cells,) = traces(excess_figure(made))

    assert (cells.zmax, cells.colorbar.title.text) == (pytest.approx(highest), unit)


def test_the_scale_reaches_the_finding_though_its_cells_are_few() -> None:
    # GIVEN 400 ranks of noise, of which one is 70 ms late in 4 of 10 steps: 1 cell of 1,000
    excess_ns = np.full((400, 10), 1e6)
    excess_ns[7, 6:] = 70e6
    culprit = replace(report().top_finding, ranks=(7,), steps=(6, 9), severity=Severity.CRITICAL)
    made = replace(
        report(),
        findings=(culprit,),
        step_time_s=StepTimes(actual=0.3, replayed=None, ideal=None),
        excess=RankStepExcess(ranks=tuple(range(400)), steps=tuple(range(10)), excess_ns=excess_ns),
    )

    assert traces(excess_figure(made))[0].zmax == pytest.approx(70.0)
    # AND that of a link, whose members it has
    links = replace(made.excess, links=tuple((rank, rank + 1) for rank in range(400)))
    culprit = replace(culprit, cause="slow-link", ranks=(7, 8))
    assert traces(excess_figure(replace(made, findings=(culprit,), evidence=links)))[
        0
    ].zmax == pytest.approx(70.0)
    # AND a run without a problem keeps its noise pale
    calm = replace(made, findings=(replace(culprit, severity=Severity.NONE),))
    assert traces(excess_figure(calm))[0].zmax == pytest.approx(15.0)


def test_too_many_ranks_share_rows_and_a_note_says_so() -> None:
    made = report(layout=Layout(pp=8, dp=192, tp=8), slow_rank=777, num_steps=12)

    cells = traces(excess_figure(made))[0]

    assert np.shape(cells.z) == (768, 12)
    assert list(cells.y)[:2] == ["0-15", "16-31"]
    assert np.asarray(cells.z)[48, 11] == pytest.approx(192, rel=0.05)
    assert excess_note(made.excess) == (
        "12,288 ranks in 768 rows. Each cell shows its largest excess."
    )
    assert excess_note(report().excess) == ""


def test_a_report_without_steps_is_an_empty_heat_map() -> None:
    nothing = RankStepExcess(ranks=(), steps=(), excess_ns=np.zeros((0, 0)))

    assert np.size(traces(excess_figure(replace(report(), excess=nothing)))[0].z) == 0


def excess(*rows: list[float]) -> RankStepExcess:
    values = np.array(rows, dtype=np.float64)
    return RankStepExcess(
        ranks=tuple(range(values.shape[0])),
        steps=tuple(10 + column for column in range(values.shape[1])),
        excess_ns=values,
    )


def test_each_rank_and_step_has_a_cell_if_all_fit() -> None:
    blocks = join_neighbours(excess([1.0, 2.0], [3.0, 4.0]), max_rows=2, max_columns=2)

    assert blocks.rank_blocks == ((0, 0), (1, 1))
    assert blocks.step_blocks == ((10, 10), (11, 11))
    assert blocks.excess_ns.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_a_block_has_its_largest_excess_and_is_unknown_if_all_are() -> None:
    nan = float("nan")
    blocks = join_neighbours(
        excess([1.0, nan, 5.0], [9.0, nan, nan], [nan, nan, 2.0]), max_rows=2, max_columns=3
    )

    assert blocks.rank_blocks == ((0, 1), (2, 2))
    assert np.array_equal(blocks.excess_ns, [[9.0, nan, 5.0], [nan, nan, 2.0]], equal_nan=True)
