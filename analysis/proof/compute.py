"""Cards of compute: a rank or device beside its peers, stage against stage, length against time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KIND_CODES, KINDS, SpanKind

from ..arrays.group_stats import sum_cells
from ..arrays.grouping import factorize
from ..arrays.sorting import find_positions
from ..causes.equal_lengths import declared_sizes
from ..report.proof_card import (
    MAX_GROUPS,
    MAX_POINTS,
    PointCloud,
    ProofCard,
    SampleGroup,
    SampleStrip,
)
from ..report.text import format_count
from ..statistics.peers import Basis
from .samples import (
    compare_samples,
    group_samples,
    make_series,
    name_ranks,
    name_steps,
    shown_columns,
    spread,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from ..causes.detector import Case
    from ..replay.model import ComputeItems
    from ..report.report import Finding

SUM = "own compute of a step"
FORWARD, BACKWARD = KIND_CODES[SpanKind.FORWARD], KIND_CODES[SpanKind.BACKWARD]

READINGS = {"gpu-clock-hz": ("clock of the GPU", "Hz"), "gpu-power-w": ("power of the GPU", "W")}
"""Quantity and unit of a reading, by its name in the samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sides:
    """Compute of the culprits and of those that they are compared with."""

    culprits: NDArray[np.int32]
    """Ranks, ascending, as are the peers."""

    peers: NDArray[np.int32]
    label: str
    """The peers in words."""

    is_earlier: bool = False
    """Whether the peers are the culprits themselves, in steps before the finding."""


def compute_card(finding: Finding, case: Case, blamed: Collection[int]) -> ProofCard | None:
    """Return compute of the named ranks beside that of their peers; None without any.

    The strip has the kind of micro-batch in which the ranks lose most, in the step that the proof
    is in, and the series the sums of all kinds.

    Args:
        blamed: Ranks that any finding of compute names, which are no peers.
    """
    items, steps = case.reading.items, case.reading.steps
    sides = _find_sides(finding, case, blamed)
    if sides is None or finding.steps is None:
        return None
    shown = shown_columns(steps, finding.steps)
    total_ns = _totals_ns(items, steps)
    ranks = case.profile.ranks
    mine, theirs = (total_ns[np.isin(ranks, side)] for side in (sides.culprits, sides.peers))
    if sides.is_earlier:
        theirs = np.where(shown, np.nan, theirs)
    label = name_ranks(sides.culprits.tolist())
    strip = _find_strip(items, sides, finding, label)
    return ProofCard(
        strips=() if strip is None else (strip,),
        series=make_series(
            SUM, "ns", steps, culprits=(label, mine), usual=(sides.label, theirs), shown=shown
        ),
    )


def _find_sides(finding: Finding, case: Case, blamed: Collection[int]) -> _Sides | None:
    """Return culprits and peers, by the same baseline as the comparison of the ranks."""
    ranks, stage = case.profile.ranks, case.profile.stage
    is_named = np.isin(ranks, finding.ranks)
    if not is_named.any():
        return None
    culprits, others = ranks[is_named], ~np.isin(ranks, list(blamed))
    same = others & np.isin(stage, stage[is_named])
    basis = {case.profile.basis[row] for row in np.flatnonzero(is_named).tolist()}
    if same.any():
        label = format_count(int(same.sum()), "peer") + " of the same stage"
        return _Sides(culprits=culprits, peers=ranks[same], label=label)
    if basis <= {Basis.STAGES, Basis.FEW_PEERS} and others.any():
        label = format_count(int(others.sum()), "rank") + " of other stages"
        return _Sides(culprits=culprits, peers=ranks[others], label=label)
    label = "the same in other steps"
    return _Sides(culprits=culprits, peers=culprits, label=label, is_earlier=True)


def _totals_ns(items: ComputeItems, steps: tuple[int, ...]) -> NDArray[np.float64]:
    """Return the compute of each rank in each step. Shape (ranks, steps); NaN without any."""
    ranks, numbers = np.unique(items.rank), np.array(steps)
    row, column = find_positions(items.rank, ranks), find_positions(items.step, numbers)
    shape = (len(ranks), len(numbers))
    total = sum_cells(shape, row, column, items.self_ns).astype(np.float64)
    has_any = sum_cells(shape, row, column, np.ones(len(items), dtype=np.int64)) > 0
    return np.where(has_any, total, np.nan)


