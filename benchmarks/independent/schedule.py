"""Order of forwards and backwards of a pipeline stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def actions_of(
    stage: int, num_stages: int, num_microbatches: int, num_chunks: int
) -> Iterator[tuple[bool, int, int]]:
    """Yield (is forward, micro-batch, chunk) of 1F1B, interleaved if there are several chunks.

    Source: arXiv 2104.04473, section 2.2.
    """
    total = num_microbatches * num_chunks
    if num_stages == 1:
        warm_up = 0
    elif num_chunks == 1:
        warm_up = num_stages - stage - 1
    else:
        warm_up = 2 * (num_stages - stage - 1) + (num_chunks - 1) * num_stages
    warm_up = min(warm_up, total)

    def work(number: int, *, is_forward: bool) -> tuple[bool, int, int]:
        if num_chunks == 1:
            return is_forward, number, 0
        round_size = num_stages * num_chunks
        chunk = number % round_size // num_stages
        microbatch = number // round_size * num_stages + number % num_stages
        return is_forward, microbatch, chunk if is_forward else num_chunks - 1 - chunk

    for number in range(warm_up):
        yield work(number, is_forward=True)
    for number in range(total - warm_up):
        yield work(number + warm_up, is_forward=True)
        yield work(number, is_forward=False)
    for number in range(total - warm_up, total):
        yield work(number, is_forward=False)
