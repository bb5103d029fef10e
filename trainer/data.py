"""Synthetic training data: tokens, and the lengths of the documents in each sequence.

A small model learns the structure of the tokens within a few steps. A sequence may be packed of
several documents that do not attend to each other, so the cost of attention is the sum of their
squared lengths.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .config import context_positions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .config import TrainerConfig

NUM_SUCCESSORS = 4
"""Number of tokens that may follow a token; the best loss is therefore near ln 4 = 1.39."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one step and one data-parallel position, micro-batch after micro-batch."""

    tokens: torch.Tensor
    """int64, shape ``(sequences, seq_length / cp)``."""

    targets: torch.Tensor
    """The next token of each token, same shape."""


def iter_batches(
    config: TrainerConfig, *, dp_position: int, cp_position: int = 0, device: torch.device
) -> Iterator[Batch]:
    """Yield the batches of one data and context position, from step 0 on, without end.

    The sequences of a step depend only on the seed and the step, and are assigned to the
    data-parallel positions in order: dp 2 with one micro-batch trains on the same sequences as
    dp 1 with two.
    """
    num_sequences = config.num_microbatches * config.microbatch_size
    mine = slice(dp_position * num_sequences, (dp_position + 1) * num_sequences)
    positions = torch.tensor(
        context_positions(
            cp_position, num_ranks=config.layout.cp, seq_length=config.model.seq_length
        )
    )
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
        )[mine]
        yield Batch(*(walk[:, positions + shift].to(device) for shift in (0, 1)))


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
"""Number of equal documents in a typical sequence."""


def draw_documents(
    config: TrainerConfig, *, step: int, dp: int, microbatch: int, spread: float
) -> tuple[int, ...]:
    """Return the lengths of the documents in each sequence of a micro-batch.

    All ranks of this micro-batch get the same lengths. The logarithm of the paced compute has
    the standard deviation ``spread``, as far as the length of a sequence allows.

    Args:
        config: Sizes and seed.
        step: The step.
        dp: Data-parallel position.
        microbatch: Index in the step.
        spread: Standard deviation; 0 makes every micro-batch typical.
    """
    rng = random.Random(f"{config.seed}/{step}/{dp}/{microbatch}")  # noqa: S311  # no secret
    length = config.model.seq_length
    factor = math.exp(spread * rng.gauss(0.0, 1.0))
    typical = _squares(_cut(length, -(-length // TYPICAL_DOCUMENTS)))
    wanted = (factor - (1 - SQUARED_SHARE)) / SQUARED_SHARE * typical
    cuts = (_cut(length, size) for size in range(1, length + 1))
    return min(cuts, key=lambda documents: abs(_squares(documents) - wanted))


def sum_squared_lengths(config: TrainerConfig, documents: tuple[int, ...]) -> int:
    """Return the sum of squared lengths of a micro-batch of equal sequences, in tokens squared."""
    return config.microbatch_size * _squares(documents)


def compute_factor(config: TrainerConfig, documents: tuple[int, ...]) -> float:
    """Return the paced compute of a micro-batch over that of a typical one.

    ::

        1 - SQUARED_SHARE + SQUARED_SHARE * squares / typical squares
    """
    length = config.model.seq_length
    typical = _squares(_cut(length, -(-length // TYPICAL_DOCUMENTS)))
    return 1 - SQUARED_SHARE + SQUARED_SHARE * _squares(documents) / typical


def _cut(length: int, size: int) -> tuple[int, ...]:
    """Cut a sequence into documents of ``size``; the last one may be shorter."""
    count, rest = divmod(length, size)
    return (size,) * count + ((rest,) if rest else ())


def _squares(documents: tuple[int, ...]) -> int:
    return sum(length * length for length in documents)
