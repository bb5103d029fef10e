"""Ingest service: admits, decodes, checks and stores what agents send, and answers for each cut."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ..bounds import MAX_WORLD_SIZE
from ..errors import StoreError, WireError
from ..http.tokens import Role, owner_name
from ..read.control import ControlRequests
from ..read.runs import read_world_sizes
from ..spool.cut import ProcessFacts
from ..store.ledger import CutState
from ..store.resume import resume_page
from ..store.writer import StoreWriter
from ..wire.codec import TABLES, CutBatch, WireLimits, decode_batch
from .admission import ByteBudget, declared_bytes, read_body, too_large
from .backoff import StoreBackoff, check_disk_space, free_bytes, is_row_error
from .commit import MIN_INTERVAL_S, GroupCommit
from .rows import PROCESSES, parse_rows, runs_of
from .screening import screen

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from fastapi import Request

    from ..http.tokens import Grant
    from ..identity import Row
    from ..spool.cut import CutKey
    from ..store.store import Store

MIB = 1 << 20
MAX_ROWS_BODY_BYTES = 8 * MIB
NUM_THREADS = 4
SPANS, HEARTBEATS = "spans", "heartbeats"
CONFLICT_KIND = "conflict"
MAX_LOGGED_CONFLICTS = 10_000
DELETED = "deleted"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """Limits of admission."""

    wire: WireLimits = field(default_factory=WireLimits)
    """Limits of one body."""

    max_wire_bytes_in_progress: int = 64 * MIB
    """Budget of all bodies as received; a request beyond it is refused."""

    max_inflated_bytes_in_progress: int = 64 * MIB
    """Budget of all rows that are decoded and not yet stored, exceeded by the last body only. Other
    bodies wait as received, which takes a tenth of the memory."""

    budget_timeout_s: float = 10.0
    """Longest wait for the second budget."""

    insert_interval_s: float = MIN_INTERVAL_S
    """Time between two inserts of few rows into one table."""


@dataclass(slots=True, kw_only=True)
class IngestCounts:
    """Counters since the start, for the metrics."""

    num_requests: int = 0
    num_bytes: int = 0
    num_spans: int = 0
    num_bad_rows: int = 0
    cuts: dict[str, int] = field(default_factory=dict)
    """Cuts by state."""

    refusals: dict[int, int] = field(default_factory=dict)
    """Refused requests by status."""


def owner_of(grant: Grant) -> str | None:
    """Return the owner that a token writes as; None if it may write to every run."""
    if grant.role is Role.ADMIN or grant.token_id is None:
        return None
    return owner_name(grant.holder)


class IngestService:
    """Stores what agents send. One event loop calls it.

    Args:
        store: An open store, closed by the caller after this.
        writer: Writer of cuts, shared with all others that write to the store in this process;
            None: a new one.
        is_deleted: Returns whether a run was deleted; nothing of it is stored any more.
        placed: Adds what the server knows of a rank's place to a row of table ``ranks``.
        to_examine: Returns those of some hosts whose agents are to examine them now; the answer to
            their heartbeats says so.
        monotonic_s: Clock of the pauses while the store cannot be written to.
    """

    def __init__(  # noqa: PLR0913  # effects come in here
        self,
        store: Store,
        *,
        writer: StoreWriter | None = None,
        is_deleted: Callable[[str], bool] = lambda _: False,
        placed: Callable[[Row], Row] = lambda row: row,
        to_examine: Callable[[Iterable[str]], Sequence[str]] = lambda _: (),
        limits: ServiceLimits | None = None,
        say: Callable[[str], None] = lambda _: None,
        monotonic_s: Callable[[], float] = time.monotonic,
        unix_ns: Callable[[], int] = time.time_ns,
        free: Callable[[Path], int] = free_bytes,
    ) -> None:
        self._store = store
        self._writer = writer or StoreWriter(store, unix_ns=unix_ns)
        self._is_deleted = is_deleted
        self._placed = placed
        self._to_examine = to_examine
        self._limits = limits or ServiceLimits()
        self._say = say
        self._unix_ns = unix_ns
        self._free = free
        self.backoff = StoreBackoff(monotonic_s, say=say)
        self.counts = IngestCounts()
        self.wire_budget = ByteBudget(
            self._limits.max_wire_bytes_in_progress, what="bytes of requests"
        )
        self.inflated_budget = ByteBudget(
            self._limits.max_inflated_bytes_in_progress, what="bytes of decoded rows"
        )
        self._owners = self._writer.owners
        self._requests = ControlRequests(store)
        self._decoding = ByteBudget(1, what="bodies to decode")
        self.commit: GroupCommit[Any, Any] = GroupCommit(
            self._write, backoff=self.backoff, min_interval_s=self._limits.insert_interval_s
        )
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="requests")
        self._logged_conflicts: set[CutKey] = set()
        self._logged_notes: set[str] = set()

    def start(self) -> None:
        """Start the thread that stores."""
        self.commit.start()

    def close(self) -> None:
        """Store what was admitted, and end every thread."""
        self.commit.close()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def why_not_ready(self) -> str | None:
        """Return why nothing can be stored now; None if rows can be stored."""
        if not self.commit.is_running:
            return "the ingest thread has ended"
        return self.backoff.reason

    async def take_spans(self, request: Request, grant: Grant) -> tuple[int, dict[str, Any]]:
        """Store a body of cuts; return the status and the document of the answer.

        Raises:
            WireError: The body is rejected.
            BusyError: Nothing can be taken now.
        """
        timeout_s = self._limits.budget_timeout_s
        async with AsyncExitStack() as held:
            max_bytes = self._limits.wire.max_wire_bytes
            body = await held.enter_async_context(self._admitted(request, max_bytes=max_bytes))
            self.counts.num_requests += 1
            self.counts.num_bytes += len(body)
            # One at a time: decoding is several times as fast as storing.
            async with self._decoding.wait_and_take(1, timeout_s=timeout_s):
                batch = await self._in_thread(_decode, body, self._limits.wire)
                room = self.inflated_budget.wait_and_take(batch.num_bytes, timeout_s=timeout_s)
                await held.enter_async_context(room)
            return await self._store_batch(batch, grant)

    async def take_rows(self, table: str, request: Request, grant: Grant) -> dict[str, Any]:
        """Store a body of descriptions; return the document of the answer.

        Raises:
            WireError: The body is rejected.
            BusyError: Nothing can be taken now.
        """
        async with self._admitted(request, max_bytes=MAX_ROWS_BODY_BYTES) as body:
            rows = await self._in_thread(parse_rows, table, body)
            self._check_scope(grant, runs_of(rows))
            if table == PROCESSES:
                placements = await self._in_thread(self._place, rows, owner_of(grant))
                return {"schema": 1, "num_rows": len(rows), "placements": placements}
            checked = await self._in_thread(self._check_rows, table, rows, owner_of(grant))
            done = self.commit.submit(table, checked, num_rows=len(checked))
            num_stored = await asyncio.shield(asyncio.wrap_future(done))
        answer: dict[str, Any] = {"schema": 1, "num_rows": num_stored}
        if table == HEARTBEATS:
            if requests := await self._in_thread(self._requests_for, checked):
                answer["requests"] = requests
            hosts = {row["host"] for row in rows}
            if wanted := await self._in_thread(self._to_examine, hosts):
                answer["to_examine"] = list(wanted)
        return answer

    def _requests_for(self, heartbeats: Sequence[Row]) -> list[dict[str, object]]:
        """Return the requests to the ranks of some heartbeats."""
        ranks_by_run: dict[str, set[int]] = {}
        for row in heartbeats:
            ranks_by_run.setdefault(row["run_id"], set()).add(row["rank"])
        return self._requests.documents(ranks_by_run)

    @asynccontextmanager
    async def _admitted(self, request: Request, *, max_bytes: int) -> AsyncIterator[bytes]:
        """Return a body whose bytes count as in progress for the duration of the block."""
        declared = declared_bytes(request)
        if declared is not None and declared > max_bytes:
            raise too_large(max_bytes)
        self.backoff.check()
        with self.wire_budget.take(max_bytes if declared is None else declared):
            yield await read_body(request, max_bytes=max_bytes)

    async def resume(
        self, run_id: str, grant: Grant, *, after: int, ranks: Sequence[int]
    ) -> dict[str, Any]:
        """Return a page of what the store holds of a run.

        Raises:
            WireError: The token is for other runs, or the run has another owner.
            BusyError: The store cannot be read now.
        """
        self._check_scope(grant, {run_id})
        if not await self._in_thread(self._owners.may_read, run_id, owner_of(grant)):
            raise WireError(409, f"run {run_id} has another owner")
        read = partial(resume_page, self._store, run_id, after=after, ranks=tuple(ranks))
        page: dict[str, Any] = await self._in_thread(read)
        return page

    def count_refusal(self, status: int) -> None:
        """Count a refused request."""
        self.counts.refusals[status] = self.counts.refusals.get(status, 0) + 1

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401
        """Run slow work in a thread; a failure of the store there becomes a `BusyError`."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, work, *arguments)
        except StoreError as error:
            if is_row_error(error):
                raise WireError(422, f"the store rejects the rows: {error}") from error
            raise self.backoff.failed(error) from error

    async def _store_batch(self, batch: CutBatch, grant: Grant) -> tuple[int, dict[str, Any]]:
        runs = {key.run_id for key in batch.keys}
        self._check_scope(grant, runs)
        refused = await self._in_thread(self._refused_runs, runs, owner_of(grant))
        kept = [place for place, key in enumerate(batch.keys) if key.run_id not in refused]
        states = [refused.get(key.run_id, "") for key in batch.keys]
        if kept:
            part = batch if len(kept) == len(batch.keys) else _select_cuts(batch, kept)
            done = self.commit.submit(SPANS, part, num_rows=part.num_rows)
            stored = await asyncio.shield(asyncio.wrap_future(done))
            for place, state in zip(kept, stored, strict=True):
                states[place] = str(state)
        counts = self.counts
        counts.num_spans += batch.tables["spans"].num_rows
        counts.num_bad_rows += batch.tables["bad_rows"].num_rows
        for state in states:
            counts.cuts[state] = counts.cuts.get(state, 0) + 1
        cuts = [
            {"segment": key.segment, "first_row": key.first_row, "state": state}
            for key, state in zip(batch.keys, states, strict=True)
        ]
        return _status(states), {"schema": 1, "cuts": cuts}

    def _refused_runs(self, runs: set[str], owner: str | None) -> dict[str, str]:
        """Return the runs of which this sender may store nothing, with the state of their cuts."""
        refused: dict[str, str] = {}
        for run_id in runs:
            if self._is_deleted(run_id):
                refused[run_id] = DELETED
            elif not self._owners.may_write(run_id, owner):
                refused[run_id] = CutState.CONFLICT
        return refused

    def _check_scope(self, grant: Grant, runs: set[str]) -> None:
        outside = sorted(run_id for run_id in runs if not grant.covers(run_id))
        if outside:
            raise WireError(403, f"this token is not for run {outside[0]}; nothing was stored")

    def _write(self, table: str, requests: Sequence[Any]) -> Sequence[Any]:
        """Store the requests of one insert; return the result of each."""
        check_disk_space(self._store.path, free=self._free)
        if table == SPANS:
            states = self._writer.store(requests)
            for batch, batch_states in zip(requests, states, strict=True):
                for key, state in zip(batch.keys, batch_states, strict=True):
                    if state is CutState.CONFLICT:
                        self._record_conflict(key)
            return states
        self._writer.upsert(table, [row for rows in requests for row in rows])
        return [len(rows) for rows in requests]

    def _check_rows(self, table: str, rows: list[Row], owner: str | None) -> list[Row]:
        """Return the rows to store, if this sender may store them."""
        for run_id, state in self._refused_runs(runs_of(rows), owner).items():
            if state == DELETED:
                raise WireError(410, f"run {run_id} was deleted; nothing was stored")
            raise WireError(409, f"run {run_id} has another owner; nothing was stored")
        for host, boot_id in {(row["host"], row["boot_id"]) for row in rows if table == "clock"}:
            if not self._owners.may_write_clock(host, boot_id, owner):
                raise WireError(409, f"the clock of host {host} has another owner; nothing stored")
        if table in {"ranks", "groups"}:
            _check_world(rows, read_world_sizes(self._store, runs_of(rows)))
        now_ns = self._unix_ns()  # a revision in the future would pin its row
        rows = [
            {**row, "revision": min(row["revision"], now_ns)} if "revision" in row else row
            for row in rows
        ]
        return [self._placed(row) for row in rows] if table == "ranks" else rows

    def _place(self, rows: list[Row], owner: str | None) -> list[Row | None]:
        """Return where each process is stored; it becomes its owner's there."""
        placements = self._writer.place(
            [ProcessFacts(**row) for row in rows],
            lambda run_id: self._owners.may_write(run_id, owner),
        )
        notes = {placement.note for placement in placements if placement and placement.note}
        for note in notes - self._logged_notes:
            if len(self._logged_notes) < MAX_LOGGED_CONFLICTS:
                self._logged_notes.add(note)
                self._say(note)
        return [None if placement is None else asdict(placement) for placement in placements]

    def _record_conflict(self, key: CutKey) -> None:
        """Log and store, once per cut, that other bytes came under its key."""
        if key in self._logged_conflicts or len(self._logged_conflicts) >= MAX_LOGGED_CONFLICTS:
            return
        self._logged_conflicts.add(key)
        text = (
            f"other bytes came for rows {key.first_row} to {key.end_row} of segment {key.segment}:"
            " the first are kept"
        )
        self._say(f"run {key.run_id}, rank {key.rank}: {text}")
        event = {
            "run_id": key.run_id,
            "epoch": key.epoch,
            "rank": key.rank,
            "at_ns": self._unix_ns(),
            "kind": CONFLICT_KIND,
            "text": text,
            "data": "{}",
            "process": key.process,
            "line": key.first_row,
        }
        self._writer.upsert("events", [event])


