"""A slow rank under each switch of the trainer, as the command diagnoses it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.trainer.job import run_trainer, trainer_environment

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.multiproc, pytest.mark.nightly, pytest.mark.alone]

SLOW, FIRST, NUM_STEPS = 2, 5, 12
JOB = (
    *("--steps", str(NUM_STEPS), "--microbatches", "4", "--paced", "--pace-ms", "60"),
    *("--fault", f"slow-compute:rank={SLOW},factor=1.6,steps={FIRST}-{NUM_STEPS - 1}"),
)


def rankscope(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rankscope", *words],
        capture_output=True,
        text=True,
        check=False,
        env=trainer_environment(),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def diagnose(folder: Path, *flags: str) -> dict[str, Any]:
    spool, store = folder / "spool", f"chdb://{folder / 'store'}"
    trained = run_trainer(*JOB, *flags, "--trace", str(spool), "--run-name", "slow", num_ranks=4)
    assert trained.returncode == 0, trained.stderr
    rankscope("import", str(spool), "--format", "rankscope", "--run", "slow", "--store", store)
    document: dict[str, Any] = json.loads(rankscope("analyze", "slow", "--json", "--store", store))
    return document


@pytest.mark.parametrize(
    "flags",
    [
        "--pp 2 --dp 2 --schedule interleaved",
        "--pp 2 --dp 2 --schedule zero-bubble",
        "--pp 2 --dp 2 --schedule zbv",
        "--pp 2 --dp 2 --schedule dualpipev",
        "--pp 2 --tp 2 --scatter-gather",
        "--dp ddp:2 --tp 2 --sp --layers 2",
        "--dp 2 --cp 2 --layers 2",
        "--dp 4 --ep 2 --layers 2",
        "--dp hsdp:4 --layers 2",
        "--pp 2 --dp 2 --overlap dp,pp",
        "--dp 2 --tp 2 --sp --layers 2 --overlap dp,tp",
        "--pp 2 --tp 2 --parallel-block --kv-heads 2 --window 9 --optimizer lamb",
    ],
)
def test_a_slow_rank_is_found(flags: str, tmp_path: Path) -> None:
    document = diagnose(tmp_path, *flags.split())

    first, *_ = document["findings"]
    assert (first["cause"], first["ranks"]) == ("slow-compute", [SLOW])
    assert first["steps"] == [FIRST, NUM_STEPS - 1]
