"""Sets of operations: how to select them, and what they cost.

Source: arXiv 2505.05713 for S of a set and M of a set made ideal.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from rankscope.tracer.span import KINDS

from ..arrays.grouping import factorize
from ..readers.formats import replay_kind
from ..replay.replayer import ratio, recoverable_ratio
from ..report.report import CulpritComparison
from ..trace.errors import AnalysisError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from ..replay.model import Reading, ReplayModel
    from ..replay.replayer import Replayer, WhatIf
    from ..trace.tables import RankInfo, RunInfo, SpanTable

K = TypeVar("K", int, str)


class EmptyPartError(AnalysisError):
    """The selected set holds no operation of the run."""


class MissingSpansError(AnalysisError):
    """A set is selected by a property of spans, and the spans were not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Conditions on operations, all of which must hold; None allows any value.

    Sets that need more than one such conjunction are combinations of several masks.
    """

    kind: str | None = None
    """As in ``slowdown_by_kind``: ``forward``, ``dp-comm``; ``backward-compute``, ..."""

    dp: int | None = None
    tp: int | None = None
    stage: int | None = None
    worker: tuple[int, int] | None = None
    """(dp, stage)."""

    rank: int | None = None
    host: str | None = None
    step: int | None = None
    link: tuple[int, int] | None = None
    """Transfers from the first rank to the second."""

    group: int | None = None
    """Communication of the group with this id, in a format that records groups."""

    name: str | None = None
    """Communication with this span name; in a format without groups any operation of this type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPrice:
    """Cost of a set: the run as recorded, and without the set's excess."""

    slowdown: float | None
    """S of the set in the device replay; None if it is undefined."""

    recoverable_ratio: float | None
    """``(T - T_without) / (T - T_ideal)`` in the full replay. Negative if the run would take
    longer; None if the recorded run is no slower than the ideal one."""

    steps: tuple[int, ...]
    step_ns: NDArray[np.float64]
    """Shape (steps,): steps of the full replay with the set made ideal."""


def select_operations(
    part: Part, run: RunInfo, reading: Reading, *, spans: SpanTable | None = None
) -> NDArray[np.bool_]:
    """Return the operations that meet all conditions of a part. Shape (ops,).

    Args:
        spans: The run's spans. Needed for the conditions ``group`` and ``name`` only.

    Raises:
        EmptyPartError: No operation meets the conditions.
        MissingSpansError: ``group`` or ``name`` is given without the spans.
    """
    model = reading.model
    mask = np.ones(len(model.operations), dtype=np.bool_)
    for field in fields(part):
        wanted = getattr(part, field.name)
        if wanted is None:
            continue
        if field.name in ("group", "name"):
            mask &= _by_span(model, spans, field.name, wanted)
        else:
            mask &= _CONDITIONS[field.name](wanted, run, reading)
    if not mask.any():
        raise EmptyPartError(
            f"no operation of the run meets {part}: check its layout, its kinds and its steps"
        )
    return mask


def select_ranks(run: RunInfo, condition: Callable[[RankInfo], bool]) -> list[int]:
    """Return the ranks that meet a condition in their last epoch, ascending."""
    return sorted(rank for rank, info in run.ranks.items() if condition(info))


def _on_ranks(
    run: RunInfo, reading: Reading, condition: Callable[[RankInfo], bool]
) -> NDArray[np.bool_]:
    ranks = np.array(select_ranks(run, condition), dtype=np.int32)
    is_on: NDArray[np.bool_] = np.isin(reading.model.rank, ranks)
    return is_on


def _with_kind(wanted: str, _run: RunInfo, reading: Reading) -> NDArray[np.bool_]:
    model = reading.model
    if wanted not in model.kinds:
        raise EmptyPartError(f"no kind {wanted!r} in this run; it has {', '.join(model.kinds)}")
    is_of_kind: NDArray[np.bool_] = model.kind == model.kinds.index(wanted)
    return is_of_kind


def _with_link(wanted: tuple[int, int], _run: RunInfo, reading: Reading) -> NDArray[np.bool_]:
    transfers = reading.transfers
    is_wanted = [link.is_pair and link.members == wanted for link in transfers.links]
    # `NO_LINK` is -1 and picks the last entry.
    return np.array([*is_wanted, False], dtype=np.bool_)[transfers.link_of_operation]


_CONDITIONS: dict[str, Callable[..., NDArray[np.bool_]]] = {
    "kind": _with_kind,
    "dp": lambda wanted, _run, reading: reading.model.dp == wanted,
    "tp": lambda tp, run, reading: _on_ranks(run, reading, lambda info: info.coords.tp == tp),
    "stage": lambda wanted, _run, reading: reading.model.stage == wanted,
    "worker": lambda at, _run, reading: (
        (reading.model.dp == at[0]) & (reading.model.stage == at[1])
    ),
    "rank": lambda wanted, _run, reading: reading.model.rank == wanted,
    "host": lambda host, run, reading: _on_ranks(run, reading, lambda info: info.host == host),
    "step": lambda wanted, _run, reading: (
        np.array(reading.model.operations.steps)[reading.model.operations.step] == wanted
    ),
    "link": _with_link,
}