def _check_world(rows: Sequence[Row], sizes: Mapping[tuple[str, int], int]) -> None:
    """Raise if a rank or a member is beyond the world size that its run has declared."""
    for place, row in enumerate(rows):
        size = sizes.get((row["run_id"], row["epoch"]), MAX_WORLD_SIZE)
        rank = row["rank"] if "rank" in row else max(row.get("members", [0]))
        if rank >= size:
            raise WireError(422, f"row {place}: rank {rank} is beyond the world size of {size}")


def _decode(body: bytes, limits: WireLimits) -> CutBatch:
    batch = decode_batch(body, limits=limits)
    try:
        return screen(batch)
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise WireError(422, f"the body cannot be decoded: {error}") from error


def _select_cuts(batch: CutBatch, places: Sequence[int]) -> CutBatch:
    tables = {
        table: pa.concat_tables([batch.rows(table, place) for place in places]) for table in TABLES
    }
    offsets = {
        table: np.concatenate([[0], np.cumsum(np.diff(ends)[list(places)])]).astype(np.int64)
        for table, ends in batch.offsets.items()
    }
    return CutBatch(
        keys=tuple(batch.keys[place] for place in places),
        sha256=tuple(batch.sha256[place] for place in places),
        num_torn=tuple(batch.num_torn[place] for place in places),
        tables=tables,
        offsets=offsets,
    )


def _status(states: Sequence[str]) -> int:
    """Return 200, or the status of a refusal if all cuts have that state."""
    if states and set(states) == {DELETED}:
        return 410
    if states and set(states) == {CutState.CONFLICT}:
        return 409
    return 200
