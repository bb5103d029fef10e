"""Matrix products too small for the device: what their shape alone lets it reach at best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..trace.devices import element_bytes, memory_bytes_per_s, peak_flops_per_s

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..trace.context import MicrobatchTable, RankManifest
    from ..trace.tables import RankInfo

HIDDEN_NAMES = frozenset({"hidden_size", "hidden", "dim", "d_model", "n_embd"})
INNER_NAMES = frozenset({"intermediate_size", "ffn_hidden_size", "ffn_hidden", "n_inner"})
"""What frameworks call a layer's width and that of its feed-forward part in their configuration:
Hugging Face, Megatron-LM, torchtitan, GPT-2."""

CONFIG = "config."

FLOPS_PER_MULTIPLY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What bounds a matrix product on a device."""

    name: str
    flops_per_s: float
    bytes_per_s: float
    element_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Sizes of a transformer layer's products on one rank."""

    num_tokens: int
    """Rows: tokens of a micro-batch."""

    hidden: int
    inner: int | None
    """Width of the feed-forward part; None where the configuration does not tell it."""

    tp: int

    @property
    def products(self) -> tuple[tuple[int, int, int], ...]:
        """(rows, depth, columns) of each kind of product: tensor parallelism cuts one side."""
        own = max(self.hidden // self.tp, 1)
        shapes = [(self.num_tokens, self.hidden, own)]
        if self.inner is not None:
            shapes.append((self.num_tokens, self.hidden, max(self.inner // self.tp, 1)))
        return tuple(shapes)


def reachable_ratio(layer: Layer, device: Device) -> float:
    """Return the share of the device's peak that a layer's products can reach at best.

    A product of (m, k) by (k, n) takes at least ``2 m k n / peak``, and at
    least as long as its operands and its result take to and from memory::

        max(2 m k n / peak, element (m k + k n + m n) / bandwidth)

    Caches, tiles that the shape does not fill, and the launch only add to it.

    Source:
        The roofline model: Williams, Waterman, Patterson, CACM 52(4), 2009.
    """
    arithmetic_s, bound_s = 0.0, 0.0
    for rows, depth, columns in layer.products:
        compute_s = FLOPS_PER_MULTIPLY * rows * depth * columns / device.flops_per_s
        moved = device.element_bytes * (rows * depth + depth * columns + rows * columns)
        arithmetic_s += compute_s
        bound_s += max(compute_s, moved / device.bytes_per_s)
    return arithmetic_s / bound_s


def layer_of(
    manifests: Iterable[RankManifest], microbatches: MicrobatchTable, *, tp: int
) -> Layer | None:
    """Return the sizes that the job told; None where one is missing or told in two ways.

    Args:
        manifests: Of all ranks.
        microbatches: What the micro-batches hold.
        tp: Ranks that share a layer.
    """
    told = tuple(manifests)
    hidden = _told(told, HIDDEN_NAMES)
    known = microbatches.num_tokens[microbatches.num_tokens > 0]
    if hidden is None or not len(known):
        return None
    return Layer(
        num_tokens=int(np.median(known)), hidden=hidden, inner=_told(told, INNER_NAMES), tp=tp
    )


def device_of(ranks: Iterable[RankInfo]) -> Device | None:
    """Return the device that all ranks have; None where they differ or it is not known."""
    kinds = {(info.device_name, info.dtype) for info in ranks}
    if len(kinds) != 1:
        return None
    ((name, dtype),) = kinds
    flops, bandwidth = peak_flops_per_s(name, dtype), memory_bytes_per_s(name)
    size = element_bytes(dtype)
    if flops is None or bandwidth is None or size is None:
        return None
    return Device(name=name, flops_per_s=flops, bytes_per_s=bandwidth, element_bytes=size)


def _told(manifests: tuple[RankManifest, ...], names: frozenset[str]) -> int | None:
    # Ranks of equal settings share one mapping.
    contents = {id(manifest.settings): manifest.settings for manifest in manifests}
    found = {
        value
        for settings in contents.values()
        for name, value in settings.items()
        if name.startswith(CONFIG) and name.rpartition(".")[2] in names
    }
    if len(found) != 1:
        return None
    (value,) = found
    return int(value) if value.isascii() and value.isdigit() and int(value) > 0 else None
