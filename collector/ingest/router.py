"""HTTP routes of ingest, and the answer to each kind of refusal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse

from ..errors import WireError
from ..http.gate import GRANT_KEY
from ..identity import RUN_NAME
from ..names import escape_invisible
from .backoff import BusyError
from .rows import QUESTIONS, ROW_TABLES, request_schema

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .service import IngestService

ARROW_TYPE = "application/vnd.apache.arrow.stream"
JSON_TYPE = "application/json"
MAX_RANKS = 4_096
MAX_REASON_LETTERS = 400

REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The body is not JSON."},
    403: {"description": "The token does not allow this, or is not for one of the runs."},
    409: {"description": "Other rows were stored under the same key; the first are kept."},
    410: {"description": "The run was deleted: drop these rows."},
    413: {"description": "Too much at once: send less."},
    415: {"description": "The content type is wrong."},
    422: {"description": "The body cannot be decoded, or its schema version is not supported."},
    429: {"description": "Too many requests in progress: retry after Retry-After."},
    503: {"description": "The store cannot be written to: retry after Retry-After."},
}
"""Answers that agents understand; see docs/ingest.md."""


def ingest_router(service: IngestService) -> APIRouter:
    """Return the routes of a started service."""
    router = APIRouter(tags=["ingest"])

    @router.post(
        "/v1/spans",
        summary="Store cuts",
        responses=REFUSALS,
        openapi_extra=_body(ARROW_TYPE, {"type": "string", "format": "binary"}),
    )
    async def spans(request: Request) -> JSONResponse:
        async def take() -> JSONResponse:
            _check_type(request, ARROW_TYPE)
            status, document = await service.take_spans(request, request.scope[GRANT_KEY])
            if status != 200:  # noqa: PLR2004  # OK
                service.count_refusal(status)
            return JSONResponse(document, status_code=status)

        return await _answer(service, take)

    _add_rows(router, service)

    @router.get(
        "/v1/resume",
        summary="Read what the store holds of a run",
        responses={status: REFUSALS[status] for status in (403, 422, 503)},
    )
    async def resume(
        request: Request,
        run_id: Annotated[str, Query(pattern=f"^{RUN_NAME.pattern}$")],
        after: Annotated[int, Query(ge=0, lt=1 << 64)] = 0,
        rank: Annotated[list[Annotated[int, Query(ge=-1, lt=1 << 31)]] | None, Query()] = None,
    ) -> JSONResponse:
        async def answer() -> JSONResponse:
            if rank is not None and len(rank) > MAX_RANKS:
                raise WireError(422, f"ask for at most {MAX_RANKS} ranks at once")
            grant = request.scope[GRANT_KEY]
            held = await service.resume(run_id, grant, after=after, ranks=rank or ())
            return JSONResponse(held)

        return await _answer(service, answer)

    return router


def _add_rows(router: APIRouter, service: IngestService) -> None:
    async def rows(request: Request, table: str) -> JSONResponse:
        async def take() -> JSONResponse:
            _check_type(request, JSON_TYPE)
            return JSONResponse(await service.take_rows(table, request, request.scope[GRANT_KEY]))

        return await _answer(service, take)

    def rows_of(table: str) -> Callable[[Request], Awaitable[JSONResponse]]:
        async def take(request: Request) -> JSONResponse:
            return await rows(request, table)

        return take

    for table in ROW_TABLES | QUESTIONS:
        router.add_api_route(
            f"/v1/rows/{table}",
            rows_of(table),
            methods=["POST"],
            response_class=JSONResponse,
            response_model=None,
            name=f"{table}_rows",
            summary=f"Store rows of table {table}",
            responses=REFUSALS,
            openapi_extra=_body(JSON_TYPE, request_schema(table)),
        )
    # Refuses unknown tables in the same form; not part of the API description.
    router.add_api_route(
        "/v1/rows/{table}", rows, methods=["POST"], response_model=None, include_in_schema=False
    )


async def _answer(
    service: IngestService, work: Callable[[], Awaitable[JSONResponse]]
) -> JSONResponse:
    """Return the answer of ``work``, or a document with the reason of its refusal."""
    try:
        return await work()
    except WireError as error:
        service.count_refusal(error.status)
        # A reason may quote the body.
        reason = escape_invisible(error.reason[:MAX_REASON_LETTERS])[:MAX_REASON_LETTERS]
        document: dict[str, Any] = {"schema": 1, "error": reason}
        if error.supported is not None:
            document["supported"] = list(error.supported)
        # Part of the body may be unread, so the connection cannot take another request.
        return JSONResponse(document, status_code=error.status, headers={"connection": "close"})
    except BusyError as error:
        service.count_refusal(error.status)
        headers = {"retry-after": str(math.ceil(error.retry_after_s)), "connection": "close"}
        document = {"schema": 1, "error": error.reason}
        return JSONResponse(document, status_code=error.status, headers=headers)


def _check_type(request: Request, wanted: str) -> None:
    found = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if found != wanted:
        raise WireError(415, f"the content type is {found[:80]!r}, expected {wanted}")


def _body(media_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {media_type: {"schema": schema}}}}
