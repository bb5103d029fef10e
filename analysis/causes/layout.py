"""Costs of the parallel layout itself, however healthy the ranks are."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KIND_CODES, SpanKind

from ..arrays.grouping import factorize
from ..breakdown.bubble import bubble_ratio
from ..report.report import Finding
from ..report.text import format_bytes, format_count, format_percent
from ..statistics.thresholds import THRESHOLDS
from ..trace.device_peaks import element_bytes, memory_bytes_per_s, peak_flops_per_s
from ..trace.tables import traced_groups
from .detector import Cause, ProofForm, Subject

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from ..replay.model import ComputeItems
    from ..trace.context import MicrobatchTable, RankManifest, RunContext
    from ..trace.tables import RankInfo, RunInfo, SpanTable
    from .detector import Record

CONFIDENCE = 1.0
"""The layout is known, not inferred."""

HIDDEN_NAMES = frozenset({"hidden_size", "hidden", "dim", "d_model", "n_embd"})
INNER_NAMES = frozenset({"intermediate_size", "ffn_hidden_size", "ffn_hidden", "n_inner"})
"""Names of a layer's width, and of the width of its feed-forward part, in the configuration of
Hugging Face, Megatron-LM, torchtitan and GPT-2."""

CONFIG = "config."
FLOPS_PER_MULTIPLY = 2
ALL_REDUCE = "all_reduce"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """Rates of a device that limit a matrix product."""

    name: str
    flops_per_s: float
    bytes_per_s: float
    element_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Sizes of a transformer layer's matrix products on one rank."""

    num_tokens: int
    """Tokens of a micro-batch: the rows."""

    hidden: int
    inner: int | None
    """Width of the feed-forward part; None if unknown."""

    tp: int

    @property
    def products(self) -> tuple[tuple[int, int, int], ...]:
        """Return (rows, depth, columns) of each kind; tensor parallelism divides the columns."""
        widths = (self.hidden,) if self.inner is None else (self.hidden, self.inner)
        return tuple((self.num_tokens, self.hidden, max(width // self.tp, 1)) for width in widths)


CAUSE = Cause(
    name="layout",
    subject=Subject.JOB,
    sentence="The parallel layout costs time",
    is_alarm=False,
    proof_form=ProofForm.HOSTS,
)


def detect(record: Record) -> tuple[Finding, ...]:
    """Return properties of the layout that cost time; nothing if no step can be replayed."""
    if record.reading is None:
        return ()
    run, reading = record.run, record.reading
    steps = (reading.steps[0], reading.steps[-1])
    findings = (
        _tensor_parallel_across_hosts(run, steps),
        _equal_sends_across_hosts(run, record.spans, reading.steps),
        _too_few_microbatches(run, reading.items, steps),
        _too_small_products(run, record.context, steps),
    )
    return tuple(finding for finding in findings if finding is not None)


def _finding(steps: tuple[int, int], ranks: tuple[int, ...], evidence: str) -> Finding:
    return Finding(
        cause=CAUSE.name,
        ranks=ranks,
        steps=steps,
        confidence=CONFIDENCE,
        evidence=evidence,
    )


def _tensor_parallel_across_hosts(run: RunInfo, steps: tuple[int, int]) -> Finding | None:
    """Return tensor-parallel groups that span several hosts although a host has enough ranks.

    The gain is unknown: no such group was traced inside one host.
    """
    ranks = run.ranks
    if run.layout.tp == 1 or not all(info.host for info in ranks.values()):
        return None
    groups = _tensor_parallel_groups(run)
    across = [some for some in groups if len({ranks[rank].host for rank in some}) > 1]
    most = max(Counter(info.host for info in ranks.values()).values())
    if not across or most < run.layout.tp:
        return None
    listed = tuple(sorted(rank for some in across for rank in some))
    return _finding(
        steps,
        listed,
        f"{len(across):,} of {format_count(len(groups), 'tensor-parallel group')} of"
        f" {run.layout.tp} ranks span several hosts, although one host has"
        f" {most} ranks: each all-reduce inside a layer crosses the network",
    )


def _tensor_parallel_groups(run: RunInfo) -> list[tuple[int, ...]]:
    """Return the traced ranks of each tensor-parallel group, ascending."""
    groups: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for rank, info in run.ranks.items():
        groups[info.coords.dp, info.coords.pp, info.coords.cp].append(rank)
    return [tuple(sorted(members)) for members in groups.values()]


def _equal_sends_across_hosts(
    run: RunInfo, spans: SpanTable, numbers: tuple[int, ...]
) -> Finding | None:
    """Return groups whose ranks all send the same activations, or gradients, to another host.

    An all-reduce leaves the same bytes on all members of a group. If the last operation of a
    tensor-parallel group before each send was one of as many bytes as the send, its ranks send
    copies: a part from each, gathered at the receiver, would do. With sequence parallelism the last
    one is a reduce-scatter, and sends that are divided already are smaller: then the trace does not
    show that they are equal. The gain is unknown, because the gathering was not measured.

    Args:
        numbers: Steps that are replayed, ascending.

    Source:
        Narayanan et al., arXiv 2104.04473, section 4.1.
    """
    ranks, size = run.ranks, run.layout.tp
    if size == 1 or not all(info.host for info in ranks.values()):
        return None
    groups = _tensor_parallel_groups(run)
    whole = [some for some in groups if len({ranks[rank].host for rank in some}) == 1]
    group_of = {rank: some for some in whole if len(some) == size for rank in some}
    is_sent = (spans.kind == KIND_CODES[SpanKind.PP_SEND]) & np.isin(spans.step, numbers)
    send = np.flatnonzero(is_sent & (spans.num_bytes > 0))
    is_copy = _follow_all_reduce(
        spans,
        send,
        [group.group_id for group in traced_groups(run) if group.members in group_of.values()],
    )
    pairs, pair = np.unique(
        np.stack((spans.rank[send], spans.dst_rank[send])), axis=1, return_inverse=True
    )
    pair = pair.reshape(-1)  # of two dimensions in numpy 2.0.0
    num_bytes = np.bincount(pair, weights=spans.num_bytes[send]).tolist()
    num_others = np.bincount(pair, weights=~is_copy).tolist()
    sent: dict[tuple[tuple[int, ...], tuple[int, ...]], dict[int, float]] = defaultdict(dict)
    for (src, dst), total, others in zip(pairs.T.tolist(), num_bytes, num_others, strict=True):
        is_across = {src, dst} <= group_of.keys() and ranks[src].host != ranks[dst].host
        if is_across and not others:
            sent[group_of[src], group_of[dst]][src] = total
    copies = {
        source: sum(by_rank.values())
        for (source, _), by_rank in sent.items()
        if len(by_rank) == size and len(set(by_rank.values())) == 1
    }
    if not copies:
        return None
    moved = sum(copies.values()) / len(numbers)
    return _finding(
        (numbers[0], numbers[-1]),
        tuple(sorted(rank for source in copies for rank in source)),
        f"all {size} ranks of {format_count(len(copies), 'tensor-parallel group')} send to another"
        " host what an all-reduce has just made equal on them:"
        f" {format_bytes(round(moved))} a step, of which {format_bytes(round(moved / size))} would"
        f" do, with 1/{size} from each rank and a gathering at the receiver (scatter/gather), or"
        " with sequence parallelism",
    )


def _follow_all_reduce(
    spans: SpanTable, rows: NDArray[np.int64], group_ids: list[int]
) -> NDArray[np.bool_]:
    """Return which rows come after an all-reduce of as many bytes, as the last of these groups."""
    of_group = np.isin(spans.group_id, np.array(group_ids, dtype=np.uint64))
    of_group &= spans.kind == KIND_CODES[SpanKind.TP_COMM]  # a wait has its group, too
    before = np.maximum.accumulate(np.where(of_group, np.arange(len(spans)), -1))[rows]
    is_reduced = np.array([name == ALL_REDUCE for name in spans.names], dtype=np.bool_)
    follows: NDArray[np.bool_] = (before >= 0) & is_reduced[spans.name[before]]
    for column in (spans.epoch, spans.step, spans.rank, spans.num_bytes):
        follows &= column[before] == column[rows]
    return follows


def _too_few_microbatches(
    run: RunInfo, items: ComputeItems, steps: tuple[int, int]
) -> Finding | None:
    """Return a pipeline with fewer micro-batches than stages.

    The ratio of the bubble to the ideal time is ``(p - 1) / (v m)``; if the gradients of the
    weights W are computed later, times ``(F + B - W) / (F + B + W)``. Twice as many micro-batches
    of the same size halve it.

    Source:
        Narayanan et al., arXiv 2104.04473, section 2.2; Qi et al., arXiv 2401.10241, table 2.
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
        f"{format_count(num, 'micro-batch')} for {stages} stages: the pipeline is empty for"
        f" {format_percent(bubble)} of the ideal time; twice as many of the same size would take"
        f" {format_percent(gain)} less time each",
    )


def _too_small_products(
    run: RunInfo, context: RunContext, steps: tuple[int, int]
) -> Finding | None:
    """Return matrix products that memory bounds instead of arithmetic, and the better remedy.

    The remedies are micro-batches of twice the size (half as many of them), and half the tensor
    parallelism. One of them must save `min_excess_ratio` of the products' time.
    """
    device = read_device(run.ranks.values())
    layer = read_layer(context.manifests, context.microbatches, tp=run.layout.tp)
    if device is None or layer is None:
        return None
    reached = reachable_ratio(layer, device)
    larger = reachable_ratio(replace(layer, num_tokens=2 * layer.num_tokens), device)
    wider = reached
    if layer.tp > 1:
        wider = reachable_ratio(replace(layer, tp=layer.tp // 2), device)
    best = max(larger, wider)
    gain = 1.0 - reached / best
    if gain < THRESHOLDS.min_excess_ratio:
        return None
    remedy = "micro-batches of twice the size, half as many,"
    if wider > larger:
        remedy = f"tensor parallelism of {layer.tp // 2} instead of {layer.tp}"
    rows, depth, columns = layer.products[-1]
    return _finding(
        steps,
        (),
        f"matrix products of {rows} x {depth} x {columns} are bound by memory: they reach at most"
        f" {format_percent(reached)} of the peak of {device.name}; with {remedy} they could reach"
        f" {format_percent(best)} and take {format_percent(gain)} less time",
    )


def reachable_ratio(layer: Layer, device: DeviceLimits) -> float:
    """Return the largest share of the device's peak that a layer's products can reach.

    The time of a product of (m, k) by (k, n) has two lower bounds, that of its arithmetic and that
    of moving its operands and its result::

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


def read_layer(
    manifests: Iterable[RankManifest], microbatches: MicrobatchTable, *, tp: int
) -> Layer | None:
    """Return the declared sizes; None if the width or the tokens are unknown."""
    manifests = tuple(manifests)
    hidden = _declared_size(manifests, HIDDEN_NAMES)
    num_tokens = microbatches.num_tokens[microbatches.num_tokens > 0]
    if hidden is None or not len(num_tokens):
        return None
    return Layer(
        num_tokens=int(np.median(num_tokens)),
        hidden=hidden,
        inner=_declared_size(manifests, INNER_NAMES),
        tp=tp,
    )


def read_device(ranks: Iterable[RankInfo]) -> DeviceLimits | None:
    """Return the limits of the device that all ranks have; None if they differ or are unknown."""
    kinds = {(info.device_name, info.dtype) for info in ranks}
    if len(kinds) != 1:
        return None
    ((name, dtype),) = kinds
    flops, bandwidth = peak_flops_per_s(name, dtype), memory_bytes_per_s(name)
    size = element_bytes(dtype)
    if flops is None or bandwidth is None or size is None:
        return None
    return DeviceLimits(name=name, flops_per_s=flops, bytes_per_s=bandwidth, element_bytes=size)


def _declared_size(manifests: tuple[RankManifest, ...], names: frozenset[str]) -> int | None:
    """Return the one size that the configuration declares by these names; None if it is not one."""
    # Ranks of equal settings share one mapping.
    contents = {id(manifest.settings): manifest.settings for manifest in manifests}
    values = {
        value
        for settings in contents.values()
        for name, value in settings.items()
        if name.startswith(CONFIG) and name.rpartition(".")[2] in names
    }
    if len(values) != 1:
        return None
    (value,) = values
    return int(value) if value.isascii() and value.isdigit() and int(value) > 0 else None
