"""One probe of the collector's clock: four times, two read here and two by the collector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rankscope.tracer.span import MonotonicNs, UnixNs

from ..errors import ClockReplyError

MAX_REFERENCE_ID_LETTERS = 64
MAX_TIME_NS = 2**62
"""Year 2116. A later time comes from a broken reply, and sums with it overflow Int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReply:
    """Reply of the collector: the times at which it received the probe and sent the reply."""

    reference_id: str
    """Name of the collector's clock; a restart changes it."""

    received_ns: UnixNs
    replied_ns: UnixNs
    pause_ns: int = 0
    """Least time until the next probe; 0 from older collectors, which do not send it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Times of one exchange: sent here, received and replied there, returned here.

    Let ``S(t)`` be the reference time when this host's clock reads ``t``. No message arrives
    before it is sent, so::

        S(sent_ns) <= received_ns    and    S(returned_ns) >= replied_ns

    Nothing is assumed about the delay in either direction.
    """

    sent_ns: MonotonicNs
    received_ns: UnixNs
    replied_ns: UnixNs
    returned_ns: MonotonicNs

    @property
    def delay_ns(self) -> int:
        """Network delay of both directions together: the round trip less the collector's time."""
        return (self.returned_ns - self.sent_ns) - (self.replied_ns - self.received_ns)


def parse_reply(document: object) -> ProbeReply:
    """Return the reply in a JSON object.

    Raises:
        ClockReplyError: It does not have the fields of `ProbeReply`, or was sent before the probe
            was received.
    """
    if not isinstance(document, dict):
        raise ClockReplyError("not a JSON object")
    reference_id = document.get("reference_id")
    if not isinstance(reference_id, str) or not 1 <= len(reference_id) <= MAX_REFERENCE_ID_LETTERS:
        raise ClockReplyError("reference_id is not a name of 1 to 64 characters")
    received_ns, replied_ns = _time(document, "received_ns"), _time(document, "replied_ns")
    if replied_ns < received_ns:
        raise ClockReplyError("replied_ns is before received_ns")
    pause_ns = _time(document, "pause_ns") if "pause_ns" in document else 0
    return ProbeReply(
        reference_id=reference_id,
        received_ns=received_ns,
        replied_ns=replied_ns,
        pause_ns=pause_ns,
    )


def _time(document: dict[Any, Any], name: str) -> UnixNs:
    value = document.get(name)
    if type(value) is not int or not 0 <= value < MAX_TIME_NS:
        raise ClockReplyError(f"{name} is not a time in ns")
    return UnixNs(value)
