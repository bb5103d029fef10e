"""torchtitan's real Trainer on two gloo ranks, with FSDP2; see `titan_job`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from rankscope.tracer.spool import RecordType
from tests.support.tracer.ranks import run_ranks
from tests.support.tracer.reading import dropped
from tests.tracer.integrations.recorded import Recorded

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on two ranks; return the job's folder."""
    folder: Path = tmp_path_factory.mktemp("titan")
    run_ranks("tests.tracer.integrations.titan_job", 2, folder, RANKSCOPE_RUN="run")
    return folder


def read_rank(folder: Path, rank: int) -> Recorded:
    return Recorded(folder / "spool", rank=rank)


def test_training_is_bit_identical_with_the_tracer(trained: Path) -> None:
    for rank in range(2):
        plain = json.loads((trained / f"plain-{rank}.json").read_text())
        assert len(plain) == 6
        assert json.loads((trained / f"traced-{rank}.json").read_text()) == plain


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_has_its_steps_tokens_and_spans(trained: Path, rank: int) -> None:
    recorded = read_rank(trained, rank)

    # 2 micro-batches of 2 sequences of 16 tokens; the loss is logged after steps 1 and 2
    assert recorded.tokens() == [(1, 64), (2, 64), (3, 64)]
    assert [loss is not None for _, _, loss in recorded.steps()] == [True, True, False]
    places = [(step, microbatch) for step in (1, 2, 3) for microbatch in (0, 1)]
    assert recorded.spans("forward") == places
    assert recorded.spans("backward") == places
    assert recorded.spans("optimizer") == [(1, -1), (2, -1), (3, -1)]
    assert {step for step, _ in recorded.spans("dp-comm")} == {1, 2, 3}
    assert dropped(recorded.folder) == {}


def test_both_ranks_record_the_same_loss_and_their_coordinates(trained: Path) -> None:
    first, second = (read_rank(trained, rank) for rank in range(2))

    assert first.steps() == second.steps()
    assert [each.manifest["layout"]["dp"] for each in (first, second)] == [2, 2]
    assert [each.manifest["coords"]["dp"] for each in (first, second)] == [0, 1]
    assert first.manifest["config"]["seq_len"] == 16
    assert first.manifest["seeds"] == {"seed": 7}
    # 6 x (2 layers of 4 x 32^2 + 3 x 32 x 256, 5 norms of 32, the head of 32 x 64)
    #   + 12 x 2 layers x 4 heads x 8 x 16 tokens
    matrices = 2 * (4 * 32 * 32 + 3 * 32 * 256) + 5 * 32 + 32 * 64
    assert first.manifest["model"]["flops_per_token"] == 6 * matrices + 12 * 2 * 4 * 8 * 16


@pytest.mark.parametrize("rank", [0, 1])
def test_the_last_step_ends_before_rank_0_sleeps(trained: Path, rank: int) -> None:
    recorded = read_rank(trained, rank)
    (last,) = (row for row in recorded.rows if (row.record, row.step) == (RecordType.STEP, 3))
    (after,) = (row for row in recorded.rows if row.name == "trained")

    slept_ns = 2_000_000_000 if rank == 0 else 0
    assert after.start_ns - last.end_ns >= slept_ns
