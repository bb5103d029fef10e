"""ClickHouse's HTTP protocol on the embedded store, for its owner's statements.

Statements run read-only, with limits of time and memory, in the process that holds the store. They
may slow or stop it, so only tokens of role ``sql`` or ``admin`` may send them (decision 97).
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

import pyarrow as pa
from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Match, Route

from .errors import CollectorError, StoreQueryError
from .http.gate import GRANT_KEY
from .http.tokens import Role
from .machine_memory import machine_bytes
from .store.native_revision import with_revision

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, MutableMapping
    from pathlib import Path

    from starlette.requests import Request

    from .http.tokens import Grant


GIB = 1 << 30
SEVERAL_BYTES = 16 * GIB
"""Memory from which on statements run beside each other."""

MAX_STATEMENT_BYTES = 1 << 18
PIECE_BYTES = 1 << 20

THREAD_PREFIX = "statement"
CLOSE_TIMEOUT_S = 5.0
GRACE_S = 10.0
"""Time beyond its limit after which a statement's client gets an error. The engine checks the time
only between two blocks of rows, and the thread stays occupied until it does."""

KILL = "KILL QUERY WHERE Settings['log_comment'] = {mark:String} ASYNC"
KILL_PAUSE_S = 0.05
KILL_TIMEOUT_S = 10.0
"""Time for which the statement of a client that has gone is killed. Then its own limit ends it."""

CANONICAL = "SELECT formatQuery({statement:String})"
QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|`(?:[^`\\]|\\.)*`", re.DOTALL)
FORMAT_CLAUSE = re.compile(r"\nFORMAT (\w+)\Z")
READS = re.compile(r"\(|(?:SELECT|WITH|SHOW|EXISTS)\b|DESCRIBE TABLE [\w.`]+\Z")
"""Begin of a canonical statement that reads. With ``readonly = 1`` the engine (26.9) still runs
KILL, USE, SYSTEM STOP MERGES and CHECK TABLE, and describes a URL without a limit of time."""

REFUSED_WORDS = re.compile(
    r"\b(INTO OUTFILE|PARALLEL WITH|SETTINGS|(?i:file|sqlite|python|eval))\b"
)
"""What the engine (26.9) runs with ``readonly = 1`` although it writes a file (INTO OUTFILE, a
database of ``sqlite``), reads one, reads objects of this process, or changes a limit."""

DRIVER_FORMATS = frozenset({"dataframe", "datastore", "arrowtable"})
"""Formats of chDB's Python driver, which are no bytes."""

OUTPUT: dict[str, int | str] = {
    "output_format_arrow_low_cardinality_as_dictionary": 1,
    "output_format_arrow_string_as_string": 1,
    "output_format_arrow_compression_method": "none",
    "output_format_json_quote_64bit_integers": 0,
    # A cut whose acknowledgement was lost may be stored twice, and must not count twice.
    "final": 1,
}
"""Defaults; the first four are those of `collector.store.store.SETTINGS`."""

REQUEST_SETTINGS = frozenset(
    {
        *OUTPUT, "cast_string_to_dynamic_use_inference", "date_time_input_format",
        "date_time_output_format", "extremes", "join_use_nulls", "limit", "max_block_size",
        "max_bytes_to_read", "max_rows_to_read", "offset",
        "output_format_json_quote_denormals", "result_overflow_mode",
    }
)  # fmt: skip
"""Settings that a request may choose. Others can write files, as ``output_format_schema`` does."""

TRANSPORT = frozenset(
    {
        "client_protocol_version", "compress", "database", "decompress", "default_format",
        "enable_http_compression", "http_headers_progress_interval_ms", "log_comment", "query",
        "query_id", "quota_key", "readonly", "send_progress_in_http_headers", "session_check",
        "session_id", "session_timeout", "stacktrace", "wait_end_of_query",
    }
)  # fmt: skip
"""Parameters of the URL that concern the transport, or have no effect here."""

