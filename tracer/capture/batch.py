"""What a batch of token sequences holds: how many tokens, and how long its sequences are."""

from __future__ import annotations

import itertools
import sys
from collections import UserDict
from typing import Any, NamedTuple

TOKEN_KEYS = ("input_ids", "tokens", "input")
"""What loaders call the token ids: Hugging Face, plain scripts, torchtitan."""

BOUNDARY_KEYS = ("cu_seq_lens_q", "cu_seqlens_q", "cu_seqlens")
"""Where each packed sequence begins, and where the last ends."""

MAX_ELEMENTS = 1 << 22
"""A larger batch is not counted: counting must stay below a millisecond or so."""

MAX_DIM = 2


class Counts(NamedTuple):
    """What one batch holds; None is unknown."""

    shape: tuple[int, ...]
    """Of the token ids: by it a batch is known again when the model gets it."""

    num_tokens: int | None
    sum_squared_lengths: int | None


def count_batch(batch: object) -> Counts | None:
    """Return what a batch holds; None where it holds no token ids that we know.

    Token ids are an integer tensor under one of `TOKEN_KEYS`, or the first
    thing in a tuple. Lengths come from the boundaries of packed sequences,
    else from positions, else from the attention mask, else each row is one
    sequence. Tensors on a device are not read, only their shape: where
    lengths stand in one, they are unknown.

    Args:
        batch: What a loader yields or a model gets: a dict, a tuple, a tensor.
    """
    found = _find(batch)
    if found is None:
        return None
    ids, beside = found
    shape = tuple(map(int, ids.shape))
    if ids.numel() > MAX_ELEMENTS:
        return Counts(shape, None, None)
    teller = _teller(beside, shape)
    if teller is None:
        lengths = [shape[-1]] * (ids.numel() // max(shape[-1], 1))
    elif _is_readable(teller[1]):
        lengths = _lengths(*teller)
    else:
        return Counts(shape, None, None)
    return Counts(shape, sum(lengths), sum(length * length for length in lengths))


def shape_of(batch: object) -> tuple[int, ...] | None:
    """Return the shape of a batch's token ids; None where it holds none."""
    found = _find(batch)
    return None if found is None else tuple(map(int, found[0].shape))


def _find(batch: Any) -> tuple[Any, dict[str, Any]] | None:  # noqa: ANN401
    """Return the token ids and the dict that they stand in, empty where they stand in none."""
    # In the order of what models get most, and without a loop: each forward comes here.
    if (type(batch) is tuple or type(batch) is list) and batch:
        batch = batch[0]
        if (type(batch) is tuple or type(batch) is list) and batch:
            batch = batch[0]
    torch = sys.modules["torch"]
    if isinstance(batch, torch.Tensor):
        return (batch, {}) if _has_ids(torch, batch) else None
    if isinstance(batch, UserDict):
        batch = batch.data
    if isinstance(batch, dict):
        for key in TOKEN_KEYS:
            value = batch.get(key)
            if isinstance(value, torch.Tensor) and _has_ids(torch, value):
                return value, batch
    return None


def _has_ids(torch: Any, tensor: Any) -> bool:  # noqa: ANN401 - the module, a tensor
    dtype = tensor.dtype
    return (dtype is torch.int64 or dtype is torch.int32) and 1 <= tensor.dim() <= MAX_DIM


def _teller(beside: dict[str, Any], shape: tuple[int, ...]) -> tuple[str, Any] | None:
    """Return what tells the lengths: the name and the tensor; None where nothing does."""
    torch = sys.modules["torch"]
    for key in (*BOUNDARY_KEYS, "position_ids", "attention_mask"):
        tensor = beside.get(key)
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.dim() == 1 if key in BOUNDARY_KEYS else tuple(tensor.shape) == shape:
            return key, tensor
    return None


def _is_readable(tensor: Any) -> bool:  # noqa: ANN401
    """Return whether reading the tensor needs no device and runs nobody's own code."""
    torch = sys.modules["torch"]
    return type(tensor) is torch.Tensor and tensor.device.type == "cpu"


def _lengths(name: str, teller: Any) -> list[int]:  # noqa: ANN401
    """Return the length of each sequence, as the tensor called ``name`` tells it."""
    if name in BOUNDARY_KEYS:
        return [int(length) for length in teller.diff().tolist()]
    if name == "attention_mask":
        return [int(length) for length in teller.ne(0).sum(-1).reshape(-1).tolist()]
    # Each sequence begins at position 0, and so does each row.
    flat = teller.reshape(-1)
    starts = flat.eq(0).nonzero().reshape(-1).tolist()
    rows = range(0, flat.numel(), max(int(teller.shape[-1]), 1))
    ends = sorted({*starts, *rows, flat.numel()})
    return [end - start for start, end in itertools.pairwise(ends)]
