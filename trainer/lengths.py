"""Sequences packed of documents: what attention costs depends on their lengths.

A sequence holds several documents that do not see each other, so attention costs the sum of
their squared lengths. Standard library only.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import TrainerConfig

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
