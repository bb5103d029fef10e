"""Reading of an embedded store that a server process holds, through that server."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

from ..errors import StoreError, StoreHeldError, StoreVersionError
from ..http_client import request_once
from ..store.location import EmbeddedLocation, parse_store_url, read_server_file
from ..store.migrations import known_migrations
from ..store.store import MAX_ERROR_CHARS, Store, open_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import pyarrow as pa
    from clickhouse_connect.driver.client import Client

    from ..store.location import ServerFile

USER = "rankscope"
"""The server ignores the name; the token is the password."""

PONG = b"Ok.\n"
CONNECT_S = 10
ANSWER_S = 600


def open_for_reading(url: str, *, read_only: bool = False) -> Store:
    """Open the store at ``url``; if a server holds it, open it through that server.

    Args:
        read_only: Make the engine refuse every write: not even a new report is kept.

    Raises:
        StoreUrlError: The URL has no known form.
        StoreHeldError: Another process holds the embedded store and does not answer.
        StoreVersionError: A newer rankscope wrote it.
        StoreError: It could not be opened for another reason.
    """
    try:
        return open_store(url, read_only=read_only)
    except StoreHeldError as held:
        server = find_server(url)
        if server is None:
            raise
        return _open_served(url, server, held)


def find_server(url: str) -> ServerFile | None:
    """Return the server that holds an embedded store.

    None if there is none, or if this user may not read its token.
    """
    location = parse_store_url(url)
    server = read_server_file(location.path) if isinstance(location, EmbeddedLocation) else None
    return None if server is None or server.token is None else server


def _open_served(url: str, server: ServerFile, held: StoreHeldError) -> Store:
    from clickhouse_connect.driver.exceptions import ClickHouseError

    if not _answers(server):
        raise held
    try:
        store = ServedStore(url, server)
    except ClickHouseError as error:
        raise held from error
    try:
        store.check_version()
    except BaseException:
        store.close()
        raise
    return store


def _answers(server: ServerFile) -> bool:
    """Return whether the server answers and accepts its token.

    Checked before the driver connects, because the driver logs its failures.
    """
    try:
        headers = {"Authorization": f"Bearer {server.token}"}
        url = f"{server.url}/ping"
        answer = request_once("GET", url, timeout_s=CONNECT_S, headers=headers)
    except (OSError, ValueError):
        return False
    return answer.status == HTTPStatus.OK and answer.body == PONG


class ServedStore(Store):
    """An embedded store behind a server of another process. It can only be read.

    Args:
        url: The store's own URL.
    """

    def __init__(self, url: str, server: ServerFile) -> None:
        self.server = server
        super().__init__(url, read_only=True)

    def command(self, sql: str, parameters: Mapping[str, Any] | None = None) -> None:
        """Raise `StoreError`."""
        self._refuse()

    def insert_arrow(self, table: str, rows: pa.Table) -> None:
        """Raise `StoreError`."""
        self._refuse()

    def insert_rows(self, table: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Raise `StoreError`."""
        self._refuse()

    def check_version(self) -> None:
        """Check that the server's tables have the version that this code reads.

        Raises:
            StoreVersionError: The server is newer.
            StoreError: It is older.
        """
        found, known = self.schema_version(), known_migrations()[-1].version
        if found > known:
            raise StoreVersionError(self.url, found=found, known=known)
        if found < known:
            raise StoreError(
                f"the server {self.server.url} that holds the store {self.url} runs an older"
                f" rankscope (version {found} of the tables, expected {known}): restart it with"
                " this one"
            )

    def _forget_client(self) -> None:
        """Keep it: each of its statements has an answer of its own."""

    def _refuse(self) -> NoReturn:
        raise StoreError(
            f"the store {self.url} is read through the server {self.server.url},"
            " which accepts no changes this way"
        )

    def _connect(self) -> Client:
        import clickhouse_connect

        clickhouse_connect.common.set_setting("max_error_size", MAX_ERROR_CHARS)
        parts = urlsplit(self.server.url)
        return clickhouse_connect.get_client(
            host=parts.hostname or "",
            port=parts.port or 0,
            username=USER,
            password=self.server.token or "",
            secure=parts.scheme == "https",
            compress=False,  # costs more than it saves on one machine
            autogenerate_session_id=False,
            connect_timeout=CONNECT_S,
            send_receive_timeout=ANSWER_S,
        )
