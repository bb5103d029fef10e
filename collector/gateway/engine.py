"""Execution of clients' statements in worker threads, within the limits of the gateway.

The engine checks a statement's time only between two blocks of rows, so a function that works for
an hour on one block cannot be ended. Python waits for the threads of an executor at its end, so
the worker threads here are daemons: a stuck one is left behind.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import time
import uuid
import weakref
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from .allowlist import SELECT_COMBINATORS, SELECT_FUNCTIONS, allowed_functions
from .errors import MEMORY_LIMIT_EXCEEDED, TIMEOUT_EXCEEDED, TOO_MANY_QUERIES, QueryError
from .session import ReadOnlySession, purge_engine
from .settings import VALUES, QueryLimits, choose_settings, machine_bytes, resident_bytes
from .statement import check_statement

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from .allowlist import Functions
    from .session import Answer


Result = TypeVar("Result")

KILL = "KILL QUERY WHERE Settings['log_comment'] = {mark:String} ASYNC"
KILL_PAUSE_S = 0.02
KILL_TIMEOUT_S = 10.0
"""Time for which the gateway tries to end the statement of a client that has gone. After it, the
engine's own time limit has to end it."""

GRACE_S = 10.0
"""Time beyond a statement's limit after which its client gets an error. The engine checks the time
only between two blocks of rows, and the worker thread stays occupied until it does."""

WATCH_PAUSE_S = 0.25
"""Between two checks of the server's memory while a statement runs. Statements that were tried took
up to 1 GB/s."""

CLOSE_TIMEOUT_S = 5.0
PARSER_SETTINGS: dict[str, int | str] = {
    "max_threads": 1,
    "max_execution_time": 10,
    "max_query_size": 1 << 20,
    "aggregate_function_input_format": VALUES,
}


