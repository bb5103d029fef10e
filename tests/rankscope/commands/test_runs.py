from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.read.findings import write_findings
from rankscope.collector.store.store import open_store
from rankscope.commands.runs import list_findings
from tests.collector.read.test_findings import CRASH, SLOW

if TYPE_CHECKING:
    from pathlib import Path

HEADER = (
    "run  cause         ranks  steps  opened (UTC)         closed (UTC)         confidence  follows"
)


@pytest.mark.slow
def test_findings_are_listed_with_their_first_and_last_step(tmp_path: Path) -> None:
    url = f"chdb://{tmp_path}"
    assert list_findings(None, as_json=False, store_url=url).startswith("no findings:")
    with open_store(url) as store:
        closed = replace(SLOW, closed_ns=1_700_000_000_000_000_000)
        write_findings(store, [closed, CRASH, replace(SLOW, run_id="q")])

    lines = list_findings("r", as_json=False, store_url=url).splitlines()

    assert lines == [
        HEADER,
        "r    slow-compute  5, 7   10-29  1970-01-01 00:00:00  2023-11-14 22:13:20        0.95  -",
        "r    crash         5, 7   -      1970-01-01 00:00:00  open                       0.95  -",
    ]


@pytest.mark.slow
def test_findings_of_all_runs_are_one_json_document(tmp_path: Path) -> None:
    url = f"chdb://{tmp_path}"
    with open_store(url) as store:
        write_findings(store, [SLOW, CRASH])

    document = json.loads(list_findings(None, as_json=True, store_url=url))

    assert [found["cause"] for found in document["findings"]] == ["crash", "slow-compute"]
    assert document["findings"][1]["onset_step"] == 10
    assert document["findings"][1]["closed_ns"] is None
    assert document["findings"][1]["follows"] is None
