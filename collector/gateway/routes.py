"""Routes of the gateway: ``POST /``, ``GET /?query=`` and ``/ping``."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Match, Route

from .allowlist import OWN_DATABASE
from .engine import QueryRequest
from .errors import BAD_ARGUMENTS, NOT_IMPLEMENTED, UNKNOWN_DATABASE, QueryError
from .native_blocks import with_revision
from .settings import MAX_STATEMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping

    from starlette.requests import Request

    from .engine import QueryEngine, QueryResult


PIECE_BYTES = 1 << 20
PARAMETER_PREFIX = "param_"
REQUEST_PARAMETERS = frozenset(
    {"query", "database", "default_format", "query_id", "user", "password"}
)
"""Parameters of the URL that are neither settings nor bound parameters."""

CLIENT_CLOSED_REQUEST = 499
"""Status for a client that has gone, as in nginx. It appears only in counts of requests."""

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

Codec = Literal["lz4", "zstd", "gzip"]
CODECS: tuple[Codec, ...] = ("lz4", "zstd", "gzip")
"""The cheapest first, because the same cores serve ingest. The names are those of both HTTP and
Arrow; lz4 is the frame format in both."""


class QueryRoute(Route):
    """``GET /`` with a statement. Without one, the dashboard's first page answers."""

    def matches(self, scope: MutableMapping[str, Any]) -> tuple[Match, Any]:
        """Match only a request whose URL contains ``query=``."""
        if b"query=" not in scope.get("query_string", b""):
            return Match.NONE, {}
        return super().matches(scope)


def query_router(engine: QueryEngine) -> APIRouter:
    """Return the routes, whose statements ``engine`` executes."""

    async def ask(request: Request) -> Response:
        try:
            asked, revision = await _read(request)
            result = await _until_gone(engine, asked, request)
            if result is None:
                return PlainTextResponse("", CLIENT_CLOSED_REQUEST)
            return await asyncio.to_thread(_response, result, request, revision)
        except QueryError as error:
            headers = {"X-ClickHouse-Exception-Code": str(error.code)}
            return PlainTextResponse(error.body(), error.status, headers)

    async def ping(_request: Request) -> Response:
        return PlainTextResponse("Ok.\n")

    router = APIRouter()
    router.routes.append(Route("/", ask, methods=["POST"], include_in_schema=False))
    router.routes.append(QueryRoute("/", ask, methods=["GET"], include_in_schema=False))
    router.routes.append(Route("/ping", ping, methods=["GET"], include_in_schema=False))
    return router


async def _until_gone(
    engine: QueryEngine, asked: QueryRequest, request: Request
) -> QueryResult | None:
    """Return the result. If the client disconnects first, end the statement and return None."""
    answering = asyncio.create_task(engine.answer(asked))
    leaving = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            answering.cancel()
            await asyncio.wait({answering})
        return None if answering.cancelled() else answering.result()
    finally:
        leaving.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _read(request: Request) -> tuple[QueryRequest, int]:
    """Return the statement, and the client's revision of the native format."""
    if request.headers.get("content-type", "").startswith("multipart/"):
        raise QueryError(NOT_IMPLEMENTED, "forms and external tables are not supported here")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise QueryError(NOT_IMPLEMENTED, "a compressed statement is not supported here")
    url = dict(request.query_params)
    if "user" in url or "password" in url:
        raise QueryError(BAD_ARGUMENTS, "a password in a URL appears in logs: send it in a header")
    if url.get("compress", "0") != "0" or url.get("decompress", "0") != "0":
        raise QueryError(NOT_IMPLEMENTED, "compress=1 is not supported: use Accept-Encoding")
    database = request.headers.get("x-clickhouse-database", url.get("database", OWN_DATABASE))
    if database not in {"", OWN_DATABASE}:
        raise QueryError(UNKNOWN_DATABASE, f"database {database[:80]} does not exist here")
    body = (await _body(request)).decode("utf-8", "replace")
    asked = QueryRequest(
        text="\n".join(part for part in (url.get("query", ""), body) if part),
        parameters={
            name.removeprefix(PARAMETER_PREFIX): value
            for name, value in url.items()
            if name.startswith(PARAMETER_PREFIX)
        },
        settings={
            name: value
            for name, value in url.items()
            if name not in REQUEST_PARAMETERS and not name.startswith(PARAMETER_PREFIX)
        },
        default_format=request.headers.get(
            "x-clickhouse-format", url.get("default_format", "TabSeparated")
        ),
    )
    revision = url.get("client_protocol_version", "0")
    return asked, int(revision) if revision.isascii() and revision.isdigit() else 0


async def _body(request: Request) -> bytes:
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_STATEMENT_BYTES:
            raise QueryError(BAD_ARGUMENTS, f"a statement has at most {MAX_STATEMENT_BYTES} bytes")
    return body


def _response(result: QueryResult, request: Request, revision: int) -> Response:
    view = result.answer.view
    if result.output_format == "Native":
        view = with_revision(view, revision)
    headers = {
        "X-ClickHouse-Format": result.output_format,
        "X-ClickHouse-Timezone": result.timezone,
        "X-ClickHouse-Server-Display-Name": "rankscope",
        "X-ClickHouse-Summary": "{}",
    }
    if request.query_params.get("enable_http_compression") in {"1", "true"}:
        codec = choose_codec(request.headers.get("accept-encoding", ""))
        if codec is not None:
            view = compress(view, codec)
            headers["Content-Encoding"] = codec
    headers["Content-Length"] = str(len(view))
    media_type = CONTENT_TYPES.get(result.output_format, "text/plain; charset=UTF-8")
    return StreamingResponse(_pieces(view, result), headers=headers, media_type=media_type)


def _pieces(view: memoryview, result: QueryResult) -> Iterator[memoryview]:
    """Yield the result in pieces. ``result`` keeps the engine's memory alive until the end."""
    for first in range(0, len(view), PIECE_BYTES):
        yield view[first : first + PIECE_BYTES]
    del result


def choose_codec(accepted: str) -> Codec | None:
    """Return the cheapest known codec of an ``Accept-Encoding`` header; None if there is none."""
    offered = {part.partition(";")[0].strip().lower() for part in accepted.split(",")}
    return next((codec for codec in CODECS if codec in offered), None)


def compress(data: memoryview, codec: Codec) -> memoryview:
    """Return the data as one compressed stream."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(data)
    return memoryview(sink.getvalue())
