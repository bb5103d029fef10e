"""The span store: ClickHouse, embedded or a server, behind one small interface.

Heavy libraries load when a store is opened, not when this module is imported:
the command answers `--help` without them.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from contextlib import closing
from typing import IO, TYPE_CHECKING, Any, Self, cast
from weakref import WeakSet

from ..errors import (
    StoreClosedError,
    StoreError,
    StoreHeldError,
    StoreQueryError,
    StoreVersionError,
)
from .cluster import cluster_settings, statements_for
from .location import (
    EmbeddedLocation,
    ServerLocation,
    engine_holder,
    is_held_elsewhere,
    parse_store_url,
    printable_url,
    read_server_file,
)
from .migrations import CREATE_VERSION_TABLE, SELECT_VERSION, known_migrations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path
    from types import TracebackType

    import pyarrow as pa
    from clickhouse_connect.driver.client import Client

    from ..identity import Row

MIB = 1 << 20
GIB = 1 << 30
QUERY_MEMORY_BYTES = 4 * GIB
ENGINE_OPTIONS = {
    "max_server_memory_usage": 6 * GIB,
    "mark_cache_size": 256 * MIB,
    "query_condition_cache_size": 0,
    "compiled_expression_cache_size": 16 * MIB,
    "background_merges_mutations_concurrency_ratio": 1,
}
"""Limits of the whole embedded engine: without them it plans for 90 % of the machine.

Two merges at once instead of four: each takes 33 to 37 MiB whatever the size of its parts, and the
larger the store, the longer they last and the more often four of them meet. No condition cache: an
entry is counted as 72 bytes and takes 184, and each value asked for makes one a part."""

SETTINGS: dict[str, str | int] = {
    "async_insert": 0,  # on by default since 26.2: it would acknowledge before storing
    "optimize_on_insert": 0,  # merging is the background's work: a third off an insert's time
    "output_format_arrow_low_cardinality_as_dictionary": 1,
    "output_format_arrow_string_as_string": 1,
    "output_format_arrow_compression_method": "none",
    "output_format_json_quote_64bit_integers": 0,
}
"""Set once per connection: a setting given with a query costs the embedded engine a
read, a set and a reset around it."""

EMBEDDED_LIMITS = {
    "max_threads": 2,
    "max_memory_usage": QUERY_MEMORY_BYTES,
    "max_threads_for_indexes": 1,
    "merge_tree_use_prefixes_deserialization_thread_pool": 0,
    "use_cache_for_count_from_files": 0,
}
"""Of one query, beside the job on its machine; a server's own profile says what it allows.

The last three for what the engine would keep: each of its idle threads some 20 columns in which it
once looked for the values of an ``IN``; as many threads as a table has columns, for the heads of
their files; and the number of rows of each insert's file."""

ALLOCATOR_VARIABLE, ALLOCATOR = "JE_MALLOC_CONF", "tcache_max:1024,tcache_nslots_small_max:20"
"""What the engine's jemalloc reads as it is loaded: what a thread may keep of freed memory.

The engine has some 80 threads that wait and takes up one after the other, so that each keeps what
it freed for itself; as it comes that may be 4 MB each, filled in the course of an hour. So it is
160 kB at most (source: jemalloc(3), opt.tcache_max)."""

UNKNOWN_TABLE = 60


SELECT_BROKEN = """
SELECT table, count() AS num_parts, any(path) AS example FROM system.detached_parts
WHERE database = currentDatabase() AND startsWith(reason, 'broken')
GROUP BY table ORDER BY table
"""

NO_ANSWER = "the store's server does not answer"


RETRY_DELAYS_S = (0.5, 1.0, 2.0, 4.0)
"""Pauses before a server is asked again. Two collectors that start at once change the same tables;
a replica that has not yet heard of the one change refuses the other."""


