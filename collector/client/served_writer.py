"""Writing of whole runs into a store: directly, or through the server that holds it."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from ..agent.answers import read_accepted
from ..errors import StoreError
from ..spool.cut import Sink
from ..store.resume import read_resume
from ..store.writer import SELECT_CLOCKS, StoreWriter
from .served_store import ServedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pyarrow as pa

    from ..identity import Row
    from ..spool.cut import Cut, Placement, ProcessFacts, Resume
    from ..store.location import ServerFile
    from ..store.store import Store

CUT_ROWS = 1_000_000
"""Largest number of spans in one insert of this process."""

REQUEST_CUT_ROWS = 100_000
"""Largest number of spans in one request: some 10 MB."""

REQUEST_ROWS = 2_000
"""Largest number of descriptions in one request."""

AGENT = "command"
TIMEOUT_S = 120.0
"""Time for which a request is retried while there is no server."""

BUSY_TIMEOUT_S = 1800.0
"""Time for which it is retried while the server is busy or its disk is full: it may analyse a large
run, and what is to be stored may have taken as long to make."""


class RunWriter(Sink, Protocol):
    """Receiver of an imported or simulated run, or of a spool."""

    cut_rows: int
    """Largest number of spans in one cut."""

    def insert(self, table: str, rows: pa.Table) -> None:
        """Store columns of ``samples`` or ``events``."""
        ...

    def close(self) -> None:
        """Close the connection, if any; the store stays open."""
        ...


def run_writer(store: Store) -> RunWriter:
    """Return a writer into ``store``, which may be a served one."""
    if isinstance(store, ServedStore):
        return ServedWriter(store.server, store)
    return StoreRunWriter(store)


class StoreRunWriter(StoreWriter):
    """Writer into a store of this process."""

    cut_rows = CUT_ROWS

    def insert(self, table: str, rows: pa.Table) -> None:
        """Store columns of ``samples`` or ``events``."""
        if rows.num_rows:
            self._store.insert_arrow(table, rows)

    def close(self) -> None:
        """Do nothing: the caller closes the store."""


class ServedWriter:
    """Writer that sends to the server that holds the store, as an agent does.

    Args:
        store: The store, which `resume` and `clocks` read.
    """

    def __init__(
        self,
        server: ServerFile,
        store: Store,
        *,
        pause: Callable[[float], object] = time.sleep,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        from ..agent.link import Link

        self._store = store
        self._url = server.url
        self._pause = pause
        self._monotonic_s = monotonic_s
        self._link = Link(
            [server.url], agent=AGENT, environment={"RANKSCOPE_TOKEN": server.token or ""}
        )
        self.cut_rows = REQUEST_CUT_ROWS

    def ingest(self, cuts: Sequence[Cut]) -> None:
        """Send cuts, as many in a request as it may have spans.

        Raises:
            StoreError: The server rejects them, or stays busy.
        """
        from ..agent.answers import SETTLED_STATES, read_cut_states
        from ..agent.outbox import cut_batches
        from ..ingest.router import ARROW_TYPE
        from ..wire.codec import encode_cuts

        for batch in cut_batches(cuts, max_rows=self.cut_rows):
            document = self._send("/v1/spans", encode_cuts(batch), ARROW_TYPE)
            for cut, state in zip(batch, read_cut_states(document, batch), strict=True):
                if state not in SETTLED_STATES:
                    raise self._refused(f"a cut of run {cut.key.run_id!r} is in state {state}")

    def place(self, processes: Sequence[ProcessFacts]) -> list[Placement | None]:
        """Ask the server where each process of a spool is stored."""
        from ..agent.answers import read_placements
        from ..agent.outbox import MAX_PLACEMENTS
        from ..ingest.router import JSON_TYPE

        answered: list[Placement | None] = []
        for first in range(0, len(processes), MAX_PLACEMENTS):
            part = processes[first : first + MAX_PLACEMENTS]
            body = json.dumps({"schema": 1, "rows": [asdict(facts) for facts in part]}).encode()
            document = self._send("/v1/rows/processes", body, JSON_TYPE)
            placements = read_placements(document, len(part))
            if placements is None:
                raise self._refused("it runs an older rankscope: restart it with this one")
            answered += placements
        return answered

    def resume(self, run_id: str) -> Resume:
        """Return what the store holds of a run."""
        return read_resume(self._store, run_id)

    def clocks(self) -> list[Row]:
        """Return the first known clock of each host and boot."""
        return self._store.rows(SELECT_CLOCKS)

    def upsert(self, table: str, rows: Sequence[Row]) -> None:
        """Send descriptions.

        Raises:
            StoreError: The server rejects them, or stays busy.
        """
        from ..ingest.router import JSON_TYPE

        for first in range(0, len(rows), REQUEST_ROWS):
            part = [_without_nan(row) for row in rows[first : first + REQUEST_ROWS]]
            body = json.dumps({"schema": 1, "rows": part}, allow_nan=False).encode()
            self._send(f"/v1/rows/{table}", body, JSON_TYPE)

    def insert(self, table: str, rows: pa.Table) -> None:
        """Send columns as rows."""
        self.upsert(table, rows.to_pylist())

    def close(self) -> None:
        """Close the connection; closing it again does nothing."""
        self._link.close()

    def _send(self, path: str, body: bytes, content_type: str) -> Any:  # noqa: ANN401  # a JSON document
        from ..agent.errors import LinkError, RejectedError, RetryLaterError, RunGoneError
        from ..agent.retry import Backoff

        begun_s = self._monotonic_s()
        backoff = Backoff()
        while True:
            try:
                return read_accepted(self._link.post(path, body, content_type=content_type))
            except (RejectedError, RunGoneError) as error:
                raise self._refused(str(error)) from error
            except RetryLaterError as error:
                is_there = not isinstance(error, LinkError) or error.is_late
                timeout_s = BUSY_TIMEOUT_S if is_there else TIMEOUT_S
                left_s = timeout_s - (self._monotonic_s() - begun_s)
                if left_s <= 0:
                    reason = f"not accepted within {timeout_s:.0f} s: {error}"
                    raise self._refused(reason) from error
                self._pause(min(backoff.failed(error.pause_s), left_s))

    def _refused(self, reason: str) -> StoreError:
        return StoreError(f"the server {self._url} that holds the store did not store it: {reason}")


def _without_nan(row: Row) -> Row:
    """Return a row without NaN and infinity, which JSON lacks: the column takes its default."""
    return {
        name: value
        for name, value in row.items()
        if not (isinstance(value, float) and not math.isfinite(value))
    }
