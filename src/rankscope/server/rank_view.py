"""Details of one rank, and a quantity of all ranks, from the rows of a store."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.analysis.breakdown.device_time import average_kernels
from rankscope.analysis.report.liveness import (
    MAX_SHOWN,
    RECENT_NS,
    SILENT_NS,
    RankLiveness,
    SilentRank,
)
from rankscope.collector.read.control import read_requests_of_rank
from rankscope.collector.read.heartbeats import read_oldest_heartbeats
from rankscope.collector.read.ranks import (
    read_closed_bounds,
    read_heartbeat,
    read_hosts,
    read_peer_samples,
    read_rank,
    read_rank_events,
    read_rank_groups,
    read_rank_kinds,
    read_rank_samples,
    read_rank_values,
    read_reported,
    read_unfinished,
)
from rankscope.collector.spool.descriptions import LOST, RUNNING
from rankscope.dashboard.records.rank_details import (
    KindSeries,
    OpenOperation,
    RankDetails,
    RankEvent,
    RankGroup,
    RankQuantity,
    RankRequest,
    RankValues,
    SampleSeries,
)
from rankscope.tracer.span import COMM_KINDS, KINDS, NS_PER_S, SpanKind

from ..sources.incidents import read_host_history
from ..sources.store_source import kernel_records
from .reports import find_run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from rankscope.analysis.report.device_time import Kernel
    from rankscope.analysis.report.report import RankStepExcess, RunReport
    from rankscope.analysis.trace.tables import SpanSource
    from rankscope.collector.identity import Row
    from rankscope.collector.store.store import Store
    from rankscope.tracer.topology import Coords

MAX_STEPS = 200
"""Steps of a rank's figures: each has several pixels."""

MAX_PEERS = 256
"""Ranks of the same stage whose median is read: that of more differs little."""

MAX_SAMPLED_PEERS = 32
"""Peers whose samples are read."""

MAX_BUCKETS = 300
"""Points of one sampled quantity."""

MAX_EVENTS, MAX_ALIKE = 30, 3
"""Newest events, and those of one kind: the trainer writes one of its pace every 5 steps."""

MAX_REQUESTS = 5
MAX_EVENT_BYTES = 20_000
"""Of the data of one event: a traceback, or the stacks of many threads."""

MAX_OPEN, OPEN_STEPS = 20, 8
MAX_MEMBERS = 64
MAX_FINDINGS = 30
MAX_PROCESSES = 8

DEFAULT_STEPS = 20
"""Newest steps of a quantity if the page names none."""

COUNTERS = (
    *("-packets", "-errors", "-events", "-frames", "-ticks", "-sent-bytes", "-received-bytes"),
    *("disk-read-bytes", "disk-written-bytes", "swap-in-bytes", "swap-out-bytes"),
)
"""Ends of the names of counters in docs/samples.md."""

PROCESS = "process-cpu-cores"

LIVENESS_AGE_NS = 2_000_000_000
LIVENESS_AGE_FACTOR = 10
"""All clients share a liveness for `LIVENESS_AGE_NS`, and for this many times the time that reading
it took."""

QUANTITIES: dict[RankQuantity, tuple[str, tuple[SpanKind, ...]]] = {
    RankQuantity.WAIT: ("wait", tuple(sorted(COMM_KINDS))),
    RankQuantity.EXPOSED: ("exposed", tuple(sorted(COMM_KINDS))),
    RankQuantity.HOST: ("busy", (SpanKind.DATA, SpanKind.GC, SpanKind.CHECKPOINT)),
}
"""Column of the rollups and kinds of spans of each quantity."""


