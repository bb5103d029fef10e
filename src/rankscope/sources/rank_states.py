"""Open spans and stacks of the ranks of a run at its end, from its events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankscope.collector.read.runs import read_events
from rankscope.collector.read.steps import read_last_steps
from rankscope.tracer.span import FLIGHT_RECORDER, NONE

from ..terminal.rank_states import OpenSpan, RankState
from .frames import find_own_frame, read_frames
from .store_source import to_event

if TYPE_CHECKING:
    from rankscope.analysis.report.report import RunReport
    from rankscope.analysis.trace.tables import RunInfo
    from rankscope.collector.store.store import Store

MAX_STATES = 64
"""Ranks whose state is returned, those that a finding names first: each has a stack."""

MAX_STEP = (1 << 31) - 1

REPORTS_OPEN = frozenset({"stalled", "lost", FLIGHT_RECORDER})


def read_rank_states(
    store: Store, run: RunInfo, report: RunReport, *, rank: int | None = None
) -> tuple[RankState, ...]:
    """Return the states of the ranks in the newest epoch, by rank, without those of unknown state.

    Args:
        report: Its diagnosis: of more than `MAX_STATES` ranks, the named ones are first.
        rank: The only rank. None: all.
    """
    epoch = run.epochs[-1]
    events = [
        to_event(row) for row in read_events(store, run.run_id) if row["epoch"] == epoch.epoch
    ]
    last = read_last_steps(store, run.run_id, epoch.epoch)
    names = {group.group_id: group.name for group in epoch.groups}
    named = set(report.top_finding.ranks)
    ranks = sorted((info.rank for info in epoch.ranks), key=lambda each: (each not in named, each))
    opened = {event.rank: event.data.get("open") for event in events if event.kind in REPORTS_OPEN}
    frames: dict[int, tuple[str, ...]] = {}
    for event in events:
        # A rank has left the stacks of earlier steps than its last one.
        if event.data.get("step", MAX_STEP) >= last.get(event.rank, NONE):
            frames[event.rank] = read_frames(event.kind, event.data) or frames.get(event.rank, ())
    found = [
        RankState(
            rank=each,
            open=_open_spans(opened.get(each), names),
            frames=frames.get(each, ()),
            place=find_own_frame(frames.get(each, ())),
        )
        for each in (ranks[:MAX_STATES] if rank is None else [rank])
    ]
    return tuple(
        sorted((each for each in found if each.open or each.frames), key=lambda each: each.rank)
    )


def _open_spans(entries: Any, names: dict[int, str]) -> tuple[OpenSpan, ...]:  # noqa: ANN401
    """Return the open spans of an event; malformed entries are skipped."""
    found = []
    for entry in entries if isinstance(entries, list) else ():
        try:
            span = OpenSpan(
                name=str(entry["name"]),
                kind=str(entry["kind"]),
                step=int(entry["step"]),
                start_ns=int(entry["start_ns"]),
                seq=int(entry["seq"]),
                group=names.get(int(entry["group_id"], 16), ""),
            )
        except (KeyError, TypeError, ValueError):
            continue
        found.append(span)
    return tuple(sorted(found, key=lambda span: (span.start_ns, span.seq)))
