"""The route by which agents ask a collector's clock."""

from __future__ import annotations

from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from .probe import MAX_REFERENCE_ID_LETTERS, MAX_TIME_NS, ReferenceClock
from .rate_limit import ProbePace

if TYPE_CHECKING:
    from collections.abc import Mapping

TIME: Mapping[str, Any] = {"type": "integer", "minimum": 0, "exclusiveMaximum": MAX_TIME_NS}
ANSWER: dict[str, Any] = {
    "type": "object",
    "required": ["reference_id", "received_ns", "replied_ns", "pause_ns"],
    "properties": {
        "reference_id": {
            "type": "string",
            "minLength": 1,
            "maxLength": MAX_REFERENCE_ID_LETTERS,
            "description": "Names this clock: another one after a restart.",
        },
        "received_ns": {**TIME, "description": "When the probe came, Unix time in ns."},
        "replied_ns": {**TIME, "description": "When the answer left, Unix time in ns."},
        "pause_ns": {
            **TIME,
            "description": "Ask again after so many ns or later; what bounds the collector's load.",
        },
    },
}


def clock_router() -> APIRouter:
    """Return the route over a clock that begins now."""
    router = APIRouter(tags=["ingest"])
    reference, pace = ReferenceClock.start(), ProbePace(monotonic_ns=monotonic_ns)

    @router.post(
        "/v1/clock",
        summary="Probe the clock",
        responses={
            200: {
                "description": "When the probe came and its answer left, by this clock.",
                "content": {"application/json": {"schema": ANSWER}},
            }
        },
        response_class=JSONResponse,
    )
    async def clock() -> JSONResponse:
        received_ns = reference.now_ns()
        reply = reference.answer(received_ns, pause_ns=pace.next_pause_ns())
        return JSONResponse(reply.document())

    return router