class RankView:
    """Ranks of the runs of a store, as pages show them."""

    def __init__(self, source: SpanSource, store: Store) -> None:
        self._source = source
        self._store = store
        self._lock = threading.Lock()
        self._liveness: tuple[str, int, RankLiveness | None] = ("", 0, None)
        """Run, end of validity and result of the last request."""

    def rank_details(self, report: RunReport, rank: int) -> RankDetails | None:
        """Return what is stored of a rank; None if it is unknown.

        No process of a lost run is running: its last record says so, and no other came.
        """
        details = read_rank_details(self._store, report.run, rank, report.coords)
        if details is not None and report.device_time is not None:
            details = replace(details, kernels=self._kernels(report, details))
        if details is None or details.exit_state != RUNNING:
            return details
        is_lost = find_run(self._source, report.run).state == LOST
        return replace(details, exit_state=LOST) if is_lost else details

    def _kernels(self, report: RunReport, details: RankDetails) -> tuple[Kernel, ...]:
        steps = frozenset(report.steps)
        first, last = min(steps, default=0), max(steps, default=0)
        records = [
            record
            for record in kernel_records(
                self._store, report.run, first=first, last=last, rank=details.rank
            )
            if record.step in steps
        ]
        return average_kernels(
            records,
            num_rank_steps=len({record.step for record in records}),
            device_names=(details.device_name,),
        )

    def rank_values(
        self, report: RunReport, quantity: RankQuantity, *, steps: tuple[int, int] | None
    ) -> RankValues | None:
        """Return a quantity of all ranks, mean of closed steps; None if there is none."""
        return read_quantity(self._store, report, quantity=quantity, steps=steps)

    def liveness(self, run_id: str) -> RankLiveness | None:
        """Return the liveness of a live run's ranks; None if it has no heartbeats."""
        now_ns = time.time_ns()
        with self._lock:
            last_run, until_ns, liveness = self._liveness
            if last_run != run_id or now_ns >= until_ns:
                liveness = read_liveness(self._store, run_id, now_ns=now_ns)
                took_ns = time.time_ns() - now_ns
                age_ns = max(LIVENESS_AGE_NS, LIVENESS_AGE_FACTOR * took_ns)
                self._liveness = run_id, now_ns + age_ns, liveness
        return liveness


def read_liveness(store: Store, run_id: str, *, now_ns: int) -> RankLiveness | None:
    """Return the liveness of a run's ranks; None if the store has no heartbeats of them.

    ``now_ns`` is the Unix time of the collector's clock.
    """
    rows = read_oldest_heartbeats(
        store,
        run_id,
        recent_ns=now_ns - RECENT_NS,
        silent_ns=now_ns - SILENT_NS,
        most=MAX_SHOWN,
    )
    if not rows:
        return None
    return RankLiveness(
        **_pick(rows[0], "num_ranks", "num_recent", "num_silent"),
        silent=tuple(
            SilentRank(
                **_pick(row, "rank", "host", "state"),
                step=row["step"] if row["step"] >= 0 else None,
                age_ns=now_ns - row["newest_ns"],
            )
            for row in rows
            if row["newest_ns"] < now_ns - SILENT_NS
        ),
    )


