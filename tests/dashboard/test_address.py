from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.drawing.rows import GroupBy
from rankscope.dashboard.address import TIMELINE, UNKNOWN, View, read_address, write_address

NAMES = st.text(st.characters(codec="utf-8"), min_size=1)


@pytest.mark.parametrize(
    ("path", "query", "view"),
    [
        ("", "", View()),
        ("/", "", View()),
        ("/run/AR", "", View(run="AR")),
        ("/run/a%2Fb%20c", "", View(run="a/b c")),
        ("/timeline", "", View(page=TIMELINE)),
        (
            "/timeline",
            "?run=AR&epoch=1&step=12&group=dp",
            View(page=TIMELINE, run="AR", epoch=1, step=12, group_by=GroupBy.DP),
        ),
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
    assert read_address("/timeline", "?group=cheese").group_by is GroupBy.PP


@given(
    run=NAMES,
    epoch=st.none() | st.integers(0, 10**6),
    step=st.none() | st.integers(0, 10**9),
    group_by=st.sampled_from(GroupBy),
)
def test_every_view_of_the_timeline_has_an_address(
    run: str, epoch: int | None, step: int | None, group_by: GroupBy
) -> None:
    view = View(page=TIMELINE, run=run, epoch=epoch, step=step, group_by=group_by)

    path, _, query = write_address(view, base_path="/").partition("?")

    assert read_address(path, query) == view


@given(NAMES)
def test_every_run_has_an_address_of_its_own(run: str) -> None:
    view = View(run=run)

    address = write_address(view, base_path="/deep/")

    assert address.startswith("/deep/run/")
    assert address.count("/") == 3
    assert read_address(address.removeprefix("/deep/"), "") == view
