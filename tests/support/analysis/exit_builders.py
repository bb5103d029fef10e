"""Runs whose ranks fail, hang or are lost."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rankscope.analysis.trace.context import EventRecord, RankExit, RunContext
from rankscope.analysis.trace.tables import EpochInfo, GroupInfo, RankInfo, RunInfo, StepTable
from rankscope.tracer.topology import Coords, Layout
from tests.support.analysis.tables import table_of

if TYPE_CHECKING:
    from collections.abc import Iterable

SECOND = 1_000_000_000
STEP_NS = 60 * SECOND
RANKS_PER_HOST = 4


def steps_of(*rows: tuple[int, int]) -> StepTable:
    """Return finished steps of a minute: rows of (step, rank) in epoch 0."""
    step, rank = np.array(rows, dtype=np.int64).reshape(-1, 2).T
    return table_of(
        StepTable, step=step, rank=rank, start_ns=step * STEP_NS, end_ns=(step + 1) * STEP_NS
    )


NO_STEPS = steps_of()


def run_of(
    num_ranks: int = 8,
    *,
    num_epochs: int = 1,
    clock_error_ns: int | None = 1_000_000,
    groups: Iterable[GroupInfo] = (),
) -> RunInfo:
    """Return data-parallel ranks, four on each host: h0 has 0 to 3, h1 has 4 to 7."""
    ranks = tuple(
        RankInfo(
            rank=rank,
            coords=Coords(dp=rank),
            host=f"h{rank // RANKS_PER_HOST}",
            local_rank=rank % RANKS_PER_HOST,
        )
        for rank in range(num_ranks)
    )
    return RunInfo(
        run_id="r",
        source_format="rankscope",
        layout=Layout(dp=num_ranks),
        world_size=num_ranks,
        clock_error_ns=clock_error_ns,
        epochs=tuple(
            EpochInfo(epoch=epoch, ranks=ranks, groups=tuple(groups)) for epoch in range(num_epochs)
        ),
    )


def failed(
    rank: int, at_s: float | None, exception: str, message: str = "", *, step: int | None = 41
) -> RankExit:
    return replace(
        lost(rank, at_s, step=step), state="failed", exception=exception, message=message
    )


def lost(
    rank: int, at_s: float | None = 10.0, *, step: int | None = 41, recorded_s: float | None = None
) -> RankExit:
    at_ns, recorded_ns = (
        None if seconds is None else int(seconds * SECOND) for seconds in (at_s, recorded_s)
    )
    return RankExit(
        epoch=0, rank=rank, state="lost", at_ns=at_ns, step=step, recorded_ns=recorded_ns
    )


def timed_out(rank: int, at_s: float = 600.0) -> RankExit:
    """Return the exit that NCCL's watchdog causes."""
    return failed(
        rank,
        at_s,
        "torch.distributed.DistBackendError",
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7,"
        " OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600010 milliseconds",
    )


def cut_off(rank: int, at_s: float = 11.0) -> RankExit:
    """Return the exit that gloo causes if its peer is gone."""
    return failed(
        rank,
        at_s,
        "RuntimeError",
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"
        " [127.0.0.1]:4242",
    )


def context_of(*exits: RankExit, events: Iterable[EventRecord] = ()) -> RunContext:
    ordered = sorted(exits, key=lambda ended: (ended.at_ns is None, ended.at_ns or 0))
    return RunContext(exits=tuple(ordered), events=tuple(events))


def event(rank: int, kind: str, text: str = "", **data: object) -> EventRecord:
    """Return an event at the begin of its step."""
    step = data.get("step")
    at_ns = step * STEP_NS if isinstance(step, int) else 0
    return EventRecord(epoch=0, rank=rank, at_ns=at_ns, kind=kind, text=text, data=data)
