"""Sets of operations that a caller picks, as masks over a run's operations."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KINDS

from ..arrays.grouping import factorize
from ..readers.bytedance.format import FOLDED
from ..trace.errors import AnalysisError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ..replay.model import Reading, ReplayModel
    from ..trace.tables import RankInfo, RunInfo, SpanTable


class EmptyPartError(AnalysisError):
    """The set that was picked holds no operation of the run."""


class MissingSpansError(AnalysisError):
    """A set is picked by what only the spans tell, and they were not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Which operations: those that every given condition allows. None: any.

    For sets that no conjunction tells, combine the masks of several.
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
    """Communication of the group of this id; the ByteDance format records none."""

    name: str | None = None
    """Communication by its span's name; in the ByteDance format any operation by its type."""


def select_operations(
    part: Part, run: RunInfo, reading: Reading, *, spans: SpanTable | None = None
) -> NDArray[np.bool_]:
    """Return which operations a part holds.

    Args:
        part: The conditions.
        run: Positions and hosts of the ranks.
        reading: The run, read.
        spans: The run's spans; needed for ``group`` and ``name`` only.

    Returns:
        Shape (ops,).

    Raises:
        EmptyPartError: No operation meets them all.
        MissingSpansError: ``group`` or ``name`` was given without the spans.
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
            mask &= _BY[field.name](wanted, run, reading)
    if not mask.any():
        raise EmptyPartError(f"no operation of the run is in {part}: see its layout and its kinds")
    return mask


def select_ranks(run: RunInfo, allowed: Callable[[RankInfo], bool]) -> list[int]:
    """Return the ranks of which something holds in their last epoch, ascending."""
    last = {info.rank: info for epoch in run.epochs for info in epoch.ranks}
    return sorted(rank for rank, info in last.items() if allowed(info))


def _of_ranks(model: ReplayModel, ranks: list[int]) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = np.isin(model.rank, np.array(ranks, dtype=np.int32))
    return found


def _kind(wanted: str, _run: RunInfo, reading: Reading) -> NDArray[np.bool_]:
    model = reading.model
    if wanted not in model.kinds:
        raise EmptyPartError(f"no kind {wanted!r} in this run; it has {', '.join(model.kinds)}")
    found: NDArray[np.bool_] = model.kind == model.kinds.index(wanted)
    return found


def _tp(wanted: int, run: RunInfo, reading: Reading) -> NDArray[np.bool_]:
    return _of_ranks(reading.model, select_ranks(run, lambda info: info.coords.tp == wanted))


def _host(wanted: str, run: RunInfo, reading: Reading) -> NDArray[np.bool_]:
    return _of_ranks(reading.model, select_ranks(run, lambda info: info.host == wanted))


def _worker(wanted: tuple[int, int], _run: RunInfo, reading: Reading) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = (reading.model.dp == wanted[0]) & (reading.model.stage == wanted[1])
    return found


def _step(wanted: int, _run: RunInfo, reading: Reading) -> NDArray[np.bool_]:
    operations = reading.model.operations
    numbers = np.array(operations.steps, dtype=np.int64)
    found: NDArray[np.bool_] = numbers[operations.step] == wanted
    return found


def _link(wanted: tuple[int, int], _run: RunInfo, reading: Reading) -> NDArray[np.bool_]:
    transfers = reading.transfers
    alike = [each.is_pair and each.members == wanted for each in transfers.links]
    # `NO_LINK` picks the last entry.
    return np.array([*alike, False], dtype=np.bool_)[transfers.link_of_operation]


_BY: dict[str, Callable[..., NDArray[np.bool_]]] = {
    "kind": _kind,
    "dp": lambda wanted, _run, reading: reading.model.dp == wanted,
    "tp": _tp,
    "stage": lambda wanted, _run, reading: reading.model.stage == wanted,
    "worker": _worker,
    "rank": lambda wanted, _run, reading: reading.model.rank == wanted,
    "host": _host,
    "step": _step,
    "link": _link,
}


def _by_span(
    model: ReplayModel, spans: SpanTable | None, column: str, wanted: int | str
) -> NDArray[np.bool_]:
    if spans is None:
        raise MissingSpansError(f"a part by {column} needs the run's spans: give spans=")
    if isinstance(wanted, str):
        named = np.array([name == wanted for name in spans.names], dtype=np.bool_)
        rows = np.flatnonzero(named[spans.name]) if len(spans) else np.zeros(0, np.int64)
    else:
        rows = np.flatnonzero(spans.group_id == np.uint64(wanted))
    return _recorded_as(model, spans, rows)


def _recorded_as(
    model: ReplayModel, spans: SpanTable, rows: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Tell which operations are one of these spans: of its rank, kind, start and end."""
    operations = model.operations
    start = spans.start_ns[rows]
    theirs = np.stack(
        (spans.rank[rows], _kinds_of(model, spans)[rows], start, start + spans.duration_ns[rows])
    )
    ours = np.stack((model.rank, model.kind, operations.start_ns, operations.end_ns))
    number, num = factorize(*np.concatenate((theirs, ours), axis=1).astype(np.int64))
    wanted = np.zeros(num, dtype=np.bool_)
    wanted[number[: len(rows)]] = True
    found: NDArray[np.bool_] = wanted[number[len(rows) :]]
    return found


def _kinds_of(model: ReplayModel, spans: SpanTable) -> NDArray[np.int64]:
    """Return each span's kind as the model counts them, -1 where it has no such kind."""
    if model.kinds == tuple(kind.value for kind in KINDS):
        return spans.kind.astype(np.int64)
    of_name = [FOLDED.get(name, name) for name in spans.names]
    codes = [model.kinds.index(name) if name in model.kinds else -1 for name in of_name]
    return np.array(codes, dtype=np.int64)[spans.name]
