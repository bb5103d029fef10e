"""Steps of a ByteDance trace that contradict themselves: named, and left out of the replay.

The format names no partners; the n-th operation of one worker meets the n-th
of another. Where a row is missing, all that follow would meet the wrong ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .format import (
    BACKWARD_COMPUTE,
    CODE,
    DP_ONLY,
    EMBEDDING_GRADS,
    FORWARD_COMPUTE,
    GRAD_CLIP,
    OPTIMIZER,
    TYPES,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray


def contradictions(count: NDArray[np.int64], steps: NDArray[np.int64]) -> dict[int, str]:
    """Find the steps in which workers have other numbers of operations than their partners.

    A worker that the whole trace lacks has no part in it: the others may still be compared.

    Args:
        count: Shape (steps, replicas, stages, types): operations of each.
        steps: Shape (steps,): step numbers.

    Returns:
        By step number: what is missing.
    """
    traced: NDArray[np.bool_] = np.any(count, axis=(0, 3))
    found: dict[int, str] = {}
    missing = (traced & (count[..., CODE[OPTIMIZER]] == 0)).sum(axis=(1, 2))
    for index in np.flatnonzero(missing).tolist():
        found[int(steps[index])] = (
            f"{missing[index]} of {int(traced.sum())} workers have no {OPTIMIZER}"
        )
    for name, lowest, highest in _numbers_that_should_agree(count, traced):
        for index in np.flatnonzero((lowest < highest).any(axis=1)).tolist():
            at = int(np.argmax(highest[index] - lowest[index]))
            found.setdefault(
                int(steps[index]),
                f"workers that belong together have {lowest[index, at]} to"
                f" {highest[index, at]} {name}",
            )
    return found


def unpaired_transfers(num_by_step: Mapping[int, int]) -> dict[int, str]:
    """Say how many sends and receives of each step have no partner."""
    sentence = "{} sends and receives have no partner"
    return {step: sentence.format(num) for step, num in num_by_step.items() if num}


def untraced_warnings(num_traced: int, num_workers: int) -> tuple[str, ...]:
    """Say how many workers the trace lacks.

    Args:
        num_traced: Workers with operations.
        num_workers: Workers of the job's layout.
    """
    if num_traced in (0, num_workers):
        return ()
    sentence = (
        f"{num_workers - num_traced} of {num_workers} workers are not in the trace:"
        " what others waited for them counts as transfer"
    )
    return (sentence,)


def _numbers_that_should_agree(
    count: NDArray[np.int64], traced: NDArray[np.bool_]
) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.int64]]]:
    """Yield (what, lowest, highest), the numbers of shape (steps, groups)."""
    num_steps, num_workers = len(count), traced.size
    for code in (CODE[FORWARD_COMPUTE], CODE[BACKWARD_COMPUTE]):
        yield (TYPES[code], *_range(count[..., code], traced, axis=2))
    both = np.stack((count[..., CODE[FORWARD_COMPUTE]], count[..., CODE[BACKWARD_COMPUTE]]))
    yield (
        "forward and backward computes",
        both.min(axis=0).reshape(num_steps, num_workers),
        both.max(axis=0).reshape(num_steps, num_workers),
    )
    for name in sorted(DP_ONLY):
        yield (name, *_range(count[..., CODE[name]], traced, axis=1))
    ends = [0, -1]
    yield (
        EMBEDDING_GRADS,
        *_range(count[:, :, ends, CODE[EMBEDDING_GRADS]], traced[:, ends], axis=2),
    )
    everywhere = count[..., CODE[GRAD_CLIP]].reshape(num_steps, 1, num_workers)
    yield (GRAD_CLIP, *_range(everywhere, traced.reshape(1, num_workers), axis=2))


def _range(
    count: NDArray[np.int64], traced: NDArray[np.bool_], *, axis: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the lowest and highest number over an axis, of traced workers alone."""
    most = np.iinfo(np.int64).max
    lowest = np.where(traced, count, most).min(axis=axis)
    highest = np.where(traced, count, 0).max(axis=axis)
    return np.minimum(lowest, highest), highest