def _find_strip(
    items: ComputeItems, sides: _Sides, finding: Finding, label: str
) -> SampleStrip | None:
    """Return the kind of micro-batch in which the culprits lose most, in the step of the proof."""
    assert finding.steps is not None  # noqa: S101  # the caller's condition
    step = finding.steps[1] if finding.proof is None else finding.proof.step
    mine = np.flatnonzero((items.step == step) & np.isin(items.rank, sides.culprits))
    if sides.is_earlier:
        is_before = (items.step < finding.steps[0]) | (items.step > finding.steps[1])
        theirs = np.flatnonzero(is_before & np.isin(items.rank, sides.peers))
    else:
        theirs = np.flatnonzero((items.step == step) & np.isin(items.rank, sides.peers))
    best: tuple[float, SampleStrip] | None = None
    rows = np.concatenate((mine, theirs))
    part, num_parts = factorize(items.kind[rows], items.chunk[rows])
    for code in range(num_parts):
        own, other = mine[part[: len(mine)] == code], theirs[part[len(mine) :] == code]
        if not len(own) or not len(other):
            continue
        usual_ns = float(np.median(items.self_ns[other]))
        lost_ns = float(items.self_ns[own].sum()) - usual_ns * len(own)
        kind = KINDS[items.kind[own[0]]].value
        strip = compare_samples(
            f"{kind} of a micro-batch, own compute",
            "ns",
            f"step {step}",
            culprits=(label, items.self_ns[own]),
            usual=(sides.label, items.self_ns[other]),
        )
        if best is None or lost_ns > best[0]:
            best = lost_ns, strip
    return None if best is None else best[1]


def device_card(finding: Finding, case: Case, blamed: Collection[int]) -> ProofCard | None:
    """Return the card of compute, with clock and power of the devices, as far as they were read."""
    card = compute_card(finding, case, blamed)
    if card is None:
        return None
    return replace(card, strips=(*card.strips, *_reading_strips(finding, case)))


def _reading_strips(finding: Finding, case: Case) -> tuple[SampleStrip, ...]:
    """Return clock and power of the named devices beside the others', as far as they were read."""
    samples, steps = case.context.samples, case.reading.steps
    shown = shown_columns(steps, finding.steps)
    bounds_ns = [case.step_ns[step] for step in np.array(steps)[shown].tolist()]
    if not bounds_ns:
        return ()
    within = (samples.at_ns >= bounds_ns[0][0]) & (samples.at_ns <= bounds_ns[-1][1])
    is_mine, is_other = (np.zeros(len(samples), dtype=np.bool_) for _ in range(2))
    for info in case.ranks.values():
        if info.host in samples.hosts:
            host = samples.hosts.index(info.host)
            of_rank = (samples.host == host) & (samples.device == info.local_rank)
            side = is_mine if info.rank in finding.ranks else is_other
            side |= of_rank
    others = format_count(len(case.ranks) - len(finding.ranks), "other rank")
    strips = []
    for code, name in enumerate(samples.names):
        rows = (samples.name == code) & within
        if name not in READINGS or not (rows & is_mine).any():
            continue
        quantity, unit = READINGS[name]
        mine = samples.value[rows & is_mine]
        strips.append(
            compare_samples(
                quantity,
                unit,
                name_steps(steps, shown),
                culprits=(name_ranks(finding.ranks), mine),
                usual=(others, samples.value[rows & is_other]),
            )
        )
    return tuple(strips)


