"""Import and analysis of the published trace of 64 GPUs, in two new processes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.programs import rankscope
from tests.support.traces import TRACES, needs_traces

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [needs_traces, pytest.mark.multiproc]


@pytest.fixture(scope="module")
def store_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that holds both published traces."""
    folder = tmp_path_factory.mktemp("published")
    for name in ("AR", "ST"):
        done = rankscope(*import_arguments(name), store=folder)
        assert done.returncode == 0, done.stderr
    return folder


def import_arguments(name: str) -> list[str]:
    files = [str(TRACES / f"trace-{name}.parquet"), "--meta", str(TRACES / f"meta-{name}.yaml")]
    return ["import", *files, "--format", "bytedance", "--run", name]


def document(run: str, *, store: Path) -> dict[str, Any]:
    done = rankscope("analyze", run, "--json", store=store)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    loaded: dict[str, Any] = json.loads(done.stdout)
    return loaded


def test_only_the_slow_worker_is_reported(store_folder: Path) -> None:
    # Rank 0 is the traced TP member of the worker at dp 0, stage 0.
    found = document("AR", store=store_folder)

    accused = {rank for finding in found["findings"] for rank in finding["ranks"]}
    assert found["findings"][0]["cause"] == "slow-compute"
    assert accused == {0}
    assert found["world_size"] == 64
    assert found["slowdown"] == pytest.approx(1.9730450967, rel=1e-6)


def test_the_slow_last_stage_is_reported(store_folder: Path) -> None:
    found = document("ST", store=store_folder)

    assert found["findings"][0]["cause"] == "stage-imbalance"
    assert found["findings"][0]["ranks"] == [6, 7]  # stage 3, dp 0 and 1
    assert found["slowdown"] == pytest.approx(1.1787021837, rel=1e-6)


def test_the_verdict_comes_first(store_folder: Path) -> None:
    done = rankscope("analyze", "AR", store=store_folder, COLUMNS="80")

    first = done.stdout.splitlines()[0]
    assert done.returncode == 0
    assert "dp 0, stage 0" in first
    assert "cost of a step" in done.stdout


def test_chosen_steps_are_analysed_alone(store_folder: Path) -> None:
    steps = document("AR", store=store_folder)["steps"]
    done = rankscope(
        "analyze", "AR", "--json", "--steps", f"{steps[2]}:{steps[4]}", store=store_folder
    )

    assert json.loads(done.stdout)["steps"] == steps[2:5]
