"""Sections of the page Health about host checks, from the rows of a store."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.read.findings import write_findings
from rankscope.collector.read.host_checks import TABLE, check_row
from rankscope.collector.read.hosts import HostChange, HostMark, write_host_changes
from rankscope.collector.store.store import open_store
from rankscope.server.host_check_sections import host_check_parts
from tests.collector.read.test_host_checks import CHECK, FINDING, NOW_NS

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


def test_health_has_deviations_offenders_and_confirmed_findings(tmp_path: Path) -> None:
    now_ns = NOW_NS + 60 * 10**9
    healthy = replace(CHECK, host="gpu08", state="healthy", part="", reason="none")
    again = replace(CHECK, at_ns=NOW_NS - 10**9, run_id="earlier")
    with open_store(f"chdb://{tmp_path}/store") as store:
        assert [section.rows for section, _ in host_check_parts(store, now_ns)] == [()] * 4
        store.insert_rows(TABLE, [check_row(check) for check in (CHECK, again, healthy)])
        store.insert_rows("ranks", [{"run_id": "job", "epoch": 0, "rank": 1, "host": "gpu07"}])
        write_findings(store, [replace(FINDING, run_id="job")])

        _, (newest, problems), (offenders, _), (findings, _) = host_check_parts(store, now_ns)

    assert newest.rows == (
        (
            "gpu07",
            "error",
            "gpu-ecc, GPU 3",
            "5 uncorrectable memory errors: reset the GPU",
            "1 min 0 s ago",
        ),
    )
    assert newest.bad == {"gpu07"}
    assert problems == ("The checks of 1 host report errors, gpu07 first: keep jobs from them.",)
    assert [row[:5] for row in offenders.rows] == [
        ("gpu07", "gpu-ecc", "5 uncorrectable memory errors", "2", "1")
    ]
    assert [row[:2] for row in findings.rows] == [("job", "slow-compute on rank 1")]
    assert findings.rows[0][2].startswith("confirmed: gpu07, GPU 3")


def test_health_lists_excluded_hosts_and_who_still_uses_them(tmp_path: Path) -> None:
    exclusion = HostChange(
        host="gpu07", mark=HostMark.EXCLUDED, at_ns=NOW_NS - 10**9, is_set=True,
        until_ns=NOW_NS + 3600 * 10**9, reason="power brake", set_by="ann",
    )  # fmt: skip
    spare = HostChange(host="gpu12", mark=HostMark.SPARE, at_ns=NOW_NS, is_set=True)
    with open_store(f"chdb://{tmp_path}/store") as store:
        write_host_changes(store, [exclusion, spare])
        store.insert_rows("runs", [{"run_id": "job", "state": "running"}])
        row = {"run_id": "job", "rank": 0, "host": "gpu07.cluster"}
        store.insert_rows("ranks", [{**row, "epoch": epoch} for epoch in (0, 1)])

        (marks, problems), *_ = host_check_parts(store, NOW_NS)
        store.insert_rows("ranks", [{"run_id": "job", "epoch": 2, "rank": 0, "host": "gpu09"}])
        (_, later), *_ = host_check_parts(store, NOW_NS)
        (expired, _), *_ = host_check_parts(store, NOW_NS + 7200 * 10**9)

    excluded, free = marks.rows
    assert excluded[:4] == ("gpu07", "excluded", "power brake", "ann")
    assert excluded[-1] == "job"
    assert (free[0], free[1], free[5]) == ("gpu12", "spare", "-")
    assert marks.bad == {"gpu07"}
    assert len(problems) == 1
    assert "gpu07" in problems[0]
    assert later == ()
    assert [row[0] for row in expired.rows] == ["gpu12"]
