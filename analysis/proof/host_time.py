"""Cards of host time: gaps and host spans of a rank beside its peers', or beside other steps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import sum_cells
from ..arrays.sorting import find_positions
from ..breakdown.waterfall import Part
from ..causes.detector import HostTime
from ..causes.order import shown_as
from ..replay.model import EVALUATION_KIND, Place, has_kind
from ..report.proof_card import ProofCard, ProofFact
from ..report.text import format_count, format_ranks
from ..statistics.thresholds import THRESHOLDS
from .samples import compare_samples, make_series, name_ranks, name_steps, shown_columns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ..causes.detector import Case
    from ..report.report import Finding

PLACES: dict[Place, str] = {
    Place.INPUT: "gap before the first compute of a step",
    Place.FORWARD: "gaps before forwards of a step",
    Place.BACKWARD: "gaps before backwards of a step",
    Place.LAUNCH: "gaps before collectives of a step",
    Place.OTHER: "gaps around the optimizer of a step",
    Place.GC: "garbage collection in a step",
    Place.CHECKPOINT: "checkpoint in a step",
    Place.DATA: "data spans of a step",
}
"""Quantity of the gaps in a place. Those in a span of the job's own, or of the compiler, have its
name; those around an evaluation count to it."""

OF_PART = {Place.GC: Part.GC, Place.CHECKPOINT: Part.CHECKPOINT}
"""Places that only a cause has that is shown in such a part of the step."""

LEAST_EXCESS = 0.5
"""Share of a typical pause from which a rank's step counts as one, where ranks take turns."""

MAX_IDS = 12
"""Compile ids that a card lists."""


def host_card(finding: Finding, case: Case) -> ProofCard | None:
    """Return the host time of the named ranks beside that of all others; None without any.

    Of gaps by place and host spans by name, it is what the ranks lose most in. If few ranks are
    named, the steps in which they lose it are compared with the other ranks; if none is, or most
    are because they take turns, pauses are compared with all other steps and ranks.
    """
    steps, ranks = case.reading.steps, case.profile.ranks
    shown = shown_columns(steps, finding.steps)
    is_named = np.isin(ranks, finding.ranks)
    are_few = 0 < is_named.mean() <= THRESHOLDS.majority_share
    worst: tuple[float, str, NDArray[np.float64], NDArray[np.bool_]] | None = None
    for quantity, total_ns in _quantities(finding, case):
        cells = is_named[:, None] & shown if are_few else _pauses(total_ns, shown)
        others = ~is_named[:, None] & shown if are_few else ~cells
        usual_ns = float(np.median(total_ns[others])) if others.any() else 0.0
        lost_ns = float((total_ns[cells] - usual_ns).sum())
        if lost_ns > 0 and (worst is None or lost_ns > worst[0]):
            worst = lost_ns, quantity, total_ns, cells
    if worst is None:
        return None
    _, quantity, total_ns, cells = worst
    if are_few:
        cells &= _pauses(total_ns, cells)
    is_losing: NDArray[np.bool_] = cells.max(axis=0)
    if are_few:
        label = name_ranks(ranks[is_named].tolist())
        if 0 < is_losing.sum() < shown.sum():
            label += f", {is_losing.sum()} of {format_count(int(shown.sum()), 'step')}"
        peers = format_count(int((~is_named).sum()), "other rank")
        others = ~is_named[:, None] & shown
        mine_ns, theirs_ns = total_ns[is_named], total_ns[~is_named]
    else:
        label = f"pauses on {name_ranks(ranks[cells.any(axis=1)].tolist())}"
        peers, others = "all other steps and ranks", ~cells
        mine_ns = total_ns.max(axis=0, keepdims=True)
        theirs_ns = np.where(others, total_ns, np.nan)
    strip = compare_samples(
        quantity,
        "ns",
        name_steps(steps, shown),
        culprits=(label, total_ns[cells]),
        usual=(peers, total_ns[others]),
    )
    label, peers = (label, peers) if are_few else ("longest rank", "median of the rest")
    series = make_series(
        quantity, "ns", steps, culprits=(label, mine_ns), usual=(peers, theirs_ns), shown=is_losing
    )
    return ProofCard(strips=(strip,), series=series)


