"""Turn away a method that a route does not take, where the pages would take any path for theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import PlainTextResponse
from starlette.routing import Match, Route

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp, Receive, Scope, Send

SHARED_PATH = "/"
"""Statements are posted to it, and the pages begin there."""


class KnownMethods:
    """The pages, behind routes whose paths are theirs alone.

    A mounted application takes whatever no route takes whole: a route's path with another
    method would be answered by a page. It is 405 here, with the methods that there are.

    Args:
        routes: Those of the application, also later ones.
        pages: What is mounted behind them.
    """

    def __init__(self, routes: Sequence[BaseRoute], pages: ASGIApp) -> None:
        self._routes = routes
        self._pages = pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that no route took."""
        taken = self._methods_at(scope)
        answer: ASGIApp = self._pages
        if taken:
            allow = ", ".join(sorted(taken))
            answer = PlainTextResponse(
                f"{scope['method']} is not taken here: {allow}\n", 405, {"allow": allow}
            )
        await answer(scope, receive, send)

    def _methods_at(self, scope: Scope) -> set[str]:
        if scope["type"] != "http" or scope["path"] == SHARED_PATH:
            return set()
        return {
            method
            for route in self._routes
            if isinstance(route, Route) and route.matches(scope)[0] is Match.PARTIAL
            for method in route.methods or ()
        }