@dataclass(frozen=True, slots=True)
class _Work:
    future: Future[Any]
    call: Callable[[], Any]

    def do(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            found = self.call()
        except BaseException as error:  # noqa: BLE001  # raised in the waiting caller
            self.future.set_exception(error)
        else:
            self.future.set_result(found)


class _Worker(threading.Thread):
    """Worker thread of a `Workers`; `stuck_threads` finds them by this class."""


def stuck_threads() -> list[str]:
    """Return the names of living worker threads: the stuck ones, once all workers are closed.

    While one is in the engine, the process must not end in the ordinary way: the engine's shutdown
    may wait for it.
    """
    return [thread.name for thread in threading.enumerate() if isinstance(thread, _Worker)]


class Workers:
    """Pool of worker threads, which start when they are needed.

    Args:
        num_threads: Largest number of threads.
        name: Prefix of the threads' names.
    """

    def __init__(self, num_threads: int, *, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._waiting: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[_Worker] = []
        self._is_closed = False

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Queue a call and return the future of its result.

        Raises:
            RuntimeError: The workers were closed.
        """
        future: Future[Result] = Future()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the workers are closed")
            self._waiting.put(_Work(future, call))
            if len(self._threads) < self._num_threads:
                name = f"{self._name}-{len(self._threads)}"
                thread = _Worker(target=self._run, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def close(self, *, timeout_s: float) -> bool:
        """Cancel queued calls and wait for running ones. May be repeated.

        Returns:
            Whether all threads have ended in time.
        """
        with self._lock:
            self._is_closed = True
            threads = list(self._threads)
        while not self._waiting.empty():
            work = self._waiting.get()
            if work is not None:
                work.future.cancel()
        for _ in threads:
            self._waiting.put(None)
        deadline_s = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _run(self) -> None:
        while True:
            work = self._waiting.get()
            if work is None:
                return
            work.do()
            del work  # otherwise it would keep the result alive until the next call


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryRequest:
    """One statement, as received."""

    text: str
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Bound parameters by name, escaped as ClickHouse does."""

    settings: Mapping[str, str] = field(default_factory=dict)
    default_format: str = "TabSeparated"


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class QueryResult:
    """Result of a statement. Its bytes count as held while this object lives."""

    answer: Answer
    output_format: str
    timezone: str


@dataclass(slots=True, kw_only=True)
class _Deadline:
    """Times for which a statement may wait, and then run."""

    received_s: float
    timeout_s: float
    limit_s: float
    started_s: float | None = None

    def remaining_s(self, now_s: float) -> float:
        """Return the time until the next check; 0 or less if the time is over."""
        if self.started_s is not None:
            return self.started_s + self.limit_s - now_s
        return min(self.received_s + self.timeout_s - now_s, self.limit_s)


class _MemoryShortError(QueryError):
    """The server as a whole uses too much memory for statements to go on."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            MEMORY_LIMIT_EXCEEDED,
            f"the server uses more than {limit_bytes >> 20} MiB, so all running statements were"
            " ended: read fewer rows or columns, and try again",
        )


class QueryEngine:
    """Executes statements on the embedded store, which this process has open.

    Args:
        path: Folder of the store.
        limits: Limits of statements. None: those that fit the memory of the machine or cgroup.
    """

    def __init__(self, path: Path, limits: QueryLimits | None = None) -> None:
        self._path = path
        self._limits = limits or QueryLimits.fitting(machine_bytes())
        self._workers = Workers(self._limits.max_running, name="query")
        self._lock = threading.RLock()  # a result's finalizer may run while this thread holds it
        self._num_present = 0
        self._held_bytes = 0
        self._is_closed = False
        self._parsers: list[ReadOnlySession] = []
        self._local = threading.local()
        self._functions: Functions | None = None
        self._timezone = "UTC"
        self._running: set[str] = set()

    async def answer(self, request: QueryRequest) -> QueryResult:
        """Execute a statement. Cancelling this call ends it.

        Raises:
            QueryError: The statement was refused or failed, or too many are running.
        """
        settings = choose_settings(request.settings, self._limits)
        mark = uuid.uuid4().hex
        deadline = _Deadline(
            received_s=time.monotonic(),
            timeout_s=self._limits.max_seconds + GRACE_S,
            limit_s=int(settings["max_execution_time"]) + GRACE_S,
        )
        running = self._submit(request, settings, mark, deadline)
        try:
            return await self._in_time(running, deadline)
        except (asyncio.CancelledError, _MemoryShortError):
            await self._end(running, mark)
            raise

    async def _in_time(self, running: Future[QueryResult], deadline: _Deadline) -> QueryResult:
        """Return the result, or raise if it is late; the statement may then go on alone."""
        answered = asyncio.wrap_future(running)
        answered.add_done_callback(_retrieve_exception)
        try:
            while not answered.done():
                remaining_s = deadline.remaining_s(time.monotonic())
                if remaining_s > 0:
                    await asyncio.wait({answered}, timeout=min(remaining_s, WATCH_PAUSE_S))
                    if deadline.started_s is not None and not answered.done():
                        await self._check_memory()
                elif deadline.started_s is not None:
                    raise QueryError(TIMEOUT_EXCEEDED, "the statement took longer than its limit")
                elif running.cancel():
                    raise QueryError(TOO_MANY_QUERIES, "other statements take long: try again")
                else:
                    await asyncio.sleep(0)  # it is just starting
            return answered.result()
        finally:
            answered.cancel()  # the statement may outlive the event loop

    async def _check_memory(self) -> None:
        """Raise if the server's memory is short, also without what the engine keeps for reuse."""
        limit_bytes = self._limits.max_resident_bytes
        if resident_bytes() <= limit_bytes:
            return
        with suppress(QueryError):
            await asyncio.to_thread(purge_engine, self._path)
        if resident_bytes() > limit_bytes:
            raise _MemoryShortError(limit_bytes)

    async def _end(self, running: Future[QueryResult], mark: str) -> None:
        """End a statement. One that is still being parsed is ended when it starts to run."""
        deadline_s = time.monotonic() + KILL_TIMEOUT_S
        while not (running.cancel() or running.done()) and time.monotonic() < deadline_s:
            await asyncio.to_thread(self._kill, mark)
            await asyncio.sleep(KILL_PAUSE_S)

    def close(self) -> None:
        """End running statements and all sessions. May be repeated.

        A statement that cannot be ended now is left to its thread, which ends with the process.
        """
        with self._lock:
            self._is_closed = True
            running = list(self._running)
        for mark in running:
            self._kill(mark)
        if not self._workers.close(timeout_s=CLOSE_TIMEOUT_S):
            return
        for parser in self._parsers:
            parser.close()
        self._parsers.clear()

    def _answer(
        self,
        request: QueryRequest,
        settings: Mapping[str, int | str],
        mark: str,
        deadline: _Deadline,
    ) -> QueryResult:
        deadline.started_s = time.monotonic()
        self._check_held()  # results of those before it, for which it has waited
        parser = self._parser()
        statement = check_statement(
            request.text,
            parameters=request.parameters,
            default_format=request.default_format,
            functions=self._allowed_functions(parser),
            handle=parser,
        )
        handle = ReadOnlySession(self._path, {**settings, "log_comment": mark})
        with self._lock:
            self._running.add(mark)
        try:
            answer = handle.answer(statement.sql, statement.output_format, request.parameters)
        finally:
            with self._lock:
                self._running.discard(mark)
            handle.close()
        result = QueryResult(
            answer=answer, output_format=statement.output_format, timezone=self._timezone
        )
        num_bytes = len(answer.view)
        with self._lock:
            self._held_bytes += num_bytes
        weakref.finalize(result, self._release_bytes, num_bytes)
        return result

    def _submit(
        self,
        request: QueryRequest,
        settings: Mapping[str, int | str],
        mark: str,
        deadline: _Deadline,
    ) -> Future[QueryResult]:
        limit = self._limits.max_running + self._limits.max_waiting
        with self._lock:
            if self._is_closed or self._num_present >= limit:
                raise QueryError(TOO_MANY_QUERIES, f"{limit} statements run or wait: try again")
            self._check_held()
            self._num_present += 1
            running = self._workers.submit(lambda: self._answer(request, settings, mark, deadline))
        running.add_done_callback(self._count_finished)
        return running

    def _check_held(self) -> None:
        with self._lock:
            if self._held_bytes >= self._limits.max_held_bytes:
                raise QueryError(TOO_MANY_QUERIES, "too many unfetched results: try again")

    def _count_finished(self, _: Future[QueryResult]) -> None:
        with self._lock:
            self._num_present -= 1

    def _release_bytes(self, num_bytes: int) -> None:
        with self._lock:
            self._held_bytes -= num_bytes

    def _parser(self) -> ReadOnlySession:
        """Return this thread's session for parsing statements."""
        parser: ReadOnlySession | None = getattr(self._local, "parser", None)
        if parser is None:
            parser = ReadOnlySession(self._path, PARSER_SETTINGS)
            self._local.parser = parser
            with self._lock:
                self._parsers.append(parser)
        return parser

    def _allowed_functions(self, parser: ReadOnlySession) -> Functions:
        if self._functions is None:
            rows = [
                json.loads(line)
                for line in parser.run(SELECT_FUNCTIONS, "JSONEachRow").splitlines()
            ]
            names = parser.run(SELECT_COMBINATORS, "TSV").decode().split()
            self._timezone = parser.run("SELECT timezone()", "TSV").decode().strip()
            self._functions = allowed_functions(rows, combinators=names)
        return self._functions

    def _kill(self, mark: str) -> None:
        """Ask the engine to end a statement. Does nothing if it does not run."""
        handle = ReadOnlySession(self._path, {"max_threads": 1})
        try:
            handle.run(KILL, "TSV", {"mark": mark})
        finally:
            handle.close()


def _retrieve_exception(answered: asyncio.Future[QueryResult]) -> None:
    """Retrieve a failure: asyncio would log it if no caller waits for it any more."""
    with suppress(asyncio.CancelledError):
        answered.exception()
