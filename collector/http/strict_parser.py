"""Requests as h11 reads them, without those that another program may read otherwise."""

from __future__ import annotations

from typing import Any

import h11

LENGTHS = frozenset({b"content-length", b"transfer-encoding"})


class StrictConnection(h11.Connection):
    """A server's side of a connection that takes no request with two lengths or a long header.

    h11 lets the pieces win where a request declares a length too. A proxy before us may do it
    the other way round, and take the end of one visitor's request for the next one's.

    Args:
        max_header_bytes: Of a request's line and headers; h11 counts only what comes in parts.

    Source: RFC 9112, 6.1 and 11.2.
    """

    def __init__(self, max_header_bytes: int) -> None:
        super().__init__(h11.SERVER, max_header_bytes)
        self._max_header_bytes = max_header_bytes

    def next_event(self) -> Any:  # noqa: ANN401  # h11's events and its two marks
        """Return what came next.

        Raises:
            h11.RemoteProtocolError: It is no request that all programs read alike.
        """
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._check(event)
        return event

    def _check(self, request: h11.Request) -> None:
        headers = list(request.headers)
        if {name for name, _ in headers} >= LENGTHS:
            raise h11.RemoteProtocolError("a length and pieces")
        num_bytes = len(request.method) + len(request.target)
        num_bytes += sum(len(name) + len(value) for name, value in headers)
        if num_bytes > self._max_header_bytes:
            raise h11.RemoteProtocolError("too long a header", error_status_hint=431)
