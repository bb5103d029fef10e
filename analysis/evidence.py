"""Evidence of findings: the top one's by rank or link and step, and what proves each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from .arrays.sorting import first_rows, stable_argsort
from .breakdown.waterfall import CODE
from .causes.detector import HostTime, ShownIn
from .causes.order import shown_as
from .replay.model import COMPUTE_KINDS, HOST_KINDS, has_kind
from .report.report import Proof, RankStepExcess

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from .breakdown.waterfall import Waterfall
    from .causes.detector import Case
    from .replay.model import Reading, ReplayModel
    from .report.report import Finding
    from .trace.tables import SpanTable

MAX_LINKS = 512
"""Links of a heat-map, those with the largest excess: a screen has hardly more lines."""


FIRST_OF_BAD = 0.5
"""Share of the largest excess from which an operation is bad: the first such one is the proof,
because later ones may only follow from it."""


def tabulate_evidence(
    finding: Finding, case: Case | None, waterfall: Waterfall
) -> RankStepExcess | None:
    """Return the quantity in which a finding is seen, above what is usual.

    Returns:
        None if that is the compute of each rank, or nothing is known of it.
    """
    shown_in = _shown_in(finding)
    if shown_in is ShownIn.TRANSFERS and case is not None:
        excess_ns = case.links.total_ns - case.links.usual_ns
        slowest = stable_argsort(-np.nansum(excess_ns, axis=1))[:MAX_LINKS]
        return RankStepExcess(
            quantity="transfers",
            baseline="alike links",
            ranks=tuple(range(len(slowest))),
            links=tuple(case.links.links[link].members for link in slowest.tolist()),
            steps=tuple(case.links.steps.tolist()),
            excess_ns=excess_ns[slowest],
        )
    if not isinstance(shown_in, HostTime):
        return None
    parts = [CODE[part] for part in shown_in.parts]
    taken_ns = np.where(waterfall.total_ns > 0, waterfall.time_ns[:, :, parts].sum(axis=2), np.nan)
    axis = 1 if shown_in.is_of_all else 0
    is_known = np.isfinite(taken_ns).any(axis=axis, keepdims=True)
    usual_ns = np.nanmedian(np.where(is_known, taken_ns, 0.0), axis=axis, keepdims=True)
    return RankStepExcess(
        quantity=shown_in.name,
        baseline="the rank's median step" if shown_in.is_of_all else "the step's median rank",
        ranks=tuple(waterfall.ranks.tolist()),
        steps=waterfall.steps,
        excess_ns=taken_ns - usual_ns,
    )


def _shown_in(finding: Finding) -> ShownIn | HostTime | None:
    cause = shown_as(finding)
    return None if cause is None else cause.shown_in


def find_step_begins(spans: SpanTable) -> dict[int, tuple[int, int]]:
    """Return, by step, its newest epoch and the first start of a span in that.

    Args:
        spans: Spans, fastest in the order of (epoch, step).
    """
    changes = (spans.step[1:] != spans.step[:-1]) | (spans.epoch[1:] != spans.epoch[:-1])
    begins = np.flatnonzero(np.append(True, changes))
    first_ns = np.minimum.reduceat(spans.start_ns, begins)
    newest: dict[int, tuple[int, int]] = {}
    columns = (column.tolist() for column in (spans.step[begins], spans.epoch[begins], -first_ns))
    for step, *key in zip(*columns, strict=True):
        newest[step] = max(newest.get(step, tuple(key)), tuple(key))
    return {step: (epoch, -negated) for step, (epoch, negated) in newest.items()}


def with_proofs(
    findings: Iterable[Finding], reading: Reading, begin_by_step: Mapping[int, tuple[int, int]]
) -> tuple[Finding, ...]:
    """Return findings, each with what proves it.

    The proof is the first bad operation of a finding in the step in which it costs most, or None if
    the finding is about no time, or no operation is above its ideal. An operation's excess is its
    time above its ideal in the replay: of compute its duration, of communication its transfer, of
    what a host does the gap before it, or its own time. Pieces of one span of compute count
    together. Of a gap that begins before the step's first span, the part in the step is shown.

    Args:
        begin_by_step: Epoch and begin of each step, as of `find_step_begins`.
    """
    findings = tuple(findings)
    # Sorted once by rank: each of many replicas can have a finding.
    rank = reading.model.rank
    is_named = np.zeros(int(rank.max(initial=-1)) + 1, dtype=np.bool_)
    named = [rank for finding in findings for rank in finding.ranks]
    is_named[[rank for rank in named if rank < len(is_named)]] = True
    rows = np.flatnonzero(is_named[rank])
    rows = rows[stable_argsort(rank[rows])]
    ends = np.cumsum(np.bincount(rank[rows], minlength=len(is_named)))
    by_rank = dict(enumerate(np.split(rows, ends[:-1]))) if len(ends) else {}
    proved = []
    for finding in findings:
        of_ranks = [by_rank[rank] for rank in finding.ranks if rank in by_rank]
        proof = _find_proof(finding, reading, begin_by_step, of_ranks)
        proved.append(replace(finding, proof=proof))
    return tuple(proved)


def _find_proof(
    finding: Finding,
    reading: Reading,
    begin_by_step: Mapping[int, tuple[int, int]],
    of_ranks: list[NDArray[np.int64]],
) -> Proof | None:
    """Return the proof of one finding; ``of_ranks`` has the operations of each of its ranks."""
    model, operations = reading.model, reading.model.operations
    numbers = np.array(operations.steps, dtype=np.int64)
    shown_in = _shown_in(finding)
    if shown_in is None or finding.steps is None:
        return None
    first = np.searchsorted(numbers, finding.steps[0])
    end = np.searchsorted(numbers, finding.steps[1], side="right")
    begin, stop = first_rows(operations.step, len(numbers))[[first, end]].tolist()
    if not finding.ranks:
        rows = np.arange(begin, stop)
    elif of_ranks:
        rows = np.sort(np.concatenate(of_ranks))
        rows = rows[(rows >= begin) & (rows < stop)]
    else:
        return None
    begin_ns, end_ns, over_ns = _excess_of(shown_in, model, rows)
    bad = np.flatnonzero(over_ns > 0)
    if not len(bad):
        return None
    worst = int(np.bincount(operations.step[rows[bad]], weights=over_ns[bad]).argmax())
    bad = bad[operations.step[rows[bad]] == worst]
    if shown_in is ShownIn.COMPUTE and model.span is not None:
        _, whole = np.unique(model.span[rows[bad]], return_inverse=True)
    else:
        whole = np.arange(len(bad))
    excess_ns = np.bincount(whole, weights=over_ns[bad])
    is_bad = excess_ns[whole] >= FIRST_OF_BAD * excess_ns.max()
    chosen = whole[is_bad][begin_ns[bad[is_bad]].argmin()]
    shown = bad[whole == chosen]
    step = operations.steps[worst]
    epoch, step_ns = begin_by_step[step]
    return Proof(
        epoch=epoch,
        step=step,
        rank=int(model.rank[rows[shown[0]]]),
        begin_ns=max(int(begin_ns[shown].min()) - step_ns, 0),
        end_ns=int(end_ns[shown].max()) - step_ns,
        excess_ns=round(float(excess_ns[chosen])),
    )


def _excess_of(
    shown_in: ShownIn | HostTime, model: ReplayModel, rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Return begin, end and excess of what a cause is seen in, shape (rows,) each."""
    operations = model.operations
    begin_ns, end_ns = operations.start_ns[rows], operations.end_ns[rows]
    over_ns = operations.duration_ns[rows] - model.ideal_ns[rows]
    is_host, is_compute = (has_kind(model, kinds, rows) for kinds in (HOST_KINDS, COMPUTE_KINDS))
    if isinstance(shown_in, HostTime):
        gap_ns = operations.gap_ns[rows]
        over_ns = np.where(is_host, over_ns, 0.0) + gap_ns - model.ideal_gap_ns[rows]
        return begin_ns - gap_ns.astype(np.int64), np.where(is_host, end_ns, begin_ns), over_ns
    if shown_in is ShownIn.TRANSFERS:
        transfer_ns = operations.duration_ns[rows].astype(np.int64)
        return end_ns - transfer_ns, end_ns, np.where(is_host | is_compute, 0.0, over_ns)
    return begin_ns, end_ns, np.where(is_compute, over_ns, 0.0)
