"""An empty database on a ClickHouse server that was given to the tests."""

from __future__ import annotations

import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import clickhouse_connect

from collector.location import ServerLocation, parse_store_url

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def database_of_its_own(url: str) -> Iterator[str]:
    """Yield the URL of a new database on the server (each of the cluster's), dropped after."""
    location = parse_store_url(url)
    assert isinstance(location, ServerLocation)
    name = f"test_{uuid.uuid4().hex[:12]}"
    everywhere = "" if location.cluster is None else f"ON CLUSTER `{location.cluster}`"
    with clickhouse_connect.get_client(
        host=location.host,
        port=location.port,
        username=location.user,
        password=location.password,
        secure=location.secure,
    ) as client:
        client.command(f"CREATE DATABASE `{name}` {everywhere}")
        try:
            yield urlsplit(url)._replace(path=f"/{name}").geturl()
        finally:
            client.command(f"DROP DATABASE `{name}` {everywhere} SYNC")
