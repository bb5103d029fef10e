"""Empty databases on a ClickHouse server that the tests were given."""

from __future__ import annotations

import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode, urlsplit

import clickhouse_connect

from rankscope.collector.store.location import ServerLocation, parse_store_url

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankscope.collector.store.store import Store


@contextmanager
def database_of_its_own(url: str) -> Iterator[str]:
    """Yield the URL of a new database on all servers of the cluster, and drop it afterwards."""
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


def url_of(store: Store) -> str:
    """Return a URL that opens the store again. The store's own URL has no password."""
    location = store.location
    if not isinstance(location, ServerLocation):
        return store.url
    asked: dict[str, int | str] = {"secure": int(location.secure), "quorum": location.quorum}
    if location.cluster is not None:
        asked["cluster"] = location.cluster
    account = f"{quote(location.user, safe='')}:{quote(location.password, safe='')}"
    where = f"{location.host}:{location.port}/{location.database}"
    return f"clickhouse://{account}@{where}?{urlencode(asked)}"