def _by_span(
    model: ReplayModel, spans: SpanTable | None, column: str, wanted: int | str
) -> NDArray[np.bool_]:
    if spans is None:
        raise MissingSpansError(f"a part by {column} needs the run's spans: give spans=")
    if isinstance(wanted, str):
        has_name = np.array([name == wanted for name in spans.names], dtype=np.bool_)
        rows = np.flatnonzero(has_name[spans.name]) if len(spans) else np.zeros(0, np.int64)
    else:
        rows = np.flatnonzero(spans.group_id == np.uint64(wanted))
    # An operation is one of these spans if it has its rank, kind, start and end.
    operations = model.operations
    start = spans.start_ns[rows]
    theirs = np.stack(
        (spans.rank[rows], _kind_codes(model, spans)[rows], start, start + spans.duration_ns[rows])
    )
    ours = np.stack((model.rank, model.kind, operations.start_ns, operations.end_ns))
    number, num = factorize(*np.concatenate((theirs, ours), axis=1).astype(np.int64))
    is_chosen = np.zeros(num, dtype=np.bool_)
    is_chosen[number[: len(rows)]] = True
    chosen: NDArray[np.bool_] = is_chosen[number[len(rows) :]]
    return chosen


def _kind_codes(model: ReplayModel, spans: SpanTable) -> NDArray[np.int64]:
    """Return each span's kind as a code of the model; -1 if the model has no such kind."""
    if model.kinds[: len(KINDS)] == tuple(kind.value for kind in KINDS):
        return spans.kind.astype(np.int64)
    kinds = [replay_kind(name) for name in spans.names]
    codes = [model.kinds.index(name) if name in model.kinds else -1 for name in kinds]
    return np.array(codes, dtype=np.int64)[spans.name]


def price_part(replayer: Replayer, mask: NDArray[np.bool_]) -> PartPrice:
    """Return what a set costs: what if this rank, link, stage, ... were healthy.

    Args:
        mask: Shape (ops,): the set, as of `select_operations`.
    """
    step_ns, recorded_ns = replayer.full_without(mask), replayer.full_recorded()
    return PartPrice(
        slowdown=part_slowdown(replayer, mask),
        recoverable_ratio=recoverable_ratio(
            float(recorded_ns.mean()), float(step_ns.mean()), float(replayer.full_ideal().mean())
        ),
        steps=replayer.model.operations.steps,
        step_ns=step_ns,
    )


def part_slowdown(replayer: Replayer, mask: NDArray[np.bool_]) -> float | None:
    """Return S of a set: the ideal run with the set's recorded durations, over the ideal run.

    Args:
        mask: Shape (ops,): the set.
    """
    return ratio(float(replayer.put_back(mask).mean()), float(replayer.ideal().mean()))


def slowdown_by_tp(run: RunInfo, replayer: Replayer) -> dict[int, float | None]:
    """Return S of each tp position, with one replay for each."""
    return _slowdown_by(replayer, {rank: coords.tp for rank, coords in run.coords.items()})


def slowdown_by_host(run: RunInfo, replayer: Replayer) -> dict[str, float | None]:
    """Return S of each host with a known name, with one replay for each."""
    hosts = {rank: info.host for rank, info in run.ranks.items() if info.host}
    return _slowdown_by(replayer, hosts)


def slowdown_by_rank(run: RunInfo, replayer: Replayer) -> dict[int, float | None]:
    """Return S of each rank.

    Ranks that differ only in their dp position are replayed at once, so each such set costs as
    much as two replays.
    """
    ideal = float(replayer.ideal().mean())
    replicas: dict[tuple[int, ...], dict[int, int]] = {}
    for rank, at in run.coords.items():
        replicas.setdefault((at.tp, at.pp, at.cp, at.ep), {})[at.dp] = rank
    slowdowns: dict[int, float | None] = {}
    for rank_by_dp in replicas.values():
        mask = np.isin(replayer.model.rank, list(rank_by_dp.values()))
        for dp, times in replayer.put_back_by_dp(mask.astype(np.uint32), 1)[0].items():
            if dp in rank_by_dp:
                slowdowns[rank_by_dp[dp]] = ratio(float(times.mean()), ideal)
    return dict(sorted(slowdowns.items()))


def _slowdown_by(replayer: Replayer, value_of_rank: Mapping[int, K]) -> dict[K, float | None]:
    members: dict[K, list[int]] = {}
    for rank, value in value_of_rank.items():
        members.setdefault(value, []).append(rank)
    return {
        value: part_slowdown(replayer, np.isin(replayer.model.rank, members[value]))
        for value in sorted(members)
    }


def compare_culprits(result: WhatIf) -> CulpritComparison:
    """Compare the workers named by S_w = min(S_dp, S_stage) with those named by the exact S_w.

    Args:
        result: The what-if analysis of a run.
    """
    workers = sorted(result.by_worker_ns)
    exact = np.stack([result.by_worker_ns[worker] for worker in workers])
    shortcut = np.stack(
        [np.minimum(result.by_dp_ns[dp], result.by_stage_ns[stage]) for dp, stage in workers]
    )
    shortcuts = result.worker_slowdowns()
    slowdowns = [shortcuts[worker] or 0.0 for worker in workers]
    return CulpritComparison(
        num_steps=len(result.steps),
        num_different=int((exact.argmax(axis=0) != shortcut.argmax(axis=0)).sum()),
        by_shortcut=workers[int(np.argmax(slowdowns))],
        by_exact=workers[int(exact.mean(axis=1).argmax())],
    )
