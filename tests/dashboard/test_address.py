from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.drawing.raster import ALL_ROWS, Viewport
from rankscope.analysis.drawing.rows import RowOrder
from rankscope.analysis.drawing.selection import SpanPlace
from rankscope.dashboard.address import (
    COMPARE,
    INCIDENT,
    MAX_MARKED,
    RANK,
    TIMELINE,
    UNKNOWN,
    View,
    read_address,
    read_ranks,
    write_address,
)
from rankscope.tracer.span import SpanKind

NAMES = st.text(st.characters(codec="utf-8"), min_size=1)


@pytest.mark.parametrize(
    ("path", "query", "view"),
    [
        ("", "", View()),
        ("/", "", View()),
        ("/run/AR", "", View(run="AR")),
        ("/run/a%2Fb%20c", "", View(run="a/b c")),
        ("/run/a%2Fb/incident/3", "", View(page=INCIDENT, run="a/b", show="3")),
        ("/run/AR/incident", "", View(page=INCIDENT, run="AR")),
        ("/timeline", "", View(page=TIMELINE)),
        (
            "/timeline",
            "?run=AR&epoch=1&step=12&order=dp&rank=2,5-7",
            View(page=TIMELINE, run="AR", epoch=1, step=12, order=RowOrder.DP, ranks=(2, 5, 6, 7)),
        ),
        ("/rank", "?run=AR&rank=5", View(page=RANK, run="AR", ranks=(5,))),
        ("/compare", "?run=a&with=b", View(page=COMPARE, run="a", with_run="b")),
        ("/rank", "?show=wait&steps=3-7", View(page=RANK, show="wait", steps=(3, 7))),
        (
            "/timeline",
            "?from=5&to=9",
            View(
                page=TIMELINE,
                viewport=Viewport(begin_ns=5, end_ns=9, first_row=0, end_row=ALL_ROWS),
            ),
        ),
        *(
            ("/timeline", query, View(page=TIMELINE))  # an impossible part of a step
            for query in ("?from=9&to=5&rows=0-1", "?from=1&to=5&rows=3-1", "?rows=0-1")
        ),
        *(
            ("/timeline", query, View(page=TIMELINE))  # no span, and no box
            for query in ("?span=3,cheese,5", "?span=x,wait,5", "?span=3,wait", "?box=9-5,0-1")
        ),
        ("/timeline", "?fold=0-2,7", View(page=TIMELINE, folded=(0, 1, 2, 7))),
        ("/rank", "?steps=4", View(page=RANK, steps=(4, 4))),
        ("/rank", "?steps=7-3", View(page=RANK)),
        ("/run", "", View(page=UNKNOWN)),
        ("/elsewhere/x", "", View(page=UNKNOWN)),
    ],
)
def test_an_address_names_a_view(path: str, query: str, view: View) -> None:
    assert read_address(path, query) == view


@pytest.mark.parametrize("step", ["-1", "1.5", "x", "", "9" * 40, "٣"])
def test_a_step_that_is_no_number_is_ignored(step: str) -> None:
    assert read_address("/timeline", f"?step={step}").step is None


def test_an_unknown_grouping_is_the_default() -> None:
    assert read_address("/timeline", "?order=cheese").order is RowOrder.PP


@given(
    run=NAMES,
    epoch=st.none() | st.integers(0, 10**6),
    step=st.none() | st.integers(0, 10**9),
    order=st.sampled_from(RowOrder),
    ranks=st.sets(st.integers(0, 12_287)),
    folded=st.sets(st.integers(0, 300)),
    end_ns=st.none() | st.integers(6, 10**12),
    span=st.none()
    | st.builds(
        SpanPlace,
        rank=st.integers(0, 12_287),
        kind=st.sampled_from(SpanKind),
        at_ns=st.integers(0, 10**14),
    ),
)
def test_every_view_of_the_timeline_has_an_address(
    run: str,
    epoch: int | None,
    step: int | None,
    order: RowOrder,
    ranks: set[int],
    folded: set[int],
    end_ns: int | None,
    span: SpanPlace | None,
) -> None:
    viewport = None
    if end_ns is not None:
        viewport = Viewport(begin_ns=5, end_ns=end_ns, first_row=0, end_row=12_288)
    view = View(
        page=TIMELINE,
        run=run,
        epoch=epoch,
        step=step,
        order=order,
        ranks=tuple(sorted(ranks)),
        folded=tuple(sorted(folded)),
        viewport=viewport,
        span=span,
        box=viewport,
    )

    path, _, query = write_address(view).partition("?")

    assert read_address(path, query) == view


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("5", (5,)),
        ("9,2-4,3", (2, 3, 4, 9)),
        ("x,-1,4-2,7-,1.5,6", (6,)),
        (f"3,0-{MAX_MARKED}", (3,)),
        ("0-999999999999999", ()),
    ],
)
def test_ranks_are_read_as_far_as_they_mean_something(text: str, ranks: tuple[int, ...]) -> None:
    assert read_ranks(text) == ranks


@given(NAMES)
def test_every_run_has_an_address_of_its_own(run: str) -> None:
    view = View(run=run)

    address = write_address(view, base_path="/deep/")

    assert address.startswith("/deep/run/")
    assert address.count("/") == 3
    assert read_address(address.removeprefix("/deep/"), "") == view
