from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rankscope.analysis.report.report import RankStepExcess
from rankscope.dashboard.figures.workers import worker_figure, worker_title
from rankscope.tracer.topology import Layout
from tests.support.dashboard.builders import report, traces


def test_columns_are_dp_positions_and_rows_are_stages() -> None:
    made = replace(
        report(),
        exact_slowdown_by_worker={
            (0, 0): 1.0,
            (1, 0): 1.5,
            (2, 0): 1.1,
            (0, 1): 1.0,
            (2, 1): None,
        },
        slowdown_by_worker={(1, 0): 1.25},
    )

    cells = traces(worker_figure(made))[0]

    assert list(cells.x) == ["0", "1", "2"]
    assert list(cells.y) == ["0", "1"]
    nan = float("nan")
    assert np.array_equal(cells.z, [[1.0, 1.5, 1.1], [1.0, nan, nan]], equal_nan=True)
    assert cells.customdata[0][1] == "1.25x"
    assert cells.text[0][1] == "1.50x"


def test_the_scale_is_neutral_at_one_and_wide_enough_for_noise() -> None:
    noisy = replace(report(), exact_slowdown_by_worker={(0, 0): 1.01, (1, 0): 0.99})
    slow = replace(report(), exact_slowdown_by_worker={(0, 0): 1.4, (1, 0): 1.0})

    pale, strong = traces(worker_figure(noisy))[0], traces(worker_figure(slow))[0]

    assert (pale.zmin, pale.zmax) == pytest.approx((0.9, 1.1))
    assert (strong.zmin, strong.zmax) == pytest.approx((0.6, 1.4))
    # AND there is nothing to draw without workers
    empty = replace(report(), slowdown_by_worker={}, exact_slowdown_by_worker={})
    assert np.size(traces(worker_figure(empty))[0].z) == 0


def test_of_a_slow_link_the_transfers_are_drawn_and_no_worker() -> None:
    evidence = RankStepExcess(
        quantity="transfers",
        baseline="alike links",
        ranks=(0, 1),
        links=((3, 7), tuple(range(0, 32, 2))),
        steps=(4, 5),
        excess_ns=np.array([[20e6, float("nan")], [1e6, 3e6]]),
    )

    (bars,) = traces(worker_figure(replace(report(), evidence=evidence)))

    assert list(bars.y) == ["3 → 7", "0, 2 … 30 (16)"]
    assert list(bars.x) == [20.0, 2.0]


def test_of_more_positions_than_fit_neighbours_share_a_cell_with_the_slowest() -> None:
    slowdowns = dict.fromkeys(((dp, stage) for dp in range(192) for stage in range(2)), 1.0)
    slow = replace(
        report(),
        exact_slowdown_by_worker={**slowdowns, (100, 1): 1.3, (101, 1): None},
        slowdown_by_worker={(100, 1): 1.2},
    )

    cells = traces(worker_figure(slow))[0]

    assert np.shape(cells.z) == (2, 64)
    assert cells.text is None
    assert cells.x[33] == "99-101"
    assert cells.z[1][33] == 1.3
    assert cells.customdata[1][33] == "1.20x"
    assert np.count_nonzero(np.asarray(cells.z) > 1) == 1
    assert worker_title(slow)[1].endswith(
        " 192 DP positions in 64 columns: each cell shows its slowest."
    )


def test_each_rank_of_an_unknown_layout_is_a_column() -> None:
    made = replace(
        report(),
        layout=Layout(),
        world_size=4,
        exact_slowdown_by_worker={(dp, 0): 1.0 for dp in range(4)},
    )

    figure = worker_figure(made)

    assert "rank %{x}" in traces(figure)[0].hovertemplate
    assert figure.layout.xaxis.title.text == "rank (parallel layout unknown)"
    assert figure.layout.yaxis.title.text is None
    assert not figure.layout.yaxis.showticklabels