def read_rank_details(
    store: Store, run_id: str, rank: int, coords: Mapping[int, Coords]
) -> RankDetails | None:
    """Return what is stored of a rank in its newest epoch; None if it is unknown."""
    place = read_rank(store, run_id, rank)
    if place is None:
        return None
    epoch, host = place["epoch"], place["host"]
    bounds = read_closed_bounds(store, run_id, epoch, most=MAX_STEPS)
    peers = _peers(rank, coords)
    groups = read_rank_groups(store, run_id, rank, epoch=epoch, most=MAX_MEMBERS)
    names = {row["group_id"]: row["name"] for row in groups}
    events = read_rank_events(
        store,
        run_id,
        rank,
        epoch=epoch,
        host=host,
        most=MAX_EVENTS,
        most_alike=MAX_ALIKE,
        most_bytes=MAX_EVENT_BYTES,
    )
    last = bounds[-1]["step"] if bounds else 0
    unfinished = read_unfinished(
        store, run_id, rank, epoch=epoch, first=max(0, last - OPEN_STEPS), most=MAX_OPEN
    )
    beat = read_heartbeat(store, run_id, rank)
    now_ns = time.time_ns()
    stored_ns = read_reported(store, run_id, rank, epoch=epoch)
    reported_ns = max(stored_ns or 0, beat["at_ns"] if beat else 0)
    samples: list[Row] = []
    alike: list[Row] = []
    if bounds and host:
        window: Any = {
            "host": host,
            "span_ns": (bounds[0]["begin_ns"], bounds[-1]["end_ns"]),
            "buckets": MAX_BUCKETS,
        }
        samples = read_rank_samples(store, run_id, device=place["local_rank"], **window)
        some = peers[:: len(peers) // MAX_SAMPLED_PEERS + 1]
        alike = read_peer_samples(store, run_id, epoch=epoch, ranks=some, **window)
    return RankDetails(
        rank=rank,
        **{name: place[name] for name in place if name != "epoch"},
        heartbeat=None if beat is None else (beat["state"], beat["step"], now_ns - beat["at_ns"]),
        reported=(reported_ns, now_ns - reported_ns) if reported_ns else None,
        steps=tuple(row["step"] for row in bounds),
        num_peers=len(peers),
        kinds=_kinds(store, run_id, rank, epoch, bounds, peers) if bounds else (),
        samples=_series(samples, alike, bounds),
        processes=_processes(samples),
        events=tuple(
            RankEvent(
                **_pick(row, "at_ns", "kind", "text", "num_alike"), detail=_detail(row["data"])
            )
            for row in events
        ),
        requests=tuple(
            RankRequest(
                at_ns=each.at_ns,
                level=each.request.level,
                num_steps=each.request.steps,
                by=each.request.by,
                state="" if each.answer is None else each.answer.state,
                text="" if each.answer is None else each.answer.text,
            )
            for each in read_requests_of_rank(store, run_id, rank, most=MAX_REQUESTS)
        ),
        open_operations=tuple(
            OpenOperation(
                **_pick(row, "name", "kind", "step", "start_ns"),
                group=names.get(row["group_id"], ""),
            )
            for row in unfinished
        ),
        groups=tuple(
            RankGroup(**_pick(row, "name", "kind", "num_members"), members=tuple(row["members"]))
            for row in groups
        ),
        host_findings=read_host_history(store, host, most=MAX_FINDINGS),
    )


def read_quantity(
    store: Store, report: RunReport, *, quantity: RankQuantity, steps: tuple[int, int] | None
) -> RankValues | None:
    """Return a quantity of all ranks, mean of the steps in a range; None without any.

    Forward and backward of the rollups include what a rank waits inside them, so compute is that of
    the diagnosis, of the analysed steps, and so is the evidence. The others are of closed steps.

    Args:
        steps: First and last step; None: the newest `DEFAULT_STEPS`.
    """
    run_id, epoch = report.run, report.epochs[-1]
    hosts = read_hosts(store, run_id, epoch)
    if quantity is RankQuantity.COMPUTE:
        return _mean_excess(report.excess, quantity, steps, hosts)
    if quantity is RankQuantity.EVIDENCE:
        seen = report.evidence
        return None if seen is None else _mean_excess(seen, quantity, steps, hosts)
    bounds = read_closed_bounds(store, run_id, epoch, most=1_000_000 if steps else DEFAULT_STEPS)
    numbers = [row["step"] for row in bounds]
    if steps is not None:
        numbers = [step for step in numbers if steps[0] <= step <= steps[1]]
    if not numbers:
        return None
    column, kinds = QUANTITIES[quantity]
    span = numbers[0], numbers[-1]
    sums = read_rank_values(store, run_id, epoch=epoch, kinds=kinds, column=column, steps=span)
    return RankValues(
        quantity=quantity,
        steps=span,
        seconds={rank: total / len(numbers) / NS_PER_S for rank, total in sums.items()},
        hosts=hosts,
    )


def _mean_excess(
    excess: RankStepExcess,
    quantity: RankQuantity,
    steps: tuple[int, int] | None,
    hosts: Mapping[int, tuple[str, str]],
) -> RankValues | None:
    shown = [
        column
        for column, step in enumerate(excess.steps)
        if steps is None or steps[0] <= step <= steps[1]
    ]
    shown = shown if steps is not None else shown[-DEFAULT_STEPS:]
    if not shown:
        return None
    chosen = excess.excess_ns[:, shown]
    known = ~np.isnan(chosen)
    sums, num = np.where(known, chosen, 0.0).sum(axis=1), known.sum(axis=1)
    mean_s = sums / np.maximum(num, 1) / NS_PER_S
    seconds: dict[int, float] = {}
    for row in np.flatnonzero(num).tolist():
        for rank in excess.links[row] if excess.links else (excess.ranks[row],):
            seconds[rank] = max(seconds.get(rank, -np.inf), float(mean_s[row]))
    return RankValues(
        quantity=quantity,
        steps=(excess.steps[shown[0]], excess.steps[shown[-1]]),
        seconds=seconds,
        hosts=hosts,
    )


def _pick(row: Row, *columns: str) -> dict[str, Any]:
    return {column: row[column] for column in columns}


def _peers(rank: int, coords: Mapping[int, Coords]) -> list[int]:
    """Return ranks of the same pipeline stage, evenly chosen if they are many."""
    if rank not in coords:
        return []
    alike = [one for one in sorted(coords) if coords[one].pp == coords[rank].pp and one != rank]
    return alike[:: -(-len(alike) // MAX_PEERS) or 1]


def _kinds(
    store: Store, run_id: str, rank: int, epoch: int, bounds: Sequence[Row], peers: list[int]
) -> tuple[KindSeries, ...]:
    span = bounds[0]["step"], bounds[-1]["step"]
    rows = read_rank_kinds(store, run_id, rank, epoch=epoch, steps=span, peers=peers)
    place = {row["step"]: column for column, row in enumerate(bounds)}
    found = []
    for kind, mine in groupby(rows, key=lambda row: row["kind"]):
        own, others = (np.full(len(bounds), np.nan) for _ in range(2))
        for row in mine:
            if row["num_own"]:
                own[place[row["step"]]] = row["own_ns"] / NS_PER_S
            if row["num_peers"]:
                others[place[row["step"]]] = row["peers_ns"] / NS_PER_S
        found.append(KindSeries(kind=SpanKind(kind), own_s=own, peers_s=others))
    return tuple(sorted(found, key=lambda one: KINDS.index(one.kind)))


def _series(
    rows: Sequence[Row], alike: Sequence[Row], bounds: Sequence[Row]
) -> tuple[SampleSeries, ...]:
    peers = {(row["name"], bool(row["is_device"]), row["bucket"]): row for row in alike}
    found = []
    for (name, device), group in groupby(rows, key=lambda row: (row["name"], row["device"])):
        if name.startswith(PROCESS):
            continue
        mine = list(group)
        at_ns = np.array([row["last_ns"] for row in mine], dtype=np.int64)
        beside = [peers.get((name, device >= 0, row["bucket"])) for row in mine]
        is_rate = name.partition(":")[0].endswith(COUNTERS)
        if is_rate:
            change = np.diff(np.array([row["highest"] for row in mine], dtype=np.float64))
            change[change < 0] = np.nan  # the counter began anew
            value = change / (np.maximum(np.diff(at_ns), 1) / NS_PER_S)
            at_ns, beside = at_ns[1:], beside[1:]
        else:
            value = np.array([row["mean"] for row in mine])
        column = "rate" if is_rate else "mean"
        if len(value):
            found.append(
                SampleSeries(
                    name=name,
                    is_rate=is_rate,
                    is_device=device >= 0,
                    at_step=_place_on_steps(at_ns, bounds),
                    value=value,
                    peers=np.array(
                        [np.nan if row is None else row[column] for row in beside], np.float64
                    ),
                )
            )
    return tuple(found)


def _place_on_steps(at_ns: NDArray[np.int64], bounds: Sequence[Row]) -> NDArray[np.float64]:
    """Return times as places on the axis of steps; a step begins at its number."""
    step = np.array([row["step"] for row in bounds] + [bounds[-1]["step"] + 1], dtype=np.float64)
    begin = np.array([row["begin_ns"] for row in bounds] + [bounds[-1]["end_ns"]], dtype=np.int64)
    origin = begin[0]
    place: NDArray[np.float64] = np.interp(
        (at_ns - origin).astype(np.float64), (begin - origin).astype(np.float64), step
    )
    return place


def _processes(rows: Sequence[Row]) -> tuple[tuple[str, float], ...]:
    sums: dict[str, list[float]] = {}
    for row in rows:
        quantity, _, command = row["name"].partition(":")
        if quantity == PROCESS and command:
            sums.setdefault(command, []).append(row["mean"])
    mean = {command: sum(values) / len(values) for command, values in sums.items()}
    busiest = sorted(mean, key=lambda command: -mean[command])[:MAX_PROCESSES]
    return tuple((command, mean[command]) for command in busiest)


def _detail(data: str) -> str:
    """Return an event's traceback, else its data over several lines; "" if there is none."""
    try:
        held: Any = json.loads(data or "{}")
    except ValueError:  # longer than MAX_EVENT_BYTES
        return data
    exception = held.get("exception") if isinstance(held, dict) else None
    if isinstance(exception, dict) and exception.get("traceback"):
        return str(exception["traceback"])
    return json.dumps(held, indent=1, ensure_ascii=False) if held else ""