READONLY, ACCESS_DENIED, TOO_MANY, NOT_IMPLEMENTED = 164, 497, 202, 48
UNKNOWN_FORMAT, UNKNOWN_DATABASE, BAD_ARGUMENTS, TIMEOUT_EXCEEDED = 73, 81, 36, 159
STATUSES = {
    READONLY: 403, ACCESS_DENIED: 403, TOO_MANY: 503, NOT_IMPLEMENTED: 501, TIMEOUT_EXCEEDED: 408,
    UNKNOWN_DATABASE: 404, 60: 404, 46: 404, 47: 404,  # unknown table, function, identifier
    UNKNOWN_FORMAT: 404, 241: 507,  # memory
    396: 413,  # too many rows or bytes
}  # fmt: skip
"""HTTP status by ClickHouse's code. Other codes are errors of the client: 400."""

ENGINE_ERROR = re.compile(r"Code: (\d+)\. (?:DB::)?(?:Exception|NetException): (.*)", re.DOTALL)
ENGINE_VERSION = re.compile(r" ?\(version [^)]*\)")
MAX_ERROR_CHARS = 2_000

CONTENT_TYPES = {
    "JSON": "application/json; charset=UTF-8",
    "JSONCompact": "application/json; charset=UTF-8",
    "JSONEachRow": "application/x-ndjson; charset=UTF-8",
    "CSV": "text/csv; charset=UTF-8",
    "CSVWithNames": "text/csv; charset=UTF-8",
    "Native": "application/octet-stream",
    "RowBinary": "application/octet-stream",
    "Arrow": "application/vnd.apache.arrow.file",
    "ArrowStream": "application/vnd.apache.arrow.stream",
    "Parquet": "application/vnd.apache.parquet",
    "XML": "application/xml; charset=UTF-8",
}
"""Content types by format; never HTML. The gate adds ``nosniff``, so browsers show no page."""

CODECS: tuple[Literal["lz4", "zstd", "gzip"], ...] = ("lz4", "zstd", "gzip")
"""The cheapest first, because the same cores serve ingest. The names are those of both HTTP and
Arrow; lz4 is the frame format in both."""

CLIENT_CLOSED_REQUEST = 499
"""Status for a client that has gone, as in nginx. It appears only in counts of requests."""


class QueryError(CollectorError):
    """A statement was refused or failed.

    Attributes:
        code: Error code of ClickHouse.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(" ".join(text.split())[:MAX_ERROR_CHARS])
        self.code = code

    def response(self) -> Response:
        """Return the message in one line, in the form of a ClickHouse server."""
        headers = {"X-ClickHouse-Exception-Code": str(self.code)}
        text = f"Code: {self.code}. DB::Exception: {self}\n"
        return PlainTextResponse(text, STATUSES.get(self.code, 400), headers)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryLimits:
    """Limits of one statement, and of all together."""

    max_seconds: int = 120
    max_rows: int = 50_000_000
    max_result_bytes: int = GIB
    max_memory_bytes: int = 5 * GIB // 2
    """Memory of one statement, including its result. `max_running` of them leave the engine
    (`collector.store.store.ENGINE_OPTIONS`) enough memory for ingest."""

    max_running: int = 2
    max_waiting: int = 32
    """Queued statements. Beyond these, a statement is refused at once, to be tried again."""

    @classmethod
    def fitting(cls, memory_bytes: int) -> Self:
        """Return the limits of a server that has this much memory, at most the defaults.

        All running statements together have a quarter of it.
        """
        most = cls()
        num_running = most.max_running if memory_bytes >= SEVERAL_BYTES else 1
        return cls(
            max_memory_bytes=min(most.max_memory_bytes, memory_bytes // 4 // num_running),
            max_result_bytes=min(most.max_result_bytes, memory_bytes // 8),
            max_running=num_running,
        )

    def settings(self, requested: Mapping[str, str]) -> dict[str, int | str]:
        """Return the engine's settings of a statement.

        Args:
            requested: Settings of the request. They may lower the limits, not raise them.

        Raises:
            QueryError: A setting cannot be changed, or is not a number.
        """
        caps = {
            "max_execution_time": self.max_seconds,
            "max_result_rows": self.max_rows,
            "max_result_bytes": self.max_result_bytes,
            "max_memory_usage": self.max_memory_bytes,
            "max_threads": 2,
        }
        chosen: dict[str, int | str] = {
            **OUTPUT,
            "max_query_size": MAX_STATEMENT_BYTES,
            # Text that is cast to an aggregate's state would be the bytes of the state otherwise.
            "aggregate_function_input_format": "value",
        }
        for name, text in requested.items():
            if name in caps:
                try:
                    caps[name] = min(max(0, int(float(text))) or caps[name], caps[name])
                except (ValueError, OverflowError) as error:
                    reason = f"setting {name} must be a number, not {text[:40]!r}"
                    raise QueryError(BAD_ARGUMENTS, reason) from error
            elif name in REQUEST_SETTINGS:
                chosen[name] = text
            elif name not in TRANSPORT:
                raise QueryError(READONLY, f"setting {name[:80]} cannot be changed here")
        return chosen | caps


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryRequest:
    """One statement, as received."""

    text: str
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Bound parameters by name, escaped as ClickHouse does."""

    settings: Mapping[str, str] = field(default_factory=dict)
    default_format: str = "TabSeparated"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryResult:
    """Result of a statement, in the engine's memory."""

    view: memoryview
    owner: object
    """Owner of the bytes. The view alone does not keep them alive."""

    output_format: str
    timezone: str


