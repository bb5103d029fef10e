"""The GPU benchmark on the fake device: it must run, end, and find what the fake does."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from benchmarks.gpu_tracer import NO_GPU, RUNS, run_child
from tests.support.paths import ROOT
from tests.tracer.programs import run_python

pytestmark = [pytest.mark.slow]


def part(name: str, connections: str | None = None) -> Any:  # noqa: ANN401 - JSON
    return run_child(name, connections, 200, fake=True)


@pytest.mark.parametrize("connections", [None, pytest.param("1", marks=pytest.mark.nightly)])
def test_marks_do_not_change_the_overlap_of_the_fake_device(connections: str | None) -> None:
    found = part("overlap", connections)

    assert found["round_ms_untraced"] == pytest.approx(5.0, rel=0.01)
    assert found["overlap_ratio_traced"] == pytest.approx(1.0, abs=0.01)
    assert found["ratio"]["high_95"] < 1.001


def test_the_mapping_finds_the_fakes_drift_and_no_event_outside_the_bound() -> None:
    found = part("mapping")

    assert found["outside_the_bound"] == 0
    assert found["events"] > 25
    assert abs(found["drift_ppb"] - 12_000) <= found["drift_error_ppb"] < 5_000


@pytest.mark.nightly
def test_a_step_has_a_thousand_spans_and_loses_none() -> None:
    found = part("steps")

    # Plus the records of 100 micro-batches and of the step, and a few garbage collector pauses.
    assert 1_101 <= found["account"]["spans_per_step"] <= 1_110
    assert found["account"]["dropped"] == {}
    assert found["step_ratio"]["low_95"] <= found["step_ratio"]["median"]


def test_a_part_that_does_not_end_is_killed_and_reported() -> None:
    assert run_child("mapping", None, 0, fake=True) == {"error": "not done after 0 s"}


def test_all_parts_together_end_within_eight_minutes() -> None:
    assert sum(timeout_s for *_, timeout_s in RUNS) <= 460


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said without a GPU")
def test_without_a_gpu_the_document_says_that_none_was_measured() -> None:
    done = run_python(ROOT / "benchmarks" / "gpu_tracer.py")

    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert (document["gpu"], document["note"]) == (None, NO_GPU)
    assert "parts" not in document
