"""A served collector in process: the gate, the routes and a real store."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx

from rankscope.collector.http.access import Access
from rankscope.collector.http.application import create_server
from rankscope.collector.http.tokens import Role, TokenFile, make_token, write_tokens
from rankscope.collector.ingest.router import ARROW_TYPE, ingest_router
from rankscope.collector.ingest.service import IngestService, ServiceLimits
from rankscope.collector.wire.codec import encode_cuts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
    from pathlib import Path

    from fastapi import APIRouter

    from rankscope.collector.http.metrics import Metrics
    from rankscope.collector.spool.cut import Cut
    from rankscope.collector.store.store import Store

OWN = "own-token"
BASE = "http://127.0.0.1:8050"


def no_pages(environ: dict[str, str], start_response: Any) -> Iterable[bytes]:  # noqa: ANN401 -- WSGI's
    start_response("404 Not Found", [])
    return [b""]


class Collector:
    """A server whose store is real; each request runs in an event loop of its own."""

    def __init__(
        self,
        service: IngestService,
        access: Access,
        *,
        more: Sequence[APIRouter] = (),
        metrics: Metrics | None = None,
    ) -> None:
        self.service = service
        self.app = create_server(
            access,
            pages=no_pages,
            not_ready=service.why_not_ready,
            routers=[ingest_router(service), *more],
            metrics=metrics,
        )

    def ship(self, *cuts: Cut, token: str = OWN, **headers: str) -> httpx.Response:
        return self.post("/v1/spans", encode_cuts(cuts), token=token, **headers)

    def post(
        self,
        path: str,
        content: bytes | AsyncIterator[bytes],
        *,
        token: str = OWN,
        media: str = ARROW_TYPE,
        **headers: str,
    ) -> httpx.Response:
        sent = {"authorization": f"Bearer {token}", "content-type": media, **headers}
        return self.ask("POST", path, content=content, headers=sent)

    def rows(self, table: str, rows: list[dict[str, Any]], *, token: str = OWN) -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"}
        document = {"schema": 1, "rows": rows}
        return self.ask("POST", f"/v1/rows/{table}", json=document, headers=headers)

    def resume(self, *, token: str = OWN, **query: str | int | list[int]) -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"}
        return self.ask("GET", "/v1/resume", params=query, headers=headers)

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:  # noqa: ANN401 -- httpx's
        return asyncio.run(self._ask(method, path, options))

    async def _ask(self, method: str, path: str, options: dict[str, Any]) -> httpx.Response:
        async with self.visitor() as visitor:
            return await visitor.request(method, path, **options)

    def visitor(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=self.app)
        return httpx.AsyncClient(transport=transport, base_url=BASE, timeout=60)


def tokens_for(folder: Path, **holders: tuple[Role, str]) -> tuple[TokenFile, dict[str, str]]:
    """Return a book with one token for each holder, and the tokens by holder.

    Args:
        folder: Folder of the token file.
        holders: Role and run prefix by holder; ``_at_`` in a name means ``@``.
    """
    records, tokens = [], {}
    for name, (role, prefix) in holders.items():
        holder = name.replace("_at_", "@")
        token, record = make_token(
            [], role=role, run_prefix=prefix, holder=holder, days=1, now_ns=10**18
        )
        records.append(record)
        tokens[name] = token
    path = folder / "tokens.json"
    write_tokens(path, records)
    return TokenFile(path, unix_ns=lambda: 10**18), tokens


@contextmanager
def serving(
    store: Store,
    *,
    tokens: TokenFile | None = None,
    limits: ServiceLimits | None = None,
    more: Sequence[APIRouter] = (),
    metrics: Metrics | None = None,
    **options: Any,  # noqa: ANN401 -- arguments of the service
) -> Iterator[Collector]:
    """Run a collector over ``store`` for as long as the block runs.

    Args:
        store: The store.
        tokens: Further tokens that are accepted.
        limits: Limits of admission; None: the defaults, with a short interval of inserts.
        more: Further routes.
        metrics: Metrics for ``/metrics``; None: there is no such route.
        options: Further arguments of the service.
    """
    limits = limits or ServiceLimits(insert_interval_s=0.005)
    service = IngestService(store, limits=limits, **options)
    service.start()
    try:
        access = Access(port=8050, token=OWN, tokens=tokens)
        yield Collector(service, access, more=more, metrics=metrics)
    finally:
        service.close()


async def pieces(content: bytes, *, size: int = 65_536) -> AsyncIterator[bytes]:
    """Yield a body in chunks, without a declared length."""
    for at in range(0, len(content), size):
        yield content[at : at + size]
