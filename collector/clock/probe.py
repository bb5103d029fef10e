"""One look at the reference clock: four times, two read here and two read by the collector."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from time import monotonic_ns as read_monotonic_ns
from typing import TYPE_CHECKING, Any

from rankscope.tracer.span import MonotonicNs, UnixNs
from rankscope.tracer.spool import read_anchor

from ..errors import ClockReplyError

if TYPE_CHECKING:
    from collections.abc import Callable

REFERENCE_ID_BYTES = 8
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
