from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch

from rankscope.tracer.topology import Coords, Layout
from rankscope.trainer.config import DataSource, ModelConfig, TrainerConfig
from rankscope.trainer.data import (
    Batch,
    Loader,
    compute_factor,
    draw_documents,
    sum_squared_lengths,
)
from rankscope.trainer.errors import ConfigError
from rankscope.trainer.faults.spec import parse_faults


def loader(
    *,
    dp: int = 1,
    num_microbatches: int = 1,
    dp_position: int = 0,
    **settings: Any,  # noqa: ANN401
) -> Loader:
    config = TrainerConfig(
        layout=Layout(dp=dp),
        world_size=dp,
        num_microbatches=num_microbatches,
        model=ModelConfig(vocab_size=16, seq_length=40),
        **settings,
    )
    return Loader(config, coords=Coords(dp=dp_position), device=torch.device("cpu"))


def first_batches(*, dp: int, num_microbatches: int, dp_position: int = 0) -> list[Batch]:
    batches = loader(dp=dp, num_microbatches=num_microbatches, dp_position=dp_position)
    return [batches.next_batch() for _ in range(2)]


def test_the_target_is_the_next_token() -> None:
    (batch, _) = first_batches(dp=1, num_microbatches=3)

    assert batch.tokens.shape == batch.targets.shape == (6, 40)
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])


def test_a_token_is_followed_by_at_most_four_others_in_any_step() -> None:
    successors: dict[int, set[int]] = {}
    for batch in first_batches(dp=1, num_microbatches=8):
        pairs = zip(batch.tokens.flatten().tolist(), batch.targets.flatten().tolist(), strict=True)
        for token, target in pairs:
            successors.setdefault(token, set()).add(target)

    assert len(successors) == 16
    assert max(map(len, successors.values())) <= 4


def test_data_parallel_positions_split_the_sequences_of_one() -> None:
    alone = first_batches(dp=1, num_microbatches=4)
    first = first_batches(dp=2, num_microbatches=2, dp_position=0)
    second = first_batches(dp=2, num_microbatches=2, dp_position=1)

    for whole, left, right in zip(alone, first, second, strict=True):
        assert torch.equal(whole.tokens, torch.cat((left.tokens, right.tokens)))


def test_every_step_has_new_tokens() -> None:
    first, second = first_batches(dp=1, num_microbatches=1)

    assert not torch.equal(first.tokens, second.tokens)


def test_a_loader_goes_on_from_any_position_with_any_number_of_samples() -> None:
    """A job that goes on with another batch size trains on each sample once."""
    first, later = loader(num_microbatches=3), loader(num_microbatches=2)
    assert list(first.next_samples()) == [0, 1, 2, 3, 4, 5]
    steps = [first.next_batch() for _ in range(2)]
    later.position = 6
    resumed = [later.next_batch() for _ in range(2)]

    assert torch.equal(steps[1].tokens, torch.cat([step.tokens for step in resumed])[:6])
    assert later.position == 14


def test_what_was_read_ahead_is_used_only_at_its_position() -> None:
    plain, ahead = loader(prefetch=False), loader()
    ahead.prefetch()
    assert torch.equal(ahead.next_batch().tokens, plain.next_batch().tokens)
    ahead.prefetch()
    ahead.position = plain.position = 20

    assert torch.equal(ahead.next_batch().tokens, plain.next_batch().tokens)


def test_without_a_loader_every_step_is_alike() -> None:
    first, second = (loader(data=DataSource.NONE).next_batch() for _ in range(2))
    zeros = loader(data=DataSource.ZEROS).next_batch()

    assert torch.equal(first.tokens, second.tokens)
    assert torch.equal(first.tokens, loader().next_batch().tokens)
    assert not zeros.tokens.any()
    assert not zeros.targets.any()


@pytest.mark.parametrize("late", [{"data_ms": 5.0}, {"faults": parse_faults(["data-stall:ms=5"])}])
def test_without_a_loader_nothing_can_be_late(late: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no loader"):
        loader(data=DataSource.NONE, **late)


CONFIG = TrainerConfig(world_size=1, num_microbatches=1, microbatch_size=3)


LENGTH = CONFIG.model.seq_length


def draw(microbatch: int, spread: float, *, step: int = 0, dp: int = 0) -> tuple[int, ...]:
    return draw_documents(CONFIG, step=step, dp=dp, microbatch=microbatch, spread=spread)


def test_without_spread_every_sequence_is_two_equal_documents() -> None:
    assert LENGTH == 32
    assert {draw(number, 0.0) for number in range(20)} == {(16, 16)}


def test_documents_fill_the_sequence() -> None:
    assert {sum(draw(number, 0.5)) for number in range(200)} == {LENGTH}


def test_a_microbatch_has_equal_documents_on_all_ranks() -> None:
    assert [draw(number, 0.4) for number in range(9)] == [draw(number, 0.4) for number in range(9)]
    assert draw(0, 0.4, step=1) != draw(0, 0.4, step=2)
    assert draw(0, 0.4, dp=0) != draw(0, 0.4, dp=1)


def test_squares_are_summed_over_the_sequences_of_a_microbatch() -> None:
    # Three sequences, each of documents of 20 and 12 tokens.
    assert sum_squared_lengths(CONFIG, (20, 12)) == 3 * (400 + 144)


@pytest.mark.parametrize(
    ("documents", "factor"),
    # Half of the compute grows with the squares; 16 + 16 has 512 of them.
    [((16, 16), 1.0), ((32,), 0.5 + 0.5 * 1024 / 512), ((8,) * 4, 0.5 + 0.5 * 256 / 512)],
)
def test_compute_grows_with_the_squares(documents: tuple[int, ...], factor: float) -> None:
    assert compute_factor(CONFIG, documents) == factor


def test_the_compute_has_the_given_spread() -> None:
    factors = [compute_factor(CONFIG, draw(number, 0.2)) for number in range(2000)]

    # A sequence can't cost more than 1.5: the spread's upper tail is cut there.
    assert max(factors) <= 1.5
    assert statistics.stdev(map(math.log, factors)) == pytest.approx(0.2, abs=0.02)


def test_a_sequence_of_odd_length_can_be_packed() -> None:
    config = TrainerConfig(world_size=1, num_microbatches=1, model=ModelConfig(seq_length=7))

    assert draw_documents(config, step=0, dp=0, microbatch=0, spread=0.0) == (4, 3)
