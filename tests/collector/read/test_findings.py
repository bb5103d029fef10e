from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.read.findings import StoredFinding, read_findings, write_findings
from rankscope.collector.store.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

SLOW = StoredFinding(
    run_id="r",
    number=0,
    epoch=1,
    cause="slow-compute",
    ranks=(5, 7),
    onset_step=10,
    last_step=29,
    checked_step=29,
    slowdown=1.8,
    recoverable_ratio=0.9,
    confidence=0.95,
    evidence="ranks 5 and 7 take 1.8 times",
    opened_ns=1_000,
    updated_ns=1_000,
    closed_ns=None,
)
CRASH = replace(
    SLOW,
    number=1,
    cause="crash",
    onset_step=None,
    last_step=None,
    slowdown=None,
    recoverable_ratio=None,
    opened_ns=2_000,
)


@pytest.mark.slow
def test_a_finding_is_replaced_by_its_newer_state_and_survives_a_restart(tmp_path: Path) -> None:
    closed = replace(SLOW, last_step=33, checked_step=37, updated_ns=3_000, closed_ns=3_000)
    with open_store(f"chdb://{tmp_path}") as store:
        write_findings(store, [SLOW])
        write_findings(store, [CRASH])
        write_findings(store, [closed])
        write_findings(store, [])
    with open_store(f"chdb://{tmp_path}") as store:
        assert read_findings(store, "r") == (closed, CRASH)
        assert read_findings(store, "another") == ()


def test_of_all_runs_the_newest_finding_comes_first(tmp_path: Path) -> None:
    elsewhere = replace(SLOW, run_id="q", opened_ns=1_500)
    with open_store(f"chdb://{tmp_path}") as store:
        write_findings(store, [SLOW, CRASH, elsewhere])

        assert read_findings(store) == (CRASH, elsewhere, SLOW)
