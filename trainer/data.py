"""Synthetic tokens with a structure that a small model can learn within a few steps."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .config import TrainerConfig

NUM_SUCCESSORS = 4
"""Each token is followed by one of so many others, so that the best loss is near ln 4 = 1.39."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one step and one data position, all micro-batches one after the other."""

    tokens: torch.Tensor
    """int64, shape ``(sequences, seq_length)``."""

    targets: torch.Tensor
    """The token that follows each, same shape."""


def iter_batches(
    config: TrainerConfig, *, dp_position: int, device: torch.device
) -> Iterator[Batch]:
    """Yield the batches of one data position, from step 0 on, without end.

    The step's sequences depend on the seed and the step alone and are dealt to
    the data positions in order, so that dp 2 with one micro-batch trains on
    what dp 1 with two trains on.
    """
    num_sequences = config.num_microbatches * config.microbatch_size
    mine = slice(dp_position * num_sequences, (dp_position + 1) * num_sequences)
    generator = torch.Generator().manual_seed(config.seed)
    successors = torch.randint(
        config.model.vocab_size, (config.model.vocab_size, NUM_SUCCESSORS), generator=generator
    )
    while True:
        walk = _walk(
            successors,
            num_sequences=num_sequences * config.layout.dp,
            length=config.model.seq_length + 1,
            generator=generator,
        )[mine].to(device)
        yield Batch(walk[:, :-1].contiguous(), walk[:, 1:].contiguous())


def _walk(
    successors: torch.Tensor, *, num_sequences: int, length: int, generator: torch.Generator
) -> torch.Tensor:
    """Return random walks from token to successor, shape ``(num_sequences, length)``."""
    choices = torch.randint(NUM_SUCCESSORS, (length, num_sequences), generator=generator)
    token = torch.randint(len(successors), (num_sequences,), generator=generator)
    tokens = []
    for choice in choices:
        tokens.append(token)
        token = successors[token, choice]
    return torch.stack(tokens, dim=1)


SQUARED_SHARE = 0.5
"""Share of a typical micro-batch's paced compute that grows with the sum of squared lengths."""


TYPICAL_DOCUMENTS = 2
"""Equal documents of which a typical sequence is packed."""


def draw_documents(
    config: TrainerConfig, *, step: int, dp: int, microbatch: int, spread: float
) -> tuple[int, ...]:
    """Return the lengths of the documents of which each sequence of a micro-batch is packed.

    Equal on all ranks that work on this micro-batch. The paced compute's logarithm has standard
    deviation ``spread``, as far as the lengths of one sequence allow; 0: all are typical.

    Args:
        config: Sizes and seed.
        step: The step.
        dp: Data position.
        microbatch: Index in the step.
        spread: Of the micro-batches' compute.
    """
    rng = random.Random(f"{config.seed}/{step}/{dp}/{microbatch}")  # noqa: S311  # no secret
    length = config.model.seq_length
    factor = math.exp(spread * rng.gauss(0.0, 1.0))
    typical = _squares(_cut(length, -(-length // TYPICAL_DOCUMENTS)))
    wanted = (factor - (1 - SQUARED_SHARE)) / SQUARED_SHARE * typical
    cuts = (_cut(length, size) for size in range(1, length + 1))
    return min(cuts, key=lambda documents: abs(_squares(documents) - wanted))


def sum_squared_lengths(config: TrainerConfig, documents: tuple[int, ...]) -> int:
    """Return it for a micro-batch whose sequences are all packed alike, in tokens squared."""
    return config.microbatch_size * _squares(documents)


def compute_factor(config: TrainerConfig, documents: tuple[int, ...]) -> float:
    """Return how many times as long as a typical one a micro-batch's paced compute takes.

    ::

        1 - SQUARED_SHARE + SQUARED_SHARE * squares / typical squares
    """
    length = config.model.seq_length
    typical = _squares(_cut(length, -(-length // TYPICAL_DOCUMENTS)))
    return 1 - SQUARED_SHARE + SQUARED_SHARE * _squares(documents) / typical


def _cut(length: int, size: int) -> tuple[int, ...]:
    """Cut a sequence into documents of ``size``; the last has what is left."""
    count, rest = divmod(length, size)
    return (size,) * count + ((rest,) if rest else ())


def _squares(documents: tuple[int, ...]) -> int:
    return sum(length * length for length in documents)
