"""What the ingest routes do: let in, decode, check, store, and answer for each cut."""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ..errors import StoreError, WireError
from ..http.tokens import Role
from ..store.writer import CutState, StoreWriter
from ..wire.codec import TABLES, CutBatch, WireLimits
from ..wire.sizes import check_inflated_size
from .commit import GroupCommit
from .decoder import DecoderPool
from .request_bodies import Body, ByteBudget, check_declared, declared_bytes, read_body, spool_body
from .resume import resume_page
from .retryable import StoreTrouble, check_room, free_bytes, is_data_fault
from .row_commit import RowCommit
from .rows import parsed_rows, runs_of
from .shared_memory import mapped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from fastapi import Request

    from ..http.tokens import Grant
    from ..identity import Row
    from ..spool.cut import CutKey
    from ..store.store import Store

MIB = 1 << 20
MAX_ROWS_BODY_BYTES = 8 * MIB
MAX_DECODERS = 4
CONFLICT_KIND = "conflict"
MAX_TOLD_CONFLICTS = 10_000
DELETED = "deleted"


SELECT_OWNER = """
SELECT owner FROM owners WHERE run_id = {run_id:String} ORDER BY at_ns, owner LIMIT 1
"""

MAX_KNOWN = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """How much is let in."""

    wire: WireLimits = field(default_factory=WireLimits)
    """Of one body."""

    max_wire_bytes_under_way: int = 64 * MIB
    """Of all requests together; more are refused."""

    max_inflated_bytes_under_way: int = 64 * MIB
    """Of all that is decoded and not yet stored; more waits, as it came, a tenth as large."""

    room_patience_s: float = 10.0
    """How long it waits."""

    num_decoders: int = field(
        default_factory=lambda: max(1, min(MAX_DECODERS, (os.cpu_count() or 2) // 2))
    )


@dataclass(slots=True, kw_only=True)
class IngestCounts:
    """What came in since the start; for the metrics."""

    num_requests: int = 0
    num_bytes: int = 0
    num_spans: int = 0
    num_bad_rows: int = 0
    num_unknown_columns: int = 0
    """Bodies that told columns of which this code knows nothing; they were left out."""

    cuts: dict[str, int] = field(default_factory=dict)
    """By what became of them."""

    refusals: dict[int, int] = field(default_factory=dict)
    """By status."""


class IngestService:
    """Stores what agents send. One event loop calls it.

    Args:
        store: An open store; the caller closes it after this.
        is_deleted: Whether a run was deleted, so that nothing of it is taken any more.
        placed: Adds to a row of ``ranks`` what the server knows of the place.
        limits: How much is let in.
        say: Tells a line to whoever runs the server.
        monotonic_s: Clock for the pauses while the store can't be written to.
        unix_ns: Clock for when rows were written.
        free: Room on the store's disk, in bytes.
        writer: Writes cuts into the store; None: one of its own.
    """

    def __init__(  # noqa: PLR0913  # effects come in here
        self,
        store: Store,
        *,
        is_deleted: Callable[[str], bool] = lambda _: False,
        placed: Callable[[Row], Row] = lambda row: row,
        limits: ServiceLimits | None = None,
        say: Callable[[str], None] = lambda _: None,
        monotonic_s: Callable[[], float] = time.monotonic,
        unix_ns: Callable[[], int] = time.time_ns,
        free: Callable[[Path], int] = free_bytes,
        writer: StoreWriter | None = None,
    ) -> None:
        self._store = store
        self._is_deleted = is_deleted
        self._placed = placed
        self._limits = limits or ServiceLimits()
        self._say = say
        self._unix_ns = unix_ns
        self._free = free
        self.trouble = StoreTrouble(monotonic_s, say=say)
        self.counts = IngestCounts()
        self.wire_budget = ByteBudget(
            self._limits.max_wire_bytes_under_way, what="bytes of requests"
        )
        self.inflated_budget = ByteBudget(
            self._limits.max_inflated_bytes_under_way, what="bytes of decoded rows"
        )
        self._writer = writer or StoreWriter(store, unix_ns=unix_ns)
        self._owners = Owners(store, unix_ns=unix_ns)
        self.decoders = DecoderPool(self._limits.num_decoders, say=say)
        self.commit = GroupCommit(self._write, trouble=self.trouble)
        self.row_commit = RowCommit(self._write_rows, trouble=self.trouble)
        self._threads = ThreadPoolExecutor(
            max_workers=self._limits.num_decoders + 2, thread_name_prefix="decode"
        )
        self._told_conflicts: set[CutKey] = set()

    def start(self) -> None:
        """Begin to store."""
        self.commit.start()
        self.row_commit.start()

    def close(self) -> None:
        """Store what was let in, and end every thread and process."""
        self.commit.close()
        self.row_commit.close()
        self.decoders.close()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def why_not_ready(self) -> str | None:
        """Return why nothing can be stored just now; None where it can."""
        if not (self.commit.is_running and self.row_commit.is_running):
            return "the ingest thread has ended"
        return self.trouble.reason

    async def take_spans(self, request: Request, grant: Grant) -> tuple[int, dict[str, Any]]:
        """Return the status and the document that answer a body of cuts.

        Raises:
            WireError: The body can't be taken.
            BusyError: Nothing can be taken just now.
        """
        limits = self._limits.wire
        check_declared(request, max_bytes=limits.max_wire_bytes)
        self.trouble.check()
        declared = declared_bytes(request)
        with self.wire_budget.taking(limits.max_wire_bytes if declared is None else declared):
            body = await spool_body(request, max_bytes=limits.max_wire_bytes)
            with body:
                return await self._take_body(body, grant)

    async def take_rows(self, table: str, request: Request, grant: Grant) -> dict[str, Any]:
        """Store descriptions and return the document that says so. Raises as `take_spans`."""
        check_declared(request, max_bytes=MAX_ROWS_BODY_BYTES)
        self.trouble.check()
        declared = declared_bytes(request)
        with self.wire_budget.taking(MAX_ROWS_BODY_BYTES if declared is None else declared):
            body = await read_body(request, max_bytes=MAX_ROWS_BODY_BYTES)
            rows = await self._aside(parsed_rows, table, body)
            self._check_scope(grant, runs_of(rows))
            placed = await self._aside(self._checked_rows, table, rows, owner_of(grant))
            done = asyncio.wrap_future(self.row_commit.submit(table, placed))
            num_stored = await asyncio.shield(done)
        return {"schema": 1, "num_rows": num_stored}

    async def resume(
        self, run_id: str, grant: Grant, *, after: int, ranks: Sequence[int]
    ) -> dict[str, Any]:
        """Return what is held of a run. Raises as `take_spans`."""
        self._check_scope(grant, {run_id})
        page: dict[str, Any] = await self._aside(self._resume, run_id, after, tuple(ranks))
        return page

    def count_refusal(self, status: int) -> None:
        """Note that a request was refused."""
        self.counts.refusals[status] = self.counts.refusals.get(status, 0) + 1

    async def _aside(self, work: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401
        """Run what takes time in a thread; a store that fails there is told as busy."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, work, *arguments)
        except StoreError as error:
            if is_data_fault(error):
                raise WireError(422, f"the store refuses the rows: {error}") from error
            raise self.trouble.failed(error) from error

    async def _take_body(self, body: Body, grant: Grant) -> tuple[int, dict[str, Any]]:
        limits = self._limits.wire
        self.counts.num_requests += 1
        self.counts.num_bytes += body.num_bytes
        inflated = await self._aside(_inflated_bytes, body, limits)
        room = self.inflated_budget.waiting(inflated, patience_s=self._limits.room_patience_s)
        async with room:
            batch = await self._aside(self.decoders.decode, body.descriptor, limits)
            return await self._store_batch(batch, grant)

    async def _store_batch(self, batch: CutBatch, grant: Grant) -> tuple[int, dict[str, Any]]:
        runs = {key.run_id for key in batch.keys}
        self._check_scope(grant, runs)
        verdicts = await self._aside(self._verdicts, runs, owner_of(grant))
        kept = [place for place, key in enumerate(batch.keys) if key.run_id not in verdicts]
        states = [verdicts.get(key.run_id, "") for key in batch.keys]
        if kept:
            part = batch if len(kept) == len(batch.keys) else _selected(batch, kept)
            done = asyncio.wrap_future(self.commit.submit(part))
            for place, state in zip(kept, await asyncio.shield(done), strict=True):
                states[place] = str(state)
        self._count(batch, states)
        return _status(states), _document(batch, states)

    def _verdicts(self, runs: set[str], owner: str | None) -> dict[str, str]:
        """Return what becomes of the cuts of runs that take nothing from this sender."""
        found: dict[str, str] = {}
        for run_id in runs:
            if self._is_deleted(run_id):
                found[run_id] = DELETED
            elif not self._owners.may_write(run_id, owner):
                found[run_id] = CutState.CONFLICT
        return found

    def _check_scope(self, grant: Grant, runs: set[str]) -> None:
        outside = sorted(run_id for run_id in runs if not grant.covers(run_id))
        if outside:
            raise WireError(403, f"this token is not for run {outside[0]}; nothing was stored")

    def _write(self, batches: Sequence[CutBatch]) -> list[list[CutState]]:
        check_room(self._store.path, free=self._free)
        states = self._writer.store(batches)
        for batch, of_batch in zip(batches, states, strict=True):
            for key, state in zip(batch.keys, of_batch, strict=True):
                if state is CutState.CONFLICT:
                    self._conflict(key)
        return states

    def _checked_rows(self, table: str, rows: list[Row], owner: str | None) -> list[Row]:
        """Return rows as they are stored, if this sender may store them."""
        verdicts = self._verdicts(runs_of(rows), owner)
        for run_id, verdict in verdicts.items():
            if verdict == DELETED:
                raise WireError(410, f"run {run_id} was deleted; nothing was stored")
            raise WireError(409, f"run {run_id} is another owner's; nothing was stored")
        return [self._placed(row) for row in rows] if table == "ranks" else rows

    def _write_rows(self, table: str, rows: Sequence[Row]) -> None:
        check_room(self._store.path, free=self._free)
        self._writer.upsert(table, rows)

    def _resume(self, run_id: str, after: int, ranks: tuple[int, ...]) -> dict[str, Any]:
        return resume_page(self._store, run_id, after=after, ranks=ranks)

    def _conflict(self, key: CutKey) -> None:
        """Say, once a cut, that other bytes came under its key."""
        if key in self._told_conflicts or len(self._told_conflicts) >= MAX_TOLD_CONFLICTS:
            return
        self._told_conflicts.add(key)
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

    def _count(self, batch: CutBatch, states: Sequence[str]) -> None:
        counts = self.counts
        counts.num_spans += batch.tables["spans"].num_rows
        counts.num_bad_rows += batch.tables["bad_rows"].num_rows
        counts.num_unknown_columns += bool(batch.unknown_columns)
        for state in states:
            counts.cuts[state] = counts.cuts.get(state, 0) + 1


def _inflated_bytes(body: Body, limits: WireLimits) -> int:
    return check_inflated_size(
        mapped(body.descriptor),
        max_bytes=limits.max_inflated_bytes,
        max_wire_bytes=limits.max_wire_bytes,
    )


def _selected(batch: CutBatch, places: Sequence[int]) -> CutBatch:
    """Return a batch of some of the cuts."""
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
    """Return 200 unless all cuts were refused alike."""
    if states and set(states) == {DELETED}:
        return 410
    if states and set(states) == {CutState.CONFLICT}:
        return 409
    return 200


def _document(batch: CutBatch, states: Sequence[str]) -> dict[str, Any]:
    return {
        "schema": 1,
        "cuts": [
            {"segment": key.segment, "first_row": key.first_row, "state": state}
            for key, state in zip(batch.keys, states, strict=True)
        ],
    }


def owner_of(grant: Grant) -> str | None:
    """Return whom a grant writes for; None where it may write to anybody's runs."""
    if grant.role is Role.ADMIN or grant.token_id is None:
        return None
    return grant.holder.partition("@")[0]


class Owners:
    """The owners of runs, kept in the store.

    Args:
        store: An open store.
        unix_ns: Clock for when a run was claimed.
    """

    def __init__(self, store: Store, *, unix_ns: Callable[[], int] = time.time_ns) -> None:
        self._store = store
        self._unix_ns = unix_ns
        self._known: dict[str, str] = {}

    def may_write(self, run_id: str, owner: str | None) -> bool:
        """Return whether ``owner`` may write to a run; the first who asks owns it.

        Raises:
            StoreError: The claims can't be read or written.
        """
        if owner is None:
            return True
        known = self._known.get(run_id)
        if known is None:
            known = self._read(run_id)
            if known is None:
                claim = {"run_id": run_id, "at_ns": self._unix_ns(), "owner": owner}
                self._store.insert_rows("owners", [claim])
                known = self._read(run_id)  # another collector may have been first
            if known is not None:
                while len(self._known) >= MAX_KNOWN:
                    del self._known[next(iter(self._known))]
                self._known[run_id] = known
        return known == owner

    def _read(self, run_id: str) -> str | None:
        rows = self._store.rows(SELECT_OWNER, {"run_id": run_id})
        return rows[0]["owner"] if rows else None
