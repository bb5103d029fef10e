"""Bodies that are too long are answered with 413, before they are read where they say so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect

from .refusals import Refusal
from .requests import headers_of, visitor_in

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .gate import AsgiApp, Message, Receive, Scope, Send
    from .refusals import Refusals

MIB = 2**20
DEFAULT_MAX_BYTES = MIB
"""Of what a page, a statement or a command sends."""

MAX_BYTES = {"/v1/spans": 64 * MIB, "/v1/rows/": 16 * MIB}
"""By how a path begins; the routes themselves take less, and say by how much it was too long."""

TOO_LARGE = b"413: the body is too long\n"
BAD_LENGTH = b"400: Content-Length is no number\n"


class CappedBodies:
    """Passes requests on to ``app`` with no more body than the path may have.

    Args:
        app: Behind the gate: nobody without a token gets this far.
        refusals: Counts who sent too much.
        max_bytes: By how a path begins; `DEFAULT_MAX_BYTES` elsewhere.
    """

    def __init__(
        self, app: AsgiApp, refusals: Refusals, *, max_bytes: Mapping[str, int] = MAX_BYTES
    ) -> None:
        self._app = app
        self._refusals = refusals
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or pass on one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = headers_of(scope).get("content-length", "0")
        body = _Body(receive, send, max_bytes=self._cap(scope["path"]))
        if not (declared.isascii() and declared.isdigit()):
            await _answer(send, 400, BAD_LENGTH)
        elif int(declared[:20]) > body.max_bytes:
            self._note(scope)
            await _answer(send, 413, TOO_LARGE)
        else:
            await self._pass_on(scope, body)

    async def _pass_on(self, scope: Scope, body: _Body) -> None:
        try:
            await self._app(scope, body.receive, body.send)
        except ClientDisconnect:
            return  # Who hangs up in the middle of a body is no error of ours, and fills no log.
        except Exception:
            # Of an application whose request ended under it; its answer is given already.
            if not body.is_too_long:
                raise
        if body.is_too_long:
            self._note(scope)

    def _cap(self, path: str) -> int:
        found = (cap for begin, cap in self._max_bytes.items() if path.startswith(begin))
        return next(found, DEFAULT_MAX_BYTES)

    def _note(self, scope: Scope) -> None:
        self._refusals.note(
            Refusal.BODY_TOO_LARGE,
            visitor=visitor_in(scope),
            method=scope["method"],
            path=scope["path"],
            status=413,
        )


class _Body:
    """What one request may still send, and whether an answer has begun."""

    def __init__(self, receive: Receive, send: Send, *, max_bytes: int) -> None:
        self._receive = receive
        self._send = send
        self.max_bytes = max_bytes
        self.is_too_long = False
        self._num_bytes = 0
        self._is_read = False
        self._has_begun = False

    async def receive(self) -> Message:
        """Return the next piece; past the cap, answer 413 and say that the asker has gone."""
        if self.is_too_long:
            return {"type": "http.disconnect"}
        message = await self._receive()
        self._num_bytes += len(message.get("body", b""))
        self._is_read = not message.get("more_body", False)
        if self._num_bytes <= self.max_bytes:
            return message
        self.is_too_long = True
        if not self._has_begun:
            await _answer(self._send, 413, TOO_LARGE)
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Pass an answer on, unless 413 was given."""
        if self.is_too_long:
            return
        self._has_begun = True
        if message["type"] == "http.response.start" and not self._is_read:
            # Closed with unread bytes, a connection is reset, and the answer may be lost with it.
            # Left open, the edge throws the rest away for a while.
            kept = [pair for pair in message.get("headers", []) if pair[0].lower() != b"connection"]
            message = {**message, "headers": kept}
        await self._send(message)


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