def open_store(url: str, *, read_only: bool = False) -> Store:
    """Open the store at ``url`` and bring its tables to the current version.

    Args:
        url: ``chdb:///absolute/path`` (made if it is not there) or
            ``clickhouse://user:password@host:8123/database``, with ``?cluster=NAME`` where
            the tables lie on a cluster.
        read_only: Refuse every write in the engine itself, and don't migrate.

    Raises:
        StoreUrlError: The URL is of no known form.
        StoreHeldError: Another process owns the embedded store.
        StoreVersionError: A newer rankscope wrote it.
        StoreError: It could not be opened for another reason.
    """
    store = Store(url, read_only=read_only)
    try:
        if not read_only:
            migrate(store)
    except BaseException:
        store.close()
        raise
    return store


class Store:
    """An open store. Threads share it; each gets a client of its own, because a client
    serialises its calls. It does not survive a fork.
    """

    def __init__(self, url: str, *, read_only: bool = False) -> None:
        self.location = parse_store_url(url)
        self.url = printable_url(url)
        self._statements = statements_for(self.location)
        self.read_only = read_only
        self._pid = os.getpid()
        self._local = threading.local()
        self._lock = threading.Lock()
        # A thread's client ends with its thread; the first one stays, and with it the engine.
        self._clients: WeakSet[Client] = WeakSet()
        self._is_closed = False
        self._first_client = self._client()

    @property
    def path(self) -> Path | None:
        """Folder of an embedded store; None for a server."""
        return self.location.path if isinstance(self.location, EmbeddedLocation) else None

    def rows(self, sql: str, parameters: Mapping[str, Any] | None = None) -> list[Row]:
        """Return a small result as one dict a row, by column name."""
        data = self._query(sql, parameters, fmt="JSONEachRow")
        # One document: parsing 50,000 of them one by one takes half as long again.
        rows: list[Row] = json.loads(b"[%b]" % b",".join(data.splitlines()))
        return rows

    def arrow(self, sql: str, parameters: Mapping[str, Any] | None = None) -> pa.Table:
        """Return a large result as Arrow columns; `LowCardinality` ones are dictionaries."""
        import pyarrow as pa

        data = self._query(sql, parameters, fmt="Arrow")
        return pa.ipc.open_file(pa.py_buffer(data)).read_all()

    def long_arrow(
        self, sql: str, parameters: Mapping[str, Any] | None = None, *, num_rows: int
    ) -> pa.Table:
        """Return a result of millions of rows as `arrow` does, in a third of the memory.

        Args:
            sql: Selects columns of numbers and of `LowCardinality(String)`.
            parameters: Bound ones.
            num_rows: How many rows are expected.
        """
        from .result_blocks import read_blocks

        client = self._client()
        with _translated_errors():
            answer = client.raw_stream(sql, parameters=_plain(parameters), fmt="Native")
            with closing(cast("IO[bytes]", answer)) as stream:
                found = read_blocks(stream, num_rows=num_rows)
        # An empty result comes in no block, and so without its columns' names.
        return found if found.num_columns else self.arrow(sql, parameters)

    def command(self, sql: str, parameters: Mapping[str, Any] | None = None) -> None:
        """Run a statement that returns nothing; on a cluster, on each of its servers."""
        client = self._client()
        for said in self._statements.of(sql, parameters):
            statement = said.sql
            with _translated_errors():
                client.command(statement, parameters=_plain(said.parameters))

    def table_here(self, table: str) -> str:
        """Return the table in which the asked server has its own rows of ``table``.

        On a cluster that is its share, of whose parts ``system.parts`` tells.
        """
        return self._statements.table_here(table)

    def insert_arrow(self, table: str, rows: pa.Table) -> None:
        """Insert columns by name; returns when they are on disk."""
        client = self._client()
        with _translated_errors():
            client.insert_arrow(table, rows)

    def insert_rows(self, table: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Insert a few rows by column name (a column left out takes its default)."""
        lines = "\n".join(json.dumps(row) for row in rows)
        if not lines:
            return
        client = self._client()
        with _translated_errors():
            client.raw_insert(table, None, lines.encode(), fmt="JSONEachRow")

    def schema_version(self) -> int:
        """Return the version of the tables, 0 where there are none yet."""
        from clickhouse_connect.driver.exceptions import DatabaseError

        client = self._client()
        try:
            data = client.raw_query(SELECT_VERSION, fmt="JSONEachRow")
        except DatabaseError as error:
            if error.code == UNKNOWN_TABLE:
                return 0
            raise StoreQueryError(_first_line(error), code=error.code) from error
        return int(json.loads(data)["version"])

    def close(self) -> None:
        """Close every thread's client and give the embedded path free. Safe to repeat."""
        with self._lock:
            self._is_closed = True
            clients, self._clients = list(self._clients), WeakSet()
        if os.getpid() != self._pid:
            return  # the engine's threads don't exist in a forked child: closing would hang
        for client in clients:
            client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _query(self, sql: str, parameters: Mapping[str, Any] | None, *, fmt: str) -> bytes:
        client = self._client()
        with _translated_errors():
            return client.raw_query(sql, parameters=_plain(parameters), fmt=fmt)

    def _client(self) -> Client:
        """Return this thread's client, connecting on its first use."""
        if self._is_closed:
            raise StoreClosedError(f"the store {self.url} is closed: open it again")
        if os.getpid() != self._pid:
            raise StoreClosedError(
                f"the store {self.url} was opened before a fork: open it in the child instead"
            )
        client: Client | None = getattr(self._local, "client", None)
        if client is None:
            client = self._connect()
            self._local.client = client
            with self._lock:
                self._clients.add(client)
        return client

    def _connect(self) -> Client:
        return _connect(self.location, url=self.url, read_only=self.read_only)


def _connect(location: EmbeddedLocation | ServerLocation, *, url: str, read_only: bool) -> Client:
    if isinstance(location, EmbeddedLocation):
        client = _connect_embedded(location.path)
        if read_only:
            client.command("SET readonly = 1")
        return client
    import clickhouse_connect
    from clickhouse_connect.driver.exceptions import ClickHouseError

    try:
        return clickhouse_connect.get_client(
            host=location.host,
            port=location.port,
            username=location.user,
            password=location.password,
            database=location.database,
            secure=location.secure,
            settings=SETTINGS | cluster_settings(location) | ({"readonly": 2} if read_only else {}),
        )
    except ClickHouseError as error:
        raise StoreError(f"no answer from the store {url}: {_first_line(error)}") from error


def _connect_embedded(path: Path) -> Client:
    import clickhouse_connect
    from clickhouse_connect.driver.exceptions import ClickHouseError

    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StoreError(
            f"cannot make the store's folder {path} ({error.strerror}): pass another --store"
        ) from error
    if is_held_elsewhere(path):
        raise _held_error(path)
    _load_engine()
    try:
        return clickhouse_connect.get_client(
            interface="chdb",
            path=str(path),
            settings=SETTINGS | EMBEDDED_LIMITS,
            chdb_options=ENGINE_OPTIONS,
        )
    except ClickHouseError as error:
        raise _embedded_error(path, error) from error


def _load_engine() -> None:
    """Load the engine's library with the allocator's settings, unless the user has his own."""
    if "chdb" in sys.modules or ALLOCATOR_VARIABLE in os.environ:
        return
    os.environ[ALLOCATOR_VARIABLE] = ALLOCATOR
    try:
        importlib.import_module("chdb")
    finally:
        del os.environ[ALLOCATOR_VARIABLE]


def _held_error(path: Path) -> StoreHeldError:
    server = read_server_file(path)
    pid = server.pid if server else engine_holder(path)
    return StoreHeldError(path, holder_pid=pid, holder_url=server.url if server else None)


def _embedded_error(path: Path, error: Exception) -> StoreError:
    if is_held_elsewhere(path):
        return _held_error(path)
    if "already initialized with path" in str(error):
        return StoreError(
            f"this process already has another embedded store open, so it cannot open {path}:"
            " close that one first"
        )
    if "EmbeddedServer" in str(error):
        # What it found is in the line that the engine itself has written to stderr.
        return StoreError(
            f"cannot open the store at {path}: the engine cannot read its files, and has changed"
            " nothing; keep the folder for recovery, and pass another --store or a backup"
        )
    return StoreError(f"cannot open the store at {path}: {_first_line(error)}")


class _translated_errors:  # noqa: N801  # reads as the statement it is
    """Turn the driver's errors into `StoreQueryError` with the engine's first line."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is None:
            return
        from clickhouse_connect.driver.exceptions import ClickHouseError

        if isinstance(exc, ClickHouseError):
            raise StoreQueryError(_first_line(exc), code=getattr(exc, "code", None)) from exc


def _plain(parameters: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return dict(parameters) if parameters else None


def _first_line(error: BaseException) -> str:
    unreachable = unreachable_reason(error)
    if unreachable is not None:
        return unreachable
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def damage_of(store: Store) -> tuple[str, ...]:
    """Return one line for each table that lacks rows because their files are damaged.

    The engine moves such files into the table's folder ``detached`` when it opens the store,
    and goes on without them; nothing else tells that rows are missing.
    """
    return tuple(
        f"table {row['table']} lacks the rows of {row['num_parts']} damaged parts, which the engine"
        f" has put aside (as {row['example']}): restore them from a backup"
        for row in store.rows(SELECT_BROKEN)
    )


def unreachable_reason(error: BaseException) -> str | None:
    """Return why a request came to no answer; None where the server did answer.

    The driver's own text holds the request's whole address: every bound value, and a new number
    at each try, so that no two tries say the same.

    Args:
        error: What the driver raised.
    """
    from urllib3.exceptions import HTTPError

    if not isinstance(error.__cause__, HTTPError):
        return None
    return f"{NO_ANSWER} ({_innermost(error.__cause__)})"


def _innermost(error: BaseException) -> str:
    """Return what the system said, or else what kind of error it was."""
    found: BaseException = error
    seen: set[int] = set()
    while id(found) not in seen:
        seen.add(id(found))
        if isinstance(found, OSError) and found.strerror:
            return found.strerror
        reason = getattr(found, "reason", None)
        inner = (
            reason if isinstance(reason, BaseException) else found.__cause__ or found.__context__
        )
        found = inner or found
    return "timed out" if "Timeout" in type(found).__name__ else type(found).__name__


def migrate(store: Store, *, sleep: Callable[[float], None] = time.sleep) -> int:
    """Apply every migration that the store lacks, in order; return its version.

    A current store costs one read. Statements for the embedded engine alone are left out for a
    server. A migration that was cut short runs again:
    its version is recorded after its last statement. A server may be brought up
    by several collectors at once; each statement can be said twice.

    Raises:
        StoreVersionError: The store is of a newer version than this code.
        StoreQueryError: A statement was refused; by a server, after the last retry.
    """
    is_shared = isinstance(store.location, ServerLocation)
    for delay_s in RETRY_DELAYS_S if is_shared else ():
        try:
            return _apply(store)
        except StoreQueryError:
            sleep(delay_s)
    return _apply(store)


def _apply(store: Store) -> int:
    newest = known_migrations()[-1].version
    found = store.schema_version()
    if found > newest:
        raise StoreVersionError(store.url, found=found, known=newest)
    if found < newest:
        store.command(CREATE_VERSION_TABLE)
    is_server = isinstance(store.location, ServerLocation)
    for migration in known_migrations()[found:]:
        is_meant = not (is_server and migration.is_of_embedded_engine)
        for statement in migration.statements() if is_meant else ():
            store.command(statement)
        row = {"version": migration.version, "name": migration.name}
        store.insert_rows("schema_version", [row])
    return newest
