"""Requests to the ranks of a run: through the spool of this host, or through the store."""

from __future__ import annotations

import json
import secrets
import time
from contextlib import suppress
from dataclasses import asdict, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol

from rankscope.analysis.report.text import format_count, format_ranges
from rankscope.collector.client.served_store import ServedStore
from rankscope.collector.errors import CollectorError
from rankscope.collector.read.control import ControlRequests, read_answers
from rankscope.collector.spool.control import (
    ACCEPTED,
    ControlAnswer,
    ControlRequest,
    find_answer,
    read_control_request,
    request_ranks,
)
from rankscope.collector.spool.descriptions import RUNNING
from rankscope.collector.spool.folder import all_process_folders
from rankscope.collector.spool.process import ProcessFiles
from rankscope.collector.store.location import data_folder

from ..errors import BadInputError
from ..sources.store_source import StoreSource
from .changes import change_router
from .holder import ask_holder, refusal
from .page_alerts import NOT_ALLOWED, may_change
from .reports import find_run

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

    from fastapi import APIRouter

    from rankscope.collector.store.store import Store

PATH = "/v1/control"
TIMEOUT_S = 60
POLL_S = 1.0


class Road(Protocol):
    """Way of a request to the ranks, and of their answers back."""

    def send(self, request: ControlRequest) -> tuple[int, ...]:
        """Send a request, and return the ranks that are to answer.

        Raises:
            BadInputError: No running rank can get it.
        """

    def answers(self, name: str) -> list[ControlAnswer]:
        """Return the answers to a request so far."""


class SpoolRoad:
    """The control files and events in the spools of this host.

    Args:
        spools: Folders with one folder per run.
    """

    def __init__(self, run_id: str, spools: Sequence[Path]) -> None:
        self._processes = [
            (spool, files)
            for spool in spools
            for files in _read_processes(spool)
            if files.run_id == run_id and not files.has_ended()
        ]
        self._answers: list[tuple[str, ControlAnswer]] = []

    @property
    def has_ranks(self) -> bool:
        """Return whether a rank of the run is running here."""
        return bool(self._processes)

    def send(self, request: ControlRequest) -> tuple[int, ...]:
        """Write the control files of the ranks."""
        here = {files.identity.rank for _, files in self._processes}
        check_ranks(request, here, where="on this host")
        return tuple(request_ranks([files for _, files in self._processes], request))

    def answers(self, name: str) -> list[ControlAnswer]:
        """Read the new events of the processes."""
        answers = []
        for spool, files in self._processes:
            for _, event in files.events.read():
                row = {"rank": files.identity.rank, "text": "", "data": {}, **event}
                answer = find_answer(row, name)
                if answer is not None and "path" in answer.data:
                    path = str(spool / str(answer.data["path"]))
                    answer = replace(answer, data={**answer.data, "path": path})
                if answer is not None:
                    answers.append(answer)
        self._answers += [(name, answer) for answer in answers]
        return [answer for known, answer in self._answers if known == name]


