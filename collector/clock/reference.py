"""The route by which agents ask a collector's clock."""

from __future__ import annotations

import secrets
from time import monotonic_ns as read_monotonic_ns
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from rankscope.tracer.span import NS_PER_S, UnixNs
from rankscope.tracer.spool import read_anchor

from .probe import MAX_REFERENCE_ID_LETTERS, MAX_TIME_NS, ProbeReply

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

REFERENCE_ID_BYTES = 8

PROBES_PER_S = 1_000
"""Of all agents together; see docs/operations.md for what one costs."""

LONGEST_PAUSE_NS = 10 * NS_PER_S
"""No agent is sent away for longer: older ones don't keep to what they are told, and shall not
keep newer ones out."""

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


class ReferenceClock:
    """The collector's half: Unix time carried on by the monotonic clock of one process.

    The wall clock is read once, at the start. A wall clock that is set later therefore
    moves nobody's offset.

    Args:
        unix_minus_monotonic_ns: Unix time - ``monotonic_ns()``, read once.
        monotonic_ns: ``CLOCK_MONOTONIC`` of this process.
        reference_id: Name of this clock; None: a random one.
    """

    def __init__(
        self,
        *,
        unix_minus_monotonic_ns: int,
        monotonic_ns: Callable[[], int],
        reference_id: str | None = None,
    ) -> None:
        self._offset_ns = unix_minus_monotonic_ns
        self._monotonic_ns = monotonic_ns
        self.reference_id = reference_id or secrets.token_hex(REFERENCE_ID_BYTES)

    @classmethod
    def start(cls) -> ReferenceClock:
        """Return a clock that begins at this machine's Unix time."""
        anchor = read_anchor()
        return cls(
            unix_minus_monotonic_ns=anchor.unix_ns - anchor.monotonic_ns,
            monotonic_ns=read_monotonic_ns,
        )

    def now_ns(self) -> UnixNs:
        """Return the reference time."""
        return UnixNs(self._monotonic_ns() + self._offset_ns)

    def answer(self, received_ns: UnixNs, *, pause_ns: int = 0) -> ProbeReply:
        """Answer a probe; call it last, because it reads the time of leaving.

        Args:
            received_ns: `now_ns` as read when the probe came.
            pause_ns: How long whoever asked shall not ask again.
        """
        return ProbeReply(
            reference_id=self.reference_id,
            received_ns=received_ns,
            replied_ns=self.now_ns(),
            pause_ns=pause_ns,
        )


class ProbeRateLimit:
    """Gives everybody who asks a moment of its own for the next probe, one after the other.

    An agent that asks has one such moment, so the pause grows with the number of agents to
    number / rate by itself, nobody is counted, and those who came together come apart. Where
    fewer ask, the pause told is shorter than any agent's own, and means nothing.

    Args:
        monotonic_ns: The collector's ``CLOCK_MONOTONIC``.
        probes_per_s: How many are answered a second, at least 1.

    Source: the generic cell rate algorithm (virtual scheduling), ITU-T I.371, annex A.
    """

    def __init__(
        self, *, monotonic_ns: Callable[[], int], probes_per_s: int = PROBES_PER_S
    ) -> None:
        self._monotonic_ns = monotonic_ns
        self._gap_ns = NS_PER_S // probes_per_s
        self._taken_ns = 0

    def next_pause_ns(self) -> int:
        """Return for how long whoever asks now shall not ask again."""
        now_ns = self._monotonic_ns()
        taken_ns = max(self._taken_ns, now_ns) + self._gap_ns
        self._taken_ns = min(taken_ns, now_ns + LONGEST_PAUSE_NS)
        return self._taken_ns - now_ns


def clock_router() -> APIRouter:
    """Return the route over a clock that begins now."""
    router = APIRouter(tags=["ingest"])
    reference, pace = ReferenceClock.start(), ProbeRateLimit(monotonic_ns=read_monotonic_ns)

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