class QueryEngine:
    """Executes statements on the embedded store, which this process has open.

    Args:
        limits: Limits of statements. None: those that fit the memory of the machine or cgroup.
    """

    def __init__(self, path: Path, limits: QueryLimits | None = None) -> None:
        self._path = os.path.realpath(path)  # the engine compares paths literally
        self._limits = limits or QueryLimits.fitting(machine_bytes())
        self._executor = ThreadPoolExecutor(
            self._limits.max_running, thread_name_prefix=THREAD_PREFIX
        )
        self._calls: dict[str, Future[QueryResult]] = {}

    async def answer(self, request: QueryRequest) -> QueryResult:
        """Execute a statement. Cancelling this call ends it.

        Raises:
            QueryError: The statement was refused or failed, or too many are running.
        """
        settings = self._limits.settings(request.settings)
        limit = self._limits.max_running + self._limits.max_waiting
        if len(self._calls) >= limit:
            raise QueryError(TOO_MANY, f"{limit} statements run or wait: try again")
        mark = uuid.uuid4().hex
        loop, started = asyncio.get_running_loop(), asyncio.Event()

        def run() -> QueryResult:
            loop.call_soon_threadsafe(started.set)
            return self._run(request, {**settings, "log_comment": mark})

        call = self._executor.submit(run)
        self._calls[mark] = call
        call.add_done_callback(lambda _: self._calls.pop(mark))
        try:
            # Those before it may take as long as the limit.
            async with asyncio.timeout(self._limits.max_seconds + GRACE_S) as deadline:
                await started.wait()
                deadline.reschedule(loop.time() + float(settings["max_execution_time"]) + GRACE_S)
                return await asyncio.wrap_future(call)
        except TimeoutError as error:
            if call.cancel() or not started.is_set():
                raise QueryError(TOO_MANY, "other statements take long: try again") from error
            text = "the statement took longer than its limit"
            raise QueryError(TIMEOUT_EXCEEDED, text) from error
        except asyncio.CancelledError:
            if not call.cancel():
                await asyncio.to_thread(self._kill, mark, KILL_TIMEOUT_S)
            raise

    def close(self) -> None:
        """End running statements. One that cannot be ended is left to its thread."""
        calls = dict(self._calls)
        for mark, call in calls.items():
            if not call.cancel():
                self._kill(mark)
        running = wait(calls.values(), timeout=CLOSE_TIMEOUT_S).not_done
        self._executor.shutdown(wait=not running, cancel_futures=True)

    def _run(self, request: QueryRequest, settings: Mapping[str, int | str]) -> QueryResult:
        with self._session(settings) as connection:
            # One statement, without comments.
            bound = {"statement": _escaped(request.text)}
            canonical = bytes(connection.query(CANONICAL, "RawBLOB", params=bound).bytes()).decode()
            clause = FORMAT_CLAUSE.search(canonical)
            sql = canonical if clause is None else canonical[: clause.start()]
            output_format = request.default_format if clause is None else clause[1]
            check_statement(sql)
            if output_format.lower() in DRIVER_FORMATS:
                raise QueryError(UNKNOWN_FORMAT, f"format {output_format} is not supported here")
            timezone = bytes(connection.query("SELECT timezone()", "RawBLOB").bytes()).decode()
            result = connection.query(sql, output_format, params=dict(request.parameters))
        memory = result.get_memview()
        return QueryResult(
            view=memory.view() if result.size() else memoryview(b""),
            owner=(result, memory),
            output_format=output_format,
            timezone=timezone,
        )

    @contextmanager
    def _session(self, settings: Mapping[str, int | str]) -> Iterator[Any]:
        """Yield a read-only session. Its settings cannot be changed, and end with it."""
        import chdb

        try:
            connection: Any = chdb.connect(self._path)  # type: ignore[no-untyped-call]
            try:
                for name, value in settings.items():
                    quoted = str(value).replace("\\", "\\\\").replace("'", "\\'")
                    connection.query(f"SET {name} = '{quoted}'")
                connection.query("SET readonly = 1")
                yield connection
            finally:
                connection.close()
        except QueryError:
            raise
        except Exception as error:  # the class of the engine's errors has no public name
            match = ENGINE_ERROR.search(str(error))
            code, text = (BAD_ARGUMENTS, str(error)) if match is None else match.groups()
            raise QueryError(int(code), ENGINE_VERSION.sub("", text)) from error

    def _kill(self, mark: str, timeout_s: float = 0.0) -> None:
        """Ask the engine to end a statement, again until it has ended: it may be about to start."""
        deadline_s = time.monotonic() + timeout_s
        while mark in self._calls:
            with self._session({}) as connection:
                connection.query(KILL, "TSV", params={"mark": mark})
            if time.monotonic() >= deadline_s:
                return
            time.sleep(KILL_PAUSE_S)


