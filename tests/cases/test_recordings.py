"""Recordings of a job on a GPU, with what the job itself printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cases.reports import analyze_recording

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


def test_a_slow_rank_is_named_from_the_step_on_in_which_it_became_slow(tmp_path: Path) -> None:
    report = analyze_recording(tmp_path, "ddp-slow")

    top = report.findings[0]
    assert (top.cause, top.ranks) == ("slow-compute", (1,))
    assert top.steps is not None
    assert top.steps[0] == 15
