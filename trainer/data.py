"""Synthetic tokens with a structure that a small model can learn within a few steps."""

from __future__ import annotations

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