def stuck_threads() -> list[str]:
    """Return the names of the threads whose statement runs on after the engines were closed.

    The process must not end in the ordinary way then: its end would wait for them.
    """
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name.startswith(f"{THREAD_PREFIX}_")]


def check_statement(sql: str) -> None:
    """Refuse what ``readonly = 1`` alone would allow, although it does more than read the store.

    Args:
        sql: Statement in the canonical form of ``formatQuery``: a single one, without comments.

    Raises:
        QueryError: The statement is refused.
    """
    if not READS.match(sql):
        head = sql.split(maxsplit=1)[0] if sql else "an empty statement"
        raise QueryError(READONLY, f"{head} is refused: statements here only read")
    unquoted = QUOTED.sub(lambda text: "''" if text[0].startswith("'") else text[0], sql)
    word = REFUSED_WORDS.search(" ".join(unquoted.split()))
    if word is not None:
        raise QueryError(
            READONLY,
            f"{word[0]} is refused, also as a name: it can do more than read the store's tables",
        )


def _escaped(text: str) -> str:
    """Return a string as the value of a bound parameter."""
    return text.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")


class QueryRoute(Route):
    """``GET /`` with a statement. Without one, the dashboard's first page answers."""

    def matches(self, scope: MutableMapping[str, Any]) -> tuple[Match, Any]:
        """Match only a request whose URL contains ``query=``."""
        if b"query=" not in scope.get("query_string", b""):
            return Match.NONE, {}
        return super().matches(scope)


def query_router(engine: QueryEngine) -> APIRouter:
    """Return the routes ``POST /``, ``GET /?query=`` and ``/ping``."""

    async def query(request: Request) -> Response:
        try:
            statement = await _read_statement(request)
            result = await _answer_until_disconnect(engine, statement, request)
            if result is None:
                return PlainTextResponse("", CLIENT_CLOSED_REQUEST)
            return await asyncio.to_thread(_response, result, request)
        except QueryError as error:
            return error.response()

    async def ping(_request: Request) -> Response:
        return PlainTextResponse("Ok.\n")

    router = APIRouter()
    router.routes.append(Route("/", query, methods=["POST"], include_in_schema=False))
    router.routes.append(QueryRoute("/", query, methods=["GET"], include_in_schema=False))
    router.routes.append(Route("/ping", ping, methods=["GET"], include_in_schema=False))
    return router


