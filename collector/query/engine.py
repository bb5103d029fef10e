"""Run statements from outside in threads of their own, few at a time, each within its limits."""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from collector.query.errors import TOO_MANY_QUERIES, QueryError
from collector.query.functions import (
    SELECT_COMBINATORS,
    SELECT_FUNCTIONS,
    allowed_functions,
)
from collector.query.handle import Handle
from collector.query.settings import VALUES, QueryLimits, settings_of
from collector.query.statement import checked_statement

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future
    from pathlib import Path

    from collector.query.functions import Functions
    from collector.query.handle import Answer

KILL = "KILL QUERY WHERE Settings['log_comment'] = {mark:String} ASYNC"
KILL_PAUSE_S = 0.02
PARSER_SETTINGS: dict[str, int | str] = {
    "max_threads": 1,
    "max_execution_time": 10,
    "max_query_size": 1 << 20,
    "aggregate_function_input_format": VALUES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryRequest:
    """One statement, as it came."""

    text: str
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Bound parameters by name, in ClickHouse's escaped form."""

    settings: Mapping[str, str] = field(default_factory=dict)
    default_format: str = "TabSeparated"


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class QueryResult:
    """What came of a statement. Its bytes count as held for as long as it lives."""

    answer: Answer
    output_format: str
    timezone: str


class QueryEngine:
    """Answers statements on a store that this process has open.

    Args:
        path: The store's folder.
        limits: What statements may cost.
    """

    def __init__(self, path: Path, limits: QueryLimits | None = None) -> None:
        self._path = path
        self._limits = limits or QueryLimits()
        self._threads = ThreadPoolExecutor(self._limits.max_running, thread_name_prefix="query")
        self._lock = threading.RLock()  # a result may die while this thread holds it
        self._num_present = 0
        self._held_bytes = 0
        self._is_closed = False
        self._parsers: list[Handle] = []
        self._local = threading.local()
        self._functions: Functions | None = None
        self._timezone = "UTC"
        self._running: set[str] = set()

    async def answer(self, request: QueryRequest) -> QueryResult:
        """Return the answer to a statement; a caller that goes away ends it.

        Raises:
            QueryError: It was refused, failed, or there are too many already.
        """
        self._enter()
        mark = uuid.uuid4().hex
        running = self._threads.submit(self._answer, request, mark)
        try:
            return await asyncio.shield(asyncio.wrap_future(running))
        except asyncio.CancelledError:
            await self._end(running, mark)
            raise
        finally:
            with self._lock:
                self._num_present -= 1

    async def _end(self, running: Future[QueryResult], mark: str) -> None:
        """End a statement; one that is still being parsed is ended as soon as it has begun."""
        while not (running.cancel() or running.done()):
            await asyncio.to_thread(self._kill, mark)
            await asyncio.sleep(KILL_PAUSE_S)

    def close(self) -> None:
        """End what runs, and every session. Safe to repeat."""
        with self._lock:
            self._is_closed = True
            running = list(self._running)
        for mark in running:
            self._kill(mark)
        self._threads.shutdown(wait=True, cancel_futures=True)
        for parser in self._parsers:
            parser.close()
        self._parsers.clear()

    def _answer(self, request: QueryRequest, mark: str) -> QueryResult:
        settings = settings_of(request.settings, self._limits)
        parser = self._parser()
        statement = checked_statement(
            request.text,
            parameters=request.parameters,
            default_format=request.default_format,
            functions=self._allowed(parser),
            handle=parser,
        )
        handle = Handle(self._path, settings | {"log_comment": mark})
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
        weakref.finalize(result, self._let_go, num_bytes)
        return result

    def _enter(self) -> None:
        most = self._limits.max_running + self._limits.max_waiting
        with self._lock:
            if self._is_closed or self._num_present >= most:
                raise QueryError(TOO_MANY_QUERIES, f"{most} statements run or wait: come again")
            if self._held_bytes >= self._limits.max_held_bytes:
                raise QueryError(TOO_MANY_QUERIES, "too much waits to be fetched: come again")
            self._num_present += 1

    def _let_go(self, num_bytes: int) -> None:
        with self._lock:
            self._held_bytes -= num_bytes

    def _parser(self) -> Handle:
        """Return this thread's session for parsing."""
        parser: Handle | None = getattr(self._local, "parser", None)
        if parser is None:
            parser = Handle(self._path, PARSER_SETTINGS)
            self._local.parser = parser
            with self._lock:
                self._parsers.append(parser)
        return parser

    def _allowed(self, parser: Handle) -> Functions:
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
        """Tell the engine to end a statement; one that has not begun or has ended is left alone."""
        handle = Handle(self._path, {"max_threads": 1})
        try:
            handle.run(KILL, "TSV", {"mark": mark})
        finally:
            handle.close()