def _quantities(finding: Finding, case: Case) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """Yield each kind of host time that a cause can be, with its sums, shape (ranks, steps)."""
    gaps, cause = case.gaps, shown_as(finding)
    shown_in = None if cause is None else cause.shown_in
    parts = shown_in.parts if isinstance(shown_in, HostTime) else ()
    for place, quantity in PLACES.items():
        is_of_cause = place not in OF_PART or OF_PART[place] in parts
        if is_of_cause and gaps.is_at(place).any():
            yield quantity, gaps.total_ns(place)
    if Part.EVALUATION in parts:
        model, profile = case.reading.model, case.profile
        rows = np.flatnonzero(has_kind(model, frozenset({EVALUATION_KIND})))
        step = np.array(model.operations.steps)[model.operations.step[rows]]
        row = find_positions(model.rank[rows], profile.ranks)
        column = find_positions(step, profile.steps)
        took_ns = model.operations.duration_ns[rows]
        evaluation_ns = sum_cells(profile.total_ns.shape, row, column, took_ns)
        yield "evaluation in a step", gaps.total_ns(Place.EVALUATION) + evaluation_ns
    if gaps.gaps.name is None:
        return
    in_span = gaps.is_at(Place.SPAN, Place.COMPILATION)
    for code in np.unique(gaps.gaps.name[in_span]).tolist():
        rows = in_span & (gaps.gaps.name == code)
        shape = case.profile.total_ns.shape
        name = gaps.gaps.names[code] if code >= 0 else "host span"
        total_ns = sum_cells(shape, gaps.row[rows], gaps.column[rows], gaps.gaps.gap_ns[rows])
        yield f'span "{name}" in a step', total_ns


def _pauses(total_ns: NDArray[np.float64], shown: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the steps of ranks that pause, among those shown. Shape (ranks, steps).

    Half of all time above the median is lost in steps of ranks that lose at least some time each:
    a pause loses at least half of that.
    """
    over_ns = np.where(shown, np.maximum(total_ns - float(np.median(total_ns)), 0.0), 0.0)
    longest_first = np.sort(over_ns, axis=None)[::-1]
    lost_ns = np.cumsum(longest_first)
    if not len(lost_ns) or lost_ns[-1] <= 0:
        return np.zeros(total_ns.shape, dtype=np.bool_)
    typical_ns = longest_first[np.searchsorted(lost_ns, lost_ns[-1] / 2)]
    is_pause: NDArray[np.bool_] = over_ns >= LEAST_EXCESS * typical_ns
    return is_pause


def recompile_card(finding: Finding, case: Case) -> ProofCard:
    """Return the card of host time, with the compile ids of each named rank, or of all."""
    first, last = finding.steps or (0, -1)
    by_rank: dict[int, dict[str, None]] = {}
    for event in case.context.events:
        is_inside = first <= int(event.data.get("step", -1)) <= last
        identity = event.data.get("compile_id")
        is_named = not finding.ranks or event.rank in finding.ranks
        if event.kind == "compilation" and identity is not None and is_inside and is_named:
            by_rank.setdefault(event.rank, {})[str(identity)] = None
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank, ids in by_rank.items():
        alike.setdefault(tuple(ids), []).append(rank)
    facts = (
        ProofFact(
            label=format_ranks(sorted(ranks)),
            text="compile ids "
            + ", ".join(ids[:MAX_IDS])
            + (f" and {len(ids) - MAX_IDS} more" if len(ids) > MAX_IDS else ""),
            is_culprit=True,
        )
        for ids, ranks in sorted(alike.items(), key=lambda entry: -len(entry[1]))
    )
    return replace(host_card(finding, case) or ProofCard(), facts=tuple(facts))
