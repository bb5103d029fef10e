"""What the parallel layout itself costs: where tensor parallelism lies, how the batch is cut."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KIND_CODES, SpanKind

from ..arrays.grouping import factorize
from ..breakdown.bubble import bubble_ratio
from ..report.report import Finding
from ..report.text import format_count, format_percent
from ..statistics.phases import MIN_EXCESS_RATIO
from ..trace.devices import element_bytes, memory_bytes_per_s, peak_flops_per_s
from .detector import Cause, Subject

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ..replay.model import ComputeItems, Reading
    from ..trace.context import MicrobatchTable, RankManifest, RunContext
    from ..trace.tables import RankInfo, RunInfo
    from .detector import Record

CERTAIN = 1.0
"""A layout is known, not inferred."""

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


CAUSE = Cause(
    name="layout",
    subject=Subject.JOB,
    sentence="The parallel layout costs time",
    is_alarm=False,
)


def detect(record: Record) -> tuple[Finding, ...]:
    """Return what costs time in the layout; nothing if no step can be replayed."""
    if record.reading is None:
        return ()
    ranks = {info.rank: info for epoch in record.run.epochs for info in epoch.ranks}
    return find_layout_costs(record.run, record.reading, ranks, record.context)


def find_layout_costs(
    run: RunInfo, reading: Reading, ranks: Mapping[int, RankInfo], context: RunContext
) -> tuple[Finding, ...]:
    """Name what costs time in the layout, however healthy the ranks.

    Args:
        run: Its layout.
        reading: Its steps.
        ranks: Where each rank runs.
        context: What the job told of the model and its micro-batches.
    """
    steps = (reading.steps[0], reading.steps[-1])
    found = (
        _tensor_parallel_across_hosts(run, ranks, steps),
        _too_few_microbatches(run, reading.items, steps),
        _too_small_products(run, ranks, context, steps),
    )
    return tuple(finding for finding in found if finding is not None)


def _finding(steps: tuple[int, int], ranks: tuple[int, ...], evidence: str) -> Finding:
    return Finding(
        cause=CAUSE.name,
        ranks=ranks,
        steps=steps,
        slowdown=None,
        recoverable_ratio=None,
        confidence=CERTAIN,
        evidence=evidence,
    )


def _tensor_parallel_across_hosts(
    run: RunInfo, ranks: Mapping[int, RankInfo], steps: tuple[int, int]
) -> Finding | None:
    """Tell tensor-parallel groups that lie on several hosts though a host could hold them.

    What it would win is not told: no such group was traced inside one host.
    """
    if run.layout.tp == 1 or not all(info.host for info in ranks.values()):
        return None
    hosts: dict[tuple[int, int, int], set[str]] = defaultdict(set)
    members: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    on_host: dict[str, int] = defaultdict(int)
    for rank, info in ranks.items():
        key = (info.coords.dp, info.coords.pp, info.coords.cp)
        hosts[key].add(info.host)
        members[key].append(rank)
        on_host[info.host] += 1
    across = [key for key, names in hosts.items() if len(names) > 1]
    if not across or max(on_host.values()) < run.layout.tp:
        return None
    listed = tuple(sorted(rank for key in across for rank in members[key]))
    return _finding(
        steps,
        listed,
        f"{len(across):,} of {format_count(len(hosts), 'tensor-parallel group')} of"
        f" {run.layout.tp} ranks lie on several hosts, though one host has"
        f" {max(on_host.values())} ranks: each all-reduce inside a layer crosses the network",
    )


def _too_few_microbatches(
    run: RunInfo, items: ComputeItems, steps: tuple[int, int]
) -> Finding | None:
    """Tell a pipeline that its micro-batches can't even fill once.

    The bubble over the ideal time is ``(p - 1) / (v m)``, and where the weights' gradients
    W come later ``F + B - W`` of each ``F + B + W`` of it; twice the micro-batches of equal
    size halve it.

    Source: Narayanan et al., arXiv 2104.04473, section 2.2; Qi et al., arXiv 2401.10241, table 2.
    """
    stages, chunks = run.layout.pp, run.layout.vpp
    forward = items.kind == KIND_CODES[SpanKind.FORWARD]
    if stages == 1 or not forward.any():
        return None
    cell, _ = factorize(items.step[forward], items.rank[forward], items.chunk[forward])
    num = int(np.median(np.bincount(cell)))
    if num * chunks >= stages:
        return None
    bubble = bubble_ratio(stages, chunks, num, deferred_ratio=items.deferred_ratio)
    gain = 1.0 - (1.0 + bubble / 2) / (1.0 + bubble)
    return _finding(
        steps,
        (),
        f"{format_count(num, 'micro-batch')} for {stages} stages: the pipeline stands empty for"
        f" {format_percent(bubble)} of the ideal time; twice as many of the same size would take"
        f" {format_percent(gain)} less time each",
    )


def _too_small_products(
    run: RunInfo, ranks: Mapping[int, RankInfo], context: RunContext, steps: tuple[int, int]
) -> Finding | None:
    """Tell matrix products that memory, not arithmetic, bounds, and which cut of them costs more.

    Compared are twice the micro-batch (half as many of them) and half the
    tensor parallelism; told is the one that wins more, from `MIN_EXCESS_RATIO` on.
    """
    device = device_of(ranks.values())
    layer = layer_of(context.manifests, context.microbatches, tp=run.layout.tp)
    if device is None or layer is None:
        return None
    reached = reachable_ratio(layer, device)
    larger = reachable_ratio(replace(layer, num_tokens=2 * layer.num_tokens), device)
    wider = reached
    if layer.tp > 1:
        wider = reachable_ratio(replace(layer, tp=layer.tp // 2), device)
    best = max(larger, wider)
    gain = 1.0 - reached / best
    if gain < MIN_EXCESS_RATIO:
        return None
    smaller = "micro-batches of twice the size, half as many,"
    if wider > larger:
        smaller = f"tensor parallelism of {layer.tp // 2} in place of {layer.tp}"
    rows, depth, columns = layer.products[-1]
    return _finding(
        steps,
        (),
        f"matrix products of {rows} x {depth} x {columns} move more than they compute: memory lets"
        f" them reach {format_percent(reached)} of the peak of {device.name} at best; with"
        f" {smaller} they could reach {format_percent(best)}, {format_percent(gain)} less time in"
        " them",
    )


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
