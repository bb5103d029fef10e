"""The collector's clock, to which agents align their hosts, and the route that serves it."""

from __future__ import annotations

import secrets
from dataclasses import asdict
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
"""Probes of all agents together; docs/scaling.md has the cost of one."""

LONGEST_PAUSE_NS = 10 * NS_PER_S
"""Longest pause that is asked for. Older agents ignore the pause; without a bound they would lock
out newer ones."""

TIME: Mapping[str, Any] = {"type": "integer", "minimum": 0, "exclusiveMaximum": MAX_TIME_NS}
ANSWER: dict[str, Any] = {
    "type": "object",
    "required": ["reference_id", "received_ns", "replied_ns", "pause_ns"],
    "properties": {
        "reference_id": {
            "type": "string",
            "minLength": 1,
            "maxLength": MAX_REFERENCE_ID_LETTERS,
            "description": "Name of this clock; a restart changes it.",
        },
        "received_ns": {**TIME, "description": "Unix time in ns at which the probe was received."},
        "replied_ns": {**TIME, "description": "Unix time in ns at which the reply was sent."},
        "pause_ns": {
            **TIME,
            "description": "Least time in ns until the agent's next probe, which bounds the load.",
        },
    },
}


class ReferenceClock:
    """Unix time at the start, continued by the monotonic clock of this process.

    The wall clock is read once, so setting it later changes no offset.

    Args:
        unix_minus_monotonic_ns: Unix time - ``monotonic_ns()``, read once.
        reference_id: Name of this clock; None: a random name.
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
        """Return a clock that starts at this host's Unix time."""
        anchor = read_anchor()
        return cls(
            unix_minus_monotonic_ns=anchor.unix_ns - anchor.monotonic_ns,
            monotonic_ns=read_monotonic_ns,
        )

    def now_ns(self) -> UnixNs:
        """Return the reference time."""
        return UnixNs(self._monotonic_ns() + self._offset_ns)

    def answer(self, received_ns: UnixNs, *, pause_ns: int = 0) -> ProbeReply:
        """Return the reply to a probe. Call it last: it reads the time of the reply.

        Args:
            received_ns: Value of `now_ns` when the probe was received.
        """
        return ProbeReply(
            reference_id=self.reference_id,
            received_ns=received_ns,
            replied_ns=self.now_ns(),
            pause_ns=pause_ns,
        )


class ProbeRateLimit:
    """Rate limit that gives each probe a time slot of its own for the agent's next probe.

    Each agent has one slot at a time. So the pause grows to (number of agents / rate) without
    counting agents, and agents that started together are spread out. With few agents the pause
    is shorter than the agents' own and has no effect.

    Args:
        monotonic_ns: The collector's ``CLOCK_MONOTONIC``.
        probes_per_s: Probes per second of all agents, at least 1.

    Source: the generic cell rate algorithm (virtual scheduling), ITU-T I.371, annex A.
    """

    def __init__(
        self, *, monotonic_ns: Callable[[], int], probes_per_s: int = PROBES_PER_S
    ) -> None:
        self._monotonic_ns = monotonic_ns
        self._interval_ns = NS_PER_S // probes_per_s
        self._last_slot_ns = 0

    def next_pause_ns(self) -> int:
        """Return how long the agent whose probe is answered now must wait."""
        now_ns = self._monotonic_ns()
        slot_ns = max(self._last_slot_ns, now_ns) + self._interval_ns
        self._last_slot_ns = min(slot_ns, now_ns + LONGEST_PAUSE_NS)
        return self._last_slot_ns - now_ns


def clock_router() -> APIRouter:
    """Return the route of a reference clock that starts now."""
    router = APIRouter(tags=["ingest"])
    reference, rate_limit = ReferenceClock.start(), ProbeRateLimit(monotonic_ns=read_monotonic_ns)

    @router.post(
        "/v1/clock",
        summary="Probe the clock",
        responses={
            200: {
                "description": "Times at which the probe was received and answered, by this clock.",
                "content": {"application/json": {"schema": ANSWER}},
            }
        },
        response_class=JSONResponse,
    )
    async def clock() -> JSONResponse:
        received_ns = reference.now_ns()
        reply = reference.answer(received_ns, pause_ns=rate_limit.next_pause_ns())
        return JSONResponse(asdict(reply))

    return router