async def _read_statement(request: Request) -> QueryRequest:
    grant: Grant = request.scope[GRANT_KEY]
    if not grant.allows(Role.SQL):
        raise QueryError(
            ACCESS_DENIED,
            f"statements need a token of role {Role.SQL} or {Role.ADMIN}; this one has role"
            f" {grant.role}",
        )
    headers, url = request.headers, dict(request.query_params)
    if headers.get("content-type", "").startswith("multipart/"):
        raise QueryError(NOT_IMPLEMENTED, "forms and external tables are not supported here")
    if headers.get("content-encoding", "identity") != "identity":
        raise QueryError(NOT_IMPLEMENTED, "a compressed statement is not supported here")
    if "user" in url or "password" in url:
        raise QueryError(BAD_ARGUMENTS, "a password in a URL appears in logs: send it in a header")
    if url.get("compress", "0") != "0" or url.get("decompress", "0") != "0":
        raise QueryError(NOT_IMPLEMENTED, "compress=1 is not supported: use Accept-Encoding")
    database = headers.get("x-clickhouse-database", url.get("database", ""))
    if database not in {"", "default"}:
        raise QueryError(UNKNOWN_DATABASE, f"database {database[:80]} does not exist here")
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_STATEMENT_BYTES:
            reason = f"a statement has at most {MAX_STATEMENT_BYTES} bytes"
            raise QueryError(BAD_ARGUMENTS, reason)
    text = "\n".join(
        part for part in (url.get("query", ""), body.decode("utf-8", "replace")) if part
    )
    if "\0" in text:
        raise QueryError(BAD_ARGUMENTS, "the statement contains a NUL character")
    is_bound = {name: name.startswith("param_") for name in url}
    return QueryRequest(
        text=text,
        parameters={
            name.removeprefix("param_"): value for name, value in url.items() if is_bound[name]
        },
        settings={name: value for name, value in url.items() if not is_bound[name]},
        default_format=headers.get(
            "x-clickhouse-format", url.get("default_format", "TabSeparated")
        ),
    )


async def _answer_until_disconnect(
    engine: QueryEngine, statement: QueryRequest, request: Request
) -> QueryResult | None:
    """Return the result. If the client disconnects first, end the statement and return None."""

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answering = asyncio.create_task(engine.answer(statement))
    leaving = asyncio.create_task(disconnect())
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            answering.cancel()
            await asyncio.wait({answering})
        return None if answering.cancelled() else answering.result()
    finally:
        leaving.cancel()


def _response(result: QueryResult, request: Request) -> Response:
    url, view = request.query_params, result.view
    if result.output_format == "Native":
        revision = url.get("client_protocol_version", "0")
        try:
            view = with_revision(view, int(revision) if revision.isdecimal() else 0)
        except StoreQueryError as error:
            raise QueryError(NOT_IMPLEMENTED, str(error)) from error
    headers = {
        "X-ClickHouse-Format": result.output_format,
        "X-ClickHouse-Timezone": result.timezone,
        "X-ClickHouse-Server-Display-Name": "rankscope",
        "X-ClickHouse-Summary": "{}",
    }
    accepted = {
        part.partition(";")[0].strip().lower()
        for part in request.headers.get("accept-encoding", "").split(",")
    }
    codec = next((codec for codec in CODECS if codec in accepted), None)
    if codec is not None and url.get("enable_http_compression") in {"1", "true"}:
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, codec) as stream:
            stream.write(view)
        view = memoryview(sink.getvalue())
        headers["Content-Encoding"] = codec
    headers["Content-Length"] = str(len(view))

    def pieces(owner: object = result.owner) -> Iterator[memoryview]:
        for first in range(0, len(view), PIECE_BYTES):
            yield view[first : first + PIECE_BYTES]
        del owner  # it has kept the engine's memory alive until here

    media_type = CONTENT_TYPES.get(result.output_format, "text/plain; charset=UTF-8")
    return StreamingResponse(pieces(), headers=headers, media_type=media_type)
