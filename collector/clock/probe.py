"""One look at the reference clock: four times, two read here and two read by the collector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rankscope.tracer.span import MonotonicNs, UnixNs

from ..errors import ClockReplyError

MAX_REFERENCE_ID_LETTERS = 64
MAX_TIME_NS = 2**62
"""Year 2116: a later time is a broken reply, and would not fit the store's Int64 sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReply:
    """What the collector answers: when the probe came and when the answer left."""

    reference_id: str
    """Tells one collector's clock from another's, and from the same one's after a restart."""

    received_ns: UnixNs
    replied_ns: UnixNs
    pause_ns: int = 0
    """How long the collector wants to be left alone; older ones don't say, and mean 0."""

    def document(self) -> dict[str, Any]:
        """Return the reply as the JSON document that `parse_reply` reads."""
        return {
            "reference_id": self.reference_id,
            "received_ns": self.received_ns,
            "replied_ns": self.replied_ns,
            "pause_ns": self.pause_ns,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One exchange: here, there, there, here.

    With ``S(t)`` the reference when this host's clock reads ``t``, and as no message
    comes before it is sent::

        S(sent_ns) <= received_ns    and    S(returned_ns) >= replied_ns

    Nothing else is taken for granted: neither way's delay is known.
    """

    sent_ns: MonotonicNs
    received_ns: UnixNs
    replied_ns: UnixNs
    returned_ns: MonotonicNs

    @property
    def delay_ns(self) -> int:
        """Time on the way, both ways together, without what the collector took to answer."""
        return (self.returned_ns - self.sent_ns) - (self.replied_ns - self.received_ns)


def parse_reply(document: object) -> ProbeReply:
    """Return the reply in a JSON document.

    Raises:
        ClockReplyError: It is not of `ProbeReply.document`'s form, or leaves before it came.
    """
    if not isinstance(document, dict):
        raise ClockReplyError("it is no object")
    reference_id = document.get("reference_id")
    if not isinstance(reference_id, str) or not 1 <= len(reference_id) <= MAX_REFERENCE_ID_LETTERS:
        raise ClockReplyError("reference_id is no name of 1 to 64 letters")
    received_ns, replied_ns = _time(document, "received_ns"), _time(document, "replied_ns")
    if replied_ns < received_ns:
        raise ClockReplyError("it left before the probe came")
    pause_ns = _time(document, "pause_ns") if "pause_ns" in document else 0
    return ProbeReply(
        reference_id=reference_id,
        received_ns=received_ns,
        replied_ns=replied_ns,
        pause_ns=pause_ns,
    )


def _time(document: dict[Any, Any], name: str) -> UnixNs:
    found = document.get(name)
    if type(found) is not int or not 0 <= found < MAX_TIME_NS:
        raise ClockReplyError(f"{name} is no time in ns")
    return UnixNs(found)
