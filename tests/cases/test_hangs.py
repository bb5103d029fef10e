from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from rankscope.commands.analyze import AnalyzeOptions, analyze_stored

from .reports import analyze_job, analyze_recording

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


def test_one_rank_in_a_barrier_and_the_others_in_an_all_reduce(tmp_path: Path) -> None:
    finding = analyze_job(tmp_path, "h_mismatch.py", run="h-mismatch").top_finding

    assert (finding.cause, finding.ranks, finding.steps) == ("hang", (1,), (29, 30))
    assert finding.evidence == (
        "rank 1 is in barrier 30 and ranks 0, 2 and 3 are in all_reduce 30 of group dp, which all"
        " its ranks must call alike; rank 1 is at train.py:30 <module>"
    )


def test_a_timeout_in_the_handler_of_another_exception_is_first(tmp_path: Path) -> None:
    finding = analyze_job(tmp_path, "h_mismatch.py", run="h-context").top_finding

    assert (finding.cause, finding.ranks, finding.steps) == ("crash", (1,), (19, 19))
    assert "exception (ValueError: bad sample 4711 in shard 17)" in finding.evidence


def test_a_hang_that_is_killed_after_80_steps_of_silence_is_one(tmp_path: Path) -> None:
    finding = analyze_recording(tmp_path, "hang").top_finding

    assert (finding.cause, finding.ranks) == ("hang", (1,))
    assert "rank 1 is at job.py:70 <module>" in finding.evidence
    assert "rank 1 never entered all_reduce 167 (dp-comm) of group dp:0" in finding.evidence


def test_the_end_of_each_rank_is_shown_with_its_open_spans_and_its_stack(tmp_path: Path) -> None:
    analyze_recording(tmp_path, "hang")
    url = f"chdb://{tmp_path / 'store'}"

    whole = analyze_stored(AnalyzeOptions(run_id="hang", store_url=url))
    blocked = analyze_stored(AnalyzeOptions(run_id="hang", rank=0, store_url=url))
    document = json.loads(
        analyze_stored(AnalyzeOptions(run_id="hang", as_json=True, store_url=url))
    )

    assert "ranks at the end  inside" in whole
    assert "nothing recorded" in whole
    assert "job.py:70 <module>" in whole
    assert "\n  all_reduce 167 (dp-comm) of dp:0, step 21, since 20" in blocked
    assert "/torch/cuda/__init__.py:1162 synchronize\n  job.py:72 <module>\n" in blocked
    slept = document["rank_states"][1]
    assert (slept["rank"], slept["place"], slept["open"]) == (1, "job.py:70 <module>", [])