def stage_card(finding: Finding, case: Case) -> ProofCard | None:
    """Return the compute of each stage in the step of the proof; None without other stages."""
    items, steps = case.reading.items, case.reading.steps
    ranks, stage = case.profile.ranks, case.profile.stage
    if finding.steps is None or not np.isin(ranks, finding.ranks).any():
        return None
    total_ns = _totals_ns(items, steps)
    shown = shown_columns(steps, finding.steps)
    slow = np.unique(stage[np.isin(ranks, finding.ranks)])
    others = np.setdiff1d(stage, slow)
    if not len(others) or not shown.any():
        return None
    column = steps.index(finding.proof.step) if finding.proof else int(np.flatnonzero(shown)[-1])
    groups: list[SampleGroup] = []
    for number in slow.tolist():
        of_stage = total_ns[stage == number, column]
        groups += group_samples(f"stage {number}", of_stage, is_culprit=True)
    single = others[: max(MAX_GROUPS - len(groups), 1)] if len(others) < MAX_GROUPS else others[:0]
    for number in single.tolist():
        groups += group_samples(f"stage {number}", total_ns[stage == number, column])
    if not len(single):
        label = f"{len(others):,} other stages"
        groups += group_samples(label, total_ns[np.isin(stage, others), column])
    names = " and ".join(f"stage {number}" for number in slow.tolist())
    label = "the other stage" if len(others) == 1 else f"{len(others):,} other stages"
    return ProofCard(
        strips=(
            SampleStrip(quantity=SUM, unit="ns", steps=f"step {steps[column]}",
                        groups=tuple(groups)),
        ),
        series=make_series(
            SUM,
            "ns",
            steps,
            culprits=(names, total_ns[np.isin(stage, slow)]),
            usual=(label, total_ns[np.isin(stage, others)]),
            shown=shown,
        ),
    )  # fmt: skip


def length_card(finding: Finding, case: Case) -> ProofCard | None:
    """Return time against length of micro-batches, and the slowest beside the median rank.

    Lengths that the loader did not declare show in their forwards: a backward of the same
    micro-batch is as much longer.
    """
    items, steps = case.reading.items, case.reading.steps
    shown = shown_columns(steps, finding.steps)
    if not shown.any():
        return None
    kinds, kind_of = np.unique(items.kind, return_inverse=True)
    longest = int(np.bincount(kind_of, weights=items.self_ns).argmax())
    total_ns = _totals_ns(items, steps)
    is_known = np.isfinite(total_ns).any(axis=0)
    slowest = np.full((1, len(steps)), np.nan)
    slowest[0, is_known] = np.nanmax(total_ns[:, is_known], axis=0)
    last = int(np.flatnonzero(shown)[-1])
    step = steps[last] if finding.proof is None else finding.proof.step
    of_step = total_ns[:, steps.index(step)]
    if not np.isfinite(of_step).any():
        return None
    worst = int(np.nanargmax(of_step))
    others = np.delete(of_step, worst)
    label = f"rank {case.profile.ranks[worst]}, the longest"
    strip = compare_samples(
        SUM,
        "ns",
        f"step {step}",
        culprits=(label, of_step[worst : worst + 1]),
        usual=(format_count(len(others), "other rank"), others),
    )
    return ProofCard(
        strips=(strip,),
        cloud=_find_cloud(case, int(kinds[longest])),
        series=make_series(
            SUM,
            "ns",
            steps,
            culprits=("the longest rank of each step", slowest),
            usual=("median rank", total_ns),
            shown=shown,
        ),
    )


def _find_cloud(case: Case, kind: int) -> PointCloud | None:
    """Return time against length of all micro-batches of one kind, on stages of one work."""
    items = case.reading.items
    sizes, size_noun = declared_sizes(items, case.context.microbatches)
    rows = np.flatnonzero((items.kind == kind) & np.isfinite(sizes))
    stage = case.profile.stage[find_positions(items.rank[rows], case.profile.ranks)]
    if len(rows):
        # A last stage that does more work would be a second line.
        rows = rows[(stage == stage.min()) & (items.chunk[rows] == items.chunk[rows].min())]
        x, x_quantity, x_unit = sizes[rows], size_noun, ""
        y, y_quantity = items.self_ns[rows].astype(np.float64), KINDS[kind].value
    else:
        key, num = factorize(items.step, items.rank, items.chunk, items.microbatch)
        times = np.full((2, num), np.nan)
        for side, code in enumerate((FORWARD, BACKWARD)):
            own = items.kind == code
            times[side, key[own]] = items.self_ns[own]
        x, y = times[:, np.isfinite(times).all(axis=0)]
        x_quantity, x_unit = "forward of the same micro-batch", "ns"
        y_quantity = KINDS[BACKWARD].value
    if not len(x):
        return None
    kept = np.argsort(x, kind="stable")[spread(len(x), MAX_POINTS)]
    return PointCloud(
        x_quantity=x_quantity,
        x_unit=x_unit,
        y_quantity=f"{y_quantity} of one micro-batch",
        y_unit="ns",
        num=len(x),
        x=tuple(x[kept].tolist()),
        y=tuple(y[kept].tolist()),
    )
