"""Client of an ASGI application in this process, with cookies as in a browser."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from rankscope.collector.http.requests import AsgiApp

T = TypeVar("T")

BASE = "http://127.0.0.1:8050"


def in_a_loop(work: Coroutine[None, None, T]) -> T:
    """Run ``work`` to its end in a thread, because Playwright's loop may run in this one."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, work).result()


class Client:
    """One client of ``app``. Redirects are returned, not followed."""

    def __init__(self, app: AsgiApp, *, peer: str = "127.0.0.1") -> None:
        self.app = app
        self._transport = httpx.ASGITransport(app=app, client=(peer, 123))
        self._cookies = httpx.Cookies()

    def request(self, method: str, url: str, **options: Any) -> httpx.Response:  # noqa: ANN401 -- httpx's own options, passed on
        return in_a_loop(self._request(method, url, options))

    def get(self, url: str, **options: Any) -> httpx.Response:  # noqa: ANN401 -- as above
        return self.request("GET", url, **options)

    def post(self, url: str, **options: Any) -> httpx.Response:  # noqa: ANN401 -- as above
        return self.request("POST", url, **options)

    async def _request(self, method: str, url: str, options: dict[str, Any]) -> httpx.Response:
        async with httpx.AsyncClient(
            transport=self._transport, base_url=BASE, cookies=self._cookies
        ) as client:
            answer = await client.request(method, url, **options)
        self._cookies.update(client.cookies)
        return answer
