"""Memory of the devices: the allocator's peaks, and the state and the activations by formula."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..report.memory import MemoryUse, ModelState, StageMemory
from ..trace.device_peaks import element_bytes
from ..trace.rows import select_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from ..trace.context import MicrobatchTable
    from ..trace.tables import RankInfo, RunInfo, StepTable

FLOAT32_BYTES = 4
ADAM_MOMENTS = 2
MASK_BYTES = 1
"""Of one element of a dropout mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPeaks:
    """Peaks of each rank by step, -1 where unknown. Each array has shape (ranks, steps)."""

    ranks: NDArray[np.int32]
    steps: NDArray[np.int32]
    allocated_bytes: NDArray[np.int64]
    """The largest so far, also if the job resets the statistic."""

    reserved_bytes: NDArray[np.int64]
    num_alloc_retries: NDArray[np.int64]

    @property
    def new_retries(self) -> NDArray[np.int64]:
        """Return how often each rank's allocator freed its cache after the first of these steps."""
        first, last = self.num_alloc_retries[:, 0], self.num_alloc_retries[:, -1]
        return np.where(first >= 0, last - first, 0)

    @property
    def has_retries(self) -> NDArray[np.bool_]:
        """Return in which steps each rank's allocator freed its cache. Shape (ranks, steps)."""
        before = np.pad(self.num_alloc_retries[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
        is_known: NDArray[np.bool_] = before >= 0
        return is_known & (self.num_alloc_retries > before)


def read_peaks(run: RunInfo, steps: StepTable) -> RankPeaks:
    """Return the peaks of the newest epoch, of ranks that reported any."""
    newest = run.epochs[-1]
    own = select_rows(steps, (steps.epoch == newest.epoch) & (steps.peak_memory_bytes >= 0))
    own = select_rows(own, np.isin(own.rank, [info.rank for info in newest.ranks]))
    ranks, row = np.unique(own.rank, return_inverse=True)
    numbers, column = np.unique(own.step, return_inverse=True)

    def by_step(values: NDArray[np.int64]) -> NDArray[np.int64]:
        dense = np.full((len(ranks), len(numbers)), -1, dtype=np.int64)
        dense[row, column] = values
        return np.maximum.accumulate(dense, axis=1) if dense.size else dense

    return RankPeaks(
        ranks=ranks,
        steps=numbers,
        allocated_bytes=by_step(own.peak_memory_bytes),
        reserved_bytes=by_step(own.peak_reserved_bytes),
        num_alloc_retries=by_step(own.num_alloc_retries),
    )


def summarize_memory(
    run: RunInfo, steps: StepTable, microbatches: MicrobatchTable
) -> MemoryUse | None:
    """Return the memory of the fullest rank of each stage; None if nothing is known of any."""
    peaks = read_peaks(run, steps)
    last = dict(zip(peaks.ranks.tolist(), range(len(peaks.ranks)), strict=True))
    stages: dict[int, tuple[int, RankInfo]] = {}
    for info in run.epochs[-1].ranks:
        peak = int(peaks.allocated_bytes[last[info.rank], -1]) if info.rank in last else -1
        is_known = peak >= 0 or info.memory.parameter_bytes is not None
        if is_known and peak > stages.get(info.coords.pp, (-2, info))[0]:
            stages[info.coords.pp] = peak, info
    whole = None
    if run.num_parameters and run.layout.pp == run.layout.ep == 1:
        whole = model_state(run.num_parameters)
    if not stages and whole is None:
        return None
    shown, missing = [], ""
    for stage, (peak, info) in sorted(stages.items()):
        activations, reason = stage_activations(run, microbatches, info)
        missing = missing or reason
        row = last.get(info.rank)
        reserved = -1 if row is None else int(peaks.reserved_bytes[row, -1])
        has_retries = row is not None and peaks.num_alloc_retries[row, -1] >= 0
        shown.append(
            StageMemory(
                stage=stage,
                rank=info.rank,
                peak_allocated_bytes=peak if peak >= 0 else None,
                peak_reserved_bytes=reserved if reserved >= 0 else None,
                capacity_bytes=info.memory.capacity_bytes,
                device_bytes=info.memory.device_bytes,
                num_alloc_retries=int(peaks.new_retries[row]) if has_retries else None,
                state=_rank_state(info),
                activation_bytes=activations,
            )
        )
    return MemoryUse(stages=tuple(shown), whole=whole, missing_activations=missing)


def model_state(num_parameters: float) -> ModelState:
    """Return the bytes of a model's state in mixed precision with Adam.

    Parameters, gradients and both moments are float32 (copies in 16 bits are temporary, as with
    autocast and FSDP2): 16 bytes a parameter. 175 billion take 700 + 700 + 1,400 GB.

    Source:
        arXiv 1910.02054, section 3.1, where 16-bit parameters and gradients with a float32 copy
        take 2 + 2 + 12.
    """
    size = FLOAT32_BYTES * num_parameters
    return ModelState(
        parameter_bytes=size, gradient_bytes=size, optimizer_bytes=ADAM_MOMENTS * size
    )


def _rank_state(info: RankInfo) -> ModelState | None:
    memory = info.memory
    sizes = memory.parameter_bytes, memory.gradient_bytes, memory.optimizer_bytes
    parameters, gradients, optimizer = sizes
    if parameters is None or gradients is None or optimizer is None:
        return None
    return ModelState(
        parameter_bytes=parameters, gradient_bytes=gradients, optimizer_bytes=optimizer
    )


def stage_activations(
    run: RunInfo, microbatches: MicrobatchTable, info: RankInfo
) -> tuple[float | None, str]:
    """Return the bytes of activations of a rank at its peak, or why they are unknown.

    A stage keeps those of its layers for each micro-batch in flight: with 1F1B ``pp - stage``, at
    most all of the step. The last stage also has the logits in float32.
    """
    shape, layout, stage = run.shape, run.layout, info.coords.pp
    own = select_rows(microbatches, microbatches.epoch == run.epochs[-1].epoch)
    # A later stage gets no token ids; its micro-batches are those of its data position.
    ranks = [
        each.rank
        for each in run.epochs[-1].ranks
        if (each.coords.dp, each.coords.cp) == (info.coords.dp, info.coords.cp)
    ]
    own = select_rows(own, np.isin(own.rank, ranks))
    size, width = int(own.num_tokens.max(initial=-1)), element_bytes(info.dtype)
    if not shape.get("is_plain") or "recomputes" not in shape or not _int(shape, "num_layers"):
        return None, "of this architecture, or of what is recomputed"
    if layout.vpp > 1 or _int(shape, "num_layers") % layout.pp:
        return None, "of stages with several chunks, or with unequal layers"
    if size <= 0 or width is None:
        return None, "without the tokens of a micro-batch and the type of the numbers"
    largest = int(np.argmax(own.num_tokens))
    length = int(own.sum_squared_lengths[largest]) / size
    per_token = layer_activations(shape, tp=layout.tp, width=width, length=length)
    num_in_flight = min(layout.pp - stage, int(own.microbatch.max()) + 1)
    layers = _int(shape, "num_layers") // layout.pp * num_in_flight
    if shape["recomputes"]:  # the input of each layer, and all of the one that is computed again
        split = layout.tp if shape.get("is_sequence_parallel") else 1
        total = layers * width * _int(shape, "hidden") / split + per_token
    else:
        total = layers * per_token
    if stage == layout.pp - 1:
        total += FLOAT32_BYTES * _int(shape, "vocabulary") / layout.tp
    return size * total, ""


def layer_activations(shape: Mapping[str, object], *, tp: int, width: int, length: float) -> float:
    """Return the bytes of activations that one layer keeps for its backward, per token.

    Of a GPT with 4 h, without flash attention and with dropout this is ``34 h + 5 a s`` in 16 bits
    (``10 h + (24 h + 5 a s) / tp`` with tensor parallelism). Other widths, a gate, fewer heads of
    keys, no dropout and a fused attention count by the same rule: what each product, norm,
    activation function and dropout keeps.

    Args:
        shape: `tracer.job.model_memory.layer_shape`.
        tp: Tensor-parallel ranks.
        width: Bytes of a number.
        length: Tokens of a sequence.

    Source:
        arXiv 2205.05198, section 4.
    """
    hidden, ffn = _int(shape, "hidden"), _int(shape, "ffn")
    queries = _int(shape, "num_heads") * _int(shape, "head_size")
    keys = _int(shape, "num_groups") * _int(shape, "head_size")
    drops = bool(shape.get("drops"))
    # Inputs of both norms, of the attention and of the feed-forward layer, and two masks.
    whole = 4 * hidden * width + 2 * hidden * MASK_BYTES * drops
    split: float = (2 * queries + 2 * keys) * width
    # With a gate: both products, the activated gate, and what the last product takes.
    split += (4 if _int(shape, "num_matrices") > 2 else 2) * ffn * width  # noqa: PLR2004
    if not shape.get("is_fused"):
        # The softmax; with dropout also its result and mask.
        split += _int(shape, "num_heads") * length * (width + drops * (width + MASK_BYTES))
    if shape.get("is_sequence_parallel"):
        return (whole + split) / tp
    return whole + split / tp


def _int(shape: Mapping[str, object], name: str) -> int:
    value = shape.get(name)
    return value if isinstance(value, int) else 0
