"""Odd values in descriptions and records: each harms its own run only, before and after a restart.

A choice of the values; `make edges` tries all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faults.edge_values import QUICK, QUICK_STORED
from tests.faults.odd_runs import try_sent, try_stored

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.nightly]


def test_odd_values_that_are_sent_harm_no_other_run(tmp_path: Path) -> None:
    path = try_sent(tmp_path / "path", QUICK)

    assert path.problems == []


def test_odd_values_that_are_stored_harm_no_other_run(tmp_path: Path) -> None:
    path = try_stored(tmp_path / "path", QUICK_STORED)

    assert path.problems == []