class StoreRoad:
    """A store, whose collectors pass requests to the agents of other hosts.

    Args:
        store: The store, opened for reading.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._run_id = ""

    def send(self, request: ControlRequest) -> tuple[int, ...]:
        """Store the request, by the server that holds the store if one does."""
        source = StoreSource(self._store)
        if find_run(source, request.run_id).state != RUNNING:
            raise BadInputError(f"run {request.run_id} has ended: no rank can answer")
        epochs = source.run_info(request.run_id).epochs
        ranks = {info.rank for info in max(epochs, key=lambda each: each.epoch).ranks}
        check_ranks(request, ranks, where=f"in run {request.run_id}")
        if isinstance(self._store, ServedStore):
            server, body = self._store.server, json.dumps(asdict(request))
            answer = ask_holder(server, "POST", PATH, timeout_s=TIMEOUT_S, body=body)
            if answer.status != HTTPStatus.OK:
                raise refusal(server, answer)
        elif self._store.path is not None:
            raise BadInputError(
                f"no server collects run {request.run_id}: give --spool DIR, the folder into which"
                " its ranks on this host write"
            )
        else:
            ControlRequests(self._store).add(request)
        self._run_id = request.run_id
        return tuple(sorted(rank for rank in ranks if request.concerns(rank)))

    def answers(self, name: str) -> list[ControlAnswer]:
        """Read the events of the run."""
        return read_answers(self._store, self._run_id, name)


def open_road(run_id: str, *, spool: Path | None, open_store: Callable[[], Store]) -> Road:
    """Return the way to the ranks of a run.

    Args:
        spool: Its spool on this host. None: that of `rankscope run`, or else the store.

    Raises:
        BadInputError: No rank of the run is running in the given spool.
    """
    road = SpoolRoad(run_id, [*_job_spools()] if spool is None else [spool])
    if road.has_ranks:
        return road
    if spool is not None:
        raise BadInputError(f"no rank of run {run_id} is running in {spool}")
    return StoreRoad(open_store())


def wait_for_answers(
    road: Road,
    request: ControlRequest,
    ranks: Collection[int],
    *,
    wait_s: float,
) -> Iterator[ControlAnswer]:
    """Yield the answers as they come, one for each rank and state, until each rank is done.

    Args:
        ranks: Ranks that are to answer.
        wait_s: Longest time.
    """
    until_s = time.monotonic() + wait_s
    seen: set[tuple[int, str]] = set()
    open_ranks = set(ranks)
    while open_ranks:
        for answer in road.answers(request.name):
            if (answer.rank, answer.state) not in seen:
                seen.add((answer.rank, answer.state))
                if answer.state != ACCEPTED:
                    open_ranks.discard(answer.rank)
                yield answer
        if not open_ranks or time.monotonic() >= until_s:
            return
        time.sleep(POLL_S)


def name_request() -> str:
    """Return a new name."""
    return secrets.token_hex(6)


def check_ranks(request: ControlRequest, ranks: Collection[int], *, where: str) -> None:
    """Check that all ranks of a request exist.

    Raises:
        BadInputError: One does not.
    """
    missing = [rank for rank in request.ranks if rank not in ranks]
    if missing:
        raise BadInputError(
            f"rank {format_ranges(missing)} is not running {where}: give some of"
            f" {format_ranges(sorted(ranks))}"
        )


def request_of_rank(store: Store, run_id: str, rank: int, level: str, *, steps: int) -> str:
    """Request something of a rank, for a page; return what was done, or why not."""
    if not may_change():
        return NOT_ALLOWED
    if find_run(StoreSource(store), run_id).state != RUNNING:
        return "The run has ended: no rank can answer."
    request = ControlRequest(
        run_id=run_id, name=name_request(), level=level, steps=steps, ranks=(rank,),
        by="the page",
    )  # fmt: skip
    ControlRequests(store).add(request)
    return f"Requested for {format_count(steps, 'step')}. The rank answers within some ten seconds."


def control_router(store: Store) -> APIRouter:
    """Return the route ``POST /v1/control``, for administrators."""
    requests = ControlRequests(store)

    def apply(request: ControlRequest) -> str:
        requests.add(request)
        return f"requested: {request.name}"

    return change_router(
        PATH, read_control_request, apply, summary="Record more of some ranks for a few steps"
    )


def _job_spools() -> Iterator[Path]:
    """Yield the spools of the jobs of `rankscope run` on this host."""
    with suppress(OSError):
        for job in sorted((data_folder() / "jobs").iterdir()):
            if (job / "spool").is_dir():
                yield job / "spool"


def _read_processes(spool: Path) -> Iterator[ProcessFiles]:
    with suppress(OSError):
        for folder in all_process_folders(spool):
            with suppress(OSError, CollectorError):
                yield ProcessFiles(folder)
