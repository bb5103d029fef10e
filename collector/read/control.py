"""Requests to the ranks of a run, stored as events; agents get them in answers to heartbeats."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from rankscope.tracer.span import NONE, NS_PER_S

from ..errors import CollectorError
from ..spool.control import find_answer, read_control_request

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from ..spool.control import ControlAnswer, ControlRequest
    from ..store.store import Store

REQUEST_KIND = "control-request"
REQUEST_LIFE_NS = 600 * NS_PER_S
"""Time in which the ranks may get a request. Later, no command waits for it."""

MAX_READ = 100
"""Newest requests of a run among which those to a rank are looked for."""

READ_PAUSE_S = 2.0
"""Between two reads of a run's requests: thousands of hosts send heartbeats."""

SELECT_REQUESTS = """
SELECT data FROM events FINAL
WHERE run_id = {run_id:String} AND epoch = -1 AND rank = -1 AND at_ns >= {after_ns:Int64}
    AND kind = {kind:String} AND startsWith(process, 'rankscope-')
ORDER BY at_ns
"""


SELECT_NEWEST_REQUESTS = """
SELECT at_ns, data FROM events FINAL
WHERE run_id = {run_id:String} AND epoch = -1 AND rank = -1
    AND kind = {kind:String} AND startsWith(process, 'rankscope-')
ORDER BY at_ns DESC LIMIT {most:UInt32}
"""

ANSWER_KINDS = ("control", "profile", "stack")
SELECT_ANSWERS = """
SELECT rank, text, data FROM events
WHERE run_id = {run_id:String} AND kind IN {kinds:Array(String)}
    AND position(data, {name:String}) > 0
ORDER BY at_ns, rank
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOfRank:
    """A request to a rank, with its newest answer."""

    at_ns: int
    request: ControlRequest
    answer: ControlAnswer | None


def read_requests_of_rank(
    store: Store, run_id: str, rank: int, *, most: int
) -> tuple[RequestOfRank, ...]:
    """Return the newest requests to a rank, the newest first.

    Raises:
        StoreError: The store could not be read.
    """
    values = {"run_id": run_id, "kind": REQUEST_KIND, "most": MAX_READ}
    found = []
    for row in store.rows(SELECT_NEWEST_REQUESTS, values):
        with suppress(CollectorError, ValueError):  # of another version
            request = read_control_request(json.loads(row["data"]))
            if request.concerns(rank):
                found.append((row["at_ns"], request))
    return tuple(
        RequestOfRank(at_ns=at_ns, request=request, answer=_newest_answer(store, request, rank))
        for at_ns, request in found[:most]
    )


def _newest_answer(store: Store, request: ControlRequest, rank: int) -> ControlAnswer | None:
    answers = read_answers(store, request.run_id, request.name)
    return next((answer for answer in reversed(answers) if answer.rank == rank), None)


def read_answers(store: Store, run_id: str, name: str) -> list[ControlAnswer]:
    """Return what the ranks of a run have answered to a request, in order of time.

    Raises:
        StoreError: The store could not be read.
    """
    values = {"run_id": run_id, "kinds": list(ANSWER_KINDS), "name": name}
    found = (find_answer(row, name) for row in store.rows(SELECT_ANSWERS, values))
    return [answer for answer in found if answer is not None]


class ControlRequests:
    """The requests of a store. Safe to use from several threads."""

    def __init__(
        self,
        store: Store,
        *,
        monotonic_s: Callable[[], float] = time.monotonic,
        unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._store = store
        self._monotonic_s = monotonic_s
        self._unix_ns = unix_ns
        self._read: dict[str, tuple[float, tuple[ControlRequest, ...]]] = {}

    def add(self, request: ControlRequest) -> None:
        """Store a request. Returns when it is on disk."""
        whom = "all ranks" if not request.ranks else f"{len(request.ranks):,} ranks"
        row = {
            "run_id": request.run_id,
            "epoch": NONE,
            "rank": NONE,
            "at_ns": self._unix_ns(),
            "kind": REQUEST_KIND,
            "text": f"{request.level} of {request.steps} steps requested of {whom}",
            "data": json.dumps(asdict(request)),
            "process": f"rankscope-control-{request.name}",
            "line": NONE,
        }
        self._store.insert_rows("events", [row])

    def of_run(self, run_id: str) -> tuple[ControlRequest, ...]:
        """Return the requests of a run that its ranks may still get, the oldest first.

        Raises:
            StoreError: The store could not be read.
        """
        now_s = self._monotonic_s()
        read_s, requests = self._read.get(run_id, (-READ_PAUSE_S, ()))
        if now_s - read_s < READ_PAUSE_S:
            return requests
        values = {
            "run_id": run_id, "kind": REQUEST_KIND, "after_ns": self._unix_ns() - REQUEST_LIFE_NS,
        }  # fmt: skip
        found = []
        for row in self._store.rows(SELECT_REQUESTS, values):
            with suppress(CollectorError, ValueError):  # of another version
                found.append(read_control_request(json.loads(row["data"])))
        self._read[run_id] = now_s, tuple(found)
        return tuple(found)

    def documents(self, ranks_by_run: Mapping[str, Collection[int]]) -> list[dict[str, object]]:
        """Return the requests that concern some ranks, for them alone, as an agent gets them.

        Raises:
            StoreError: The store could not be read.
        """
        documents = []
        for run_id, ranks in ranks_by_run.items():
            for request in self.of_run(run_id):
                theirs = tuple(rank for rank in request.ranks if rank in ranks)
                if theirs or not request.ranks:
                    documents.append(asdict(replace(request, ranks=theirs)))
        return documents
