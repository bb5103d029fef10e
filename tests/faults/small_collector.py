"""A collector process with small quotas: ``python -m tests.faults.small_collector DIR``.

Prints its port; ends with SIGTERM.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvicorn

from rankscope.collector.gateway import QueryEngine, query_router
from rankscope.collector.http.access import Access
from rankscope.collector.http.application import create_server
from rankscope.collector.ingest.router import ingest_router
from rankscope.collector.ingest.service import IngestService, ServiceLimits
from rankscope.collector.store.store import open_store
from rankscope.collector.wire.codec import WireLimits
from tests.support.collector.serving import OWN, no_pages

MIB = 1 << 20
INFLATED_BYTES = 24 * MIB
WIRE_BYTES = 2 * MIB
"""Quota of all bodies in progress."""

LIMITS = ServiceLimits(
    wire=WireLimits(max_wire_bytes=2 * MIB, max_inflated_bytes=24 * MIB),
    max_wire_bytes_in_progress=WIRE_BYTES,
    max_inflated_bytes_in_progress=INFLATED_BYTES,
)


async def serve(folder: Path) -> None:
    """Serve until SIGTERM."""
    with open_store(f"chdb://{folder}") as store:
        service = IngestService(store, limits=LIMITS)
        service.start()
        engine = QueryEngine(folder)
        app = create_server(
            Access(port=0, token=OWN),
            pages=no_pages,
            not_ready=service.why_not_ready,
            routers=[ingest_router(service), query_router(engine)],
        )
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        sys.stdout.write(f"{port}\n")
        sys.stdout.flush()
        await serving
        engine.close()
        service.close()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
