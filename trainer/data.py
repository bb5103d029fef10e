"""Synthetic training data: tokens, and the lengths of the documents in each sequence.

A small model learns the structure of the tokens within a few steps. A sequence may be packed of
several documents that do not attend to each other, so the cost of attention is the sum of their
squared lengths.
"""

from __future__ import annotations

import math
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rankscope import tracer

from .config import DataSource, context_positions

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from rankscope.tracer.topology import Coords

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


class Loader:
    """The batches of a rank: the same on every layout, and from any position on.

    One rank of each tensor-parallel group reads, and sends the tokens to the others. A sequence
    depends only on the seed and on its sample id, which counts the sequences of a run. The samples
    of a step are assigned to the data-parallel positions in order: dp 2 with one micro-batch trains
    on the same sequences as dp 1 with two. Without a ``group``, the rank is alone in its
    tensor-parallel group.
    """

    def __init__(
        self,
        config: TrainerConfig,
        *,
        coords: Coords,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._config = config
        self._coords = coords
        self._device = device
        self._group = group
        self._columns = torch.tensor(
            context_positions(
                coords.cp, num_ranks=config.layout.cp, seq_length=config.model.seq_length
            )
        )
        size, generator = config.model.vocab_size, _generator(config, "successors")
        self._successors = torch.randint(size, (size, NUM_SUCCESSORS), generator=generator)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self._prepared: tuple[int, Future[torch.Tensor]] | None = None
        self.position = 0
        """The first sample of the next step, over all data-parallel positions."""

        self._fixed: torch.Tensor | None = None
        if config.data is not DataSource.SYNTHETIC:
            self._fixed = self._prepare(self.next_samples())

    def next_samples(self) -> range:
        """Return the samples of the next step on this data-parallel position."""
        num = self._config.num_samples // self._config.layout.dp
        first = self.position + self._coords.dp * num
        return range(first, first + num)

    def prefetch(self) -> None:
        """Begin to read the next batch on a thread, if this rank reads and has not begun yet."""
        if self._config.prefetch and self._reads and not self._is_prepared:
            self._prepared = self.position, self._thread.submit(self._prepare, self.next_samples())

    def read(self) -> torch.Tensor | None:
        """Wait for the sequences of the next batch and go on to the one after; None if another
        rank reads. Shape ``(sequences, seq_length + 1)``.
        """
        samples, prepared = self.next_samples(), self._prepared
        is_prepared, self._prepared = self._is_prepared, None
        self.position += self._config.num_samples
        if not self._reads:
            return self._fixed
        return prepared[1].result() if prepared and is_prepared else self._prepare(samples)

    def share(self, sequences: torch.Tensor | None) -> Batch:
        """Return the batch of this rank, of what one rank of its group has read."""
        if sequences is None:
            shape = len(self.next_samples()), self._config.model.seq_length + 1
            sequences = torch.empty(shape, dtype=torch.int64)
        sequences = sequences.to(self._device)
        if self._group is not None and self._fixed is None:
            dist.broadcast(sequences, group=self._group, group_src=0)
        return Batch(*(sequences[:, self._columns + shift].contiguous() for shift in (0, 1)))

    def next_batch(self) -> Batch:
        """Read and share the next batch."""
        return self.share(self.read())

    @property
    def _reads(self) -> bool:
        return self._fixed is None and (self._group is None or self._coords.tp == 0)

    @property
    def _is_prepared(self) -> bool:
        """Return whether the next batch is that which was begun: the position may have been set."""
        return self._prepared is not None and self._prepared[0] == self.position

    def _prepare(self, samples: range) -> torch.Tensor:
        with tracer.span("read samples"):  # on a thread of its own if it is prefetched
            time.sleep(self._config.data_ms / 1e3)
            return read_samples(self._config, samples, successors=self._successors)


def read_samples(
    config: TrainerConfig, samples: Sequence[int], *, successors: torch.Tensor
) -> torch.Tensor:
    """Return sequences, shape ``(samples, seq_length + 1)``: walks from token to successor.

    ``successors`` has the shape ``(vocab_size, NUM_SUCCESSORS)``.
    """
    length = config.model.seq_length + 1
    if config.data is DataSource.ZEROS:
        return torch.zeros(len(samples), length, dtype=torch.int64)
    drawn = []
    for sample in samples:
        generator = _generator(config, f"sample {sample}")
        token = torch.randint(config.model.vocab_size, (1,), generator=generator)
        choices = torch.randint(NUM_SUCCESSORS, (length - 1,), generator=generator)
        drawn.append(torch.cat((token, choices)))
    token, *choices_by_place = torch.stack(drawn, dim=1)
    tokens = [token]
    for choice in choices_by_place:
        tokens.append(successors[tokens[-1], choice])
    return torch.stack(tokens, dim=1)


def _generator(config: TrainerConfig, what: str) -> torch.Generator:
    seed = random.Random(f"{config.seed}/{what}").getrandbits(63)  # noqa: S311  # no secret
    return torch.Generator().manual_seed(seed)


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
