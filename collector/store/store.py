"""The store: ClickHouse, embedded or a server, behind one small interface.

`open_store` returns a `Store`, which runs SQL statements and inserts rows:

    with open_store("chdb:///data/rankscope") as store:
        rows = store.rows("SELECT run_id, state FROM runs FINAL")

Heavy libraries load when a store is opened, not when this module is imported: the command answers
`--help` without them.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import stat
import threading
import time
from contextlib import closing, contextmanager
from typing import IO, TYPE_CHECKING, Any, Self, cast

from ..errors import (
    StoreClosedError,
    StoreDamagedError,
    StoreError,
    StoreHeldError,
    StoreQueryError,
    StoreUnreachableError,
    StoreVersionError,
)
from .cluster import cluster_settings, make_statements
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
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
    from pathlib import Path
    from threading import Thread

    import pyarrow as pa
    from clickhouse_connect.driver.client import Client
    from clickhouse_connect.driver.exceptions import ClickHouseError

    from ..identity import Row

MIB = 1 << 20
GIB = 1 << 30
QUERY_MEMORY_BYTES = 4 * GIB
ENGINE_OPTIONS = {
    "max_server_memory_usage": 6 * GIB,
    "mark_cache_size": 256 * MIB,
    "query_condition_cache_size": 0,
    "background_merges_mutations_concurrency_ratio": 1,
}
"""Limits of the embedded engine; its defaults are made for 90 % of the machine's memory.

Two merges at once, not four: each takes 33 to 37 MiB whatever the size of its parts, and the larger
the store, the longer they last and the more often four would coincide. No condition cache: it
counts an entry as 72 bytes but uses 184, and makes one per part for each value of a query."""

SETTINGS: dict[str, str | int] = {
    "async_insert": 0,  # on by default since 26.2: it acknowledges before rows are stored
    "max_partitions_per_insert_block": 0,  # of a migration: a partition is a day
    "optimize_on_insert": 0,  # left to the background merges: inserts take a third less time
    "output_format_arrow_low_cardinality_as_dictionary": 1,
    "output_format_arrow_string_as_string": 1,
    "output_format_arrow_compression_method": "none",
    "output_format_json_quote_64bit_integers": 0,
}
"""Settings of a connection. Given with each query, they would cost the embedded engine a read, a
set and a reset each time."""

EMBEDDED_LIMITS = {
    "max_threads": 2,
    "max_memory_usage": QUERY_MEMORY_BYTES,
    "max_threads_for_indexes": 1,
    "merge_tree_use_prefixes_deserialization_thread_pool": 0,
    "use_cache_for_count_from_files": 0,
    "preferred_block_size_bytes": 8 * MIB,
    "compile_expressions": 0,
    "compile_aggregate_expressions": 0,
    "compile_sort_description": 0,
}
"""Limits of a query of the embedded engine, which shares its machine with the job. A server has its
own profile.

Three of them limit what the engine keeps: each idle thread some 20 columns that it once searched
for the values of an ``IN``; one thread per column of a table, to read the heads of its files; and
the number of rows of each inserted file. The last one is the size of a block that is read: with the
default of 1 MB, a result of spans has blocks of 8,192 rows, and its reader takes half as long
again. Nothing is compiled: that took a fifth of the time of a small run's analysis, and sums over
17 million spans took as long with it."""

ALLOCATOR_VARIABLE, ALLOCATOR = "JE_MALLOC_CONF", "tcache_max:1024,tcache_nslots_small_max:20"
"""Variable from which the engine's jemalloc takes the limits of its thread caches.

The engine has some 80 idle threads and uses them in turn, so each keeps memory that it freed. The
default allows 4 MB each, reached within an hour; this allows 160 kB.

Source: jemalloc(3), opt.tcache_max."""

METADATA = "metadata"
"""Folder that the engine has in each of its stores."""

OTHERS = stat.S_IRWXG | stat.S_IRWXO
UNKNOWN_TABLE = 60

SELECT_DAMAGED = """
SELECT table, count() AS num_parts, any(path) AS example FROM system.detached_parts
WHERE database = currentDatabase() AND startsWith(reason, 'broken')
GROUP BY table ORDER BY table
"""

DAMAGE_CODES = frozenset({32, 33, 39, 40, 74, 246, 271, 432})
"""Codes of the engine for bytes that it can't read or that are not those that it wrote, among them
CANNOT_READ_ALL_DATA (33), CHECKSUM_DOESNT_MATCH (40), CORRUPTED_DATA (246)."""

DAMAGED_PART = re.compile(r"while reading from part (\S+) in table \S*?([^\s.`]+)`? \(")
ENGINE_REASON = re.compile(r"DB::Exception: (.+?)(?:\. |\.?: While |$)")
MAX_ERROR_CHARS = 4096
"""Of an error that the driver passes on. By default it cuts off the name of a damaged part."""

PROXY_STATUS = re.compile(r"response code 50[234]\b")
"""Status of a proxy, in the driver's text, while no server behind it answers."""

NO_ANSWER = "the store's server does not answer"

RETRY_DELAYS_S = (0.5, 1.0, 2.0, 4.0)
"""Pauses before a migration of a server is retried. Two collectors that start at once change the
same tables; a replica that does not have the first change yet refuses the second."""


def _say_nothing(_: str) -> None:
    """Take a line that is not shown."""


def open_store(
    url: str, *, read_only: bool = False, say: Callable[[str], None] = _say_nothing
) -> Store:
    """Open a store and migrate its tables to the current version.

    Args:
        url: ``chdb:///absolute/path`` (created if it does not exist) or
            ``clickhouse://user:password@host:8123/database``, with ``?cluster=NAME`` if its
            tables are on a cluster.
        read_only: Make the engine refuse every write, and do not migrate.
        say: Takes a line before each migration of a store of an older version.

    Raises:
        StoreUrlError: The URL has an unknown form.
        StoreHeldError: Another process has the embedded store open.
        StoreVersionError: A newer rankscope wrote the store.
        StoreError: The store could not be opened for another reason.
    """
    store = Store(url, read_only=read_only)
    try:
        if not read_only:
            migrate(store, say=say)
    except BaseException:
        store.close()
        raise
    return store


class Store:
    """An open ClickHouse store. A context manager.

    Threads may share it: each gets its own client, because a client runs one call at a time. A
    forked child can't use it and must open its own.

    Statements take bound parameters in ClickHouse's form, ``{run_id:String}``. Every method raises
    `StoreQueryError` if the engine refuses a statement, `StoreDamagedError` if a part of a table
    can't be read, and `StoreClosedError` after `close`.
    """

    def __init__(self, url: str, *, read_only: bool = False) -> None:
        self.location = parse_store_url(url)
        self.url = printable_url(url)
        self._statements = make_statements(self.location)
        self.read_only = read_only
        self._pid = os.getpid()
        self._local = threading.local()
        self._lock = threading.Lock()
        self._clients: dict[Thread, Client] = {}
        self._is_closed = False
        # The engine lives as long as any client: this one is kept when its thread ends.
        self._first_client = self._local.client = self._connect()

    @property
    def path(self) -> Path | None:
        """Folder of an embedded store; None if the store is a server."""
        return self.location.path if isinstance(self.location, EmbeddedLocation) else None

    def rows(self, sql: str, parameters: Mapping[str, Any] | None = None) -> list[Row]:
        """Run a query with a small result.

        Args:
            parameters: Values of its bound parameters, by name.

        Returns:
            One dict per row, by column name.
        """
        data = self._query(sql, parameters, fmt="JSONEachRow")
        # Parsed as one document: 50,000 single documents take half as long again.
        rows: list[Row] = json.loads(b"[%b]" % b",".join(data.splitlines()))
        return rows

    def arrow(self, sql: str, parameters: Mapping[str, Any] | None = None) -> pa.Table:
        """Run a query with a large result. Arguments as `rows`.

        Returns:
            Arrow columns; those of type ``LowCardinality(String)`` are dictionaries.
        """
        import pyarrow as pa

        data = self._query(sql, parameters, fmt="Arrow")
        return pa.ipc.open_file(pa.py_buffer(data)).read_all()

    def stream_arrow(self, sql: str, *parameters: Mapping[str, Any], num_rows: int) -> pa.Table:
        """Run a query with millions of rows. Like `arrow`, in a third of the memory.

        Args:
            sql: The query; its columns are numbers or ``LowCardinality(String)``.
            parameters: Values of its bound parameters, by name. If there are several, the query
                runs with each, and the results follow each other.
            num_rows: Expected number of all rows; more rows cost a copy.
        """
        from .native_format import read_native_blocks

        client = self._client()

        def results() -> Generator[IO[bytes], None, None]:
            for bound in parameters or (None,):
                answer = client.raw_stream(sql, parameters=_plain(bound), fmt="Native")
                with closing(cast("IO[bytes]", answer)) as stream:
                    yield stream

        with self._translated_errors(), closing(results()) as streams:
            table = read_native_blocks(streams, num_rows=num_rows)
        # An empty result has no block, so its columns' names are unknown.
        return table if table.num_columns else self.arrow(sql, *parameters[:1])

    def command(self, sql: str, parameters: Mapping[str, Any] | None = None) -> None:
        """Run a statement without a result; on a cluster, on each of its servers.

        Arguments as `rows`.
        """
        client = self._client()
        for rewritten in self._statements.rewrite(sql, parameters):
            statement = rewritten.sql
            with self._translated_errors():
                client.command(statement, parameters=_plain(rewritten.parameters))

    def local_table(self, table: str) -> str:
        """Return the name under which the connected server itself stores rows of ``table``.

        On a cluster this is the table that ``system.parts`` lists, with one shard's rows.
        """
        return self._statements.local_table(table)

    def insert_arrow(self, table: str, rows: pa.Table) -> None:
        """Insert columns by name. Returns when they are on disk."""
        client = self._client()
        with self._translated_errors():
            client.insert_arrow(table, rows)

    def insert_rows(self, table: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Insert a few rows; a column that a row leaves out takes its default.

        Returns when they are on disk.
        """
        lines = "\n".join(json.dumps(row) for row in rows)
        if not lines:
            return
        client = self._client()
        with self._translated_errors():
            client.raw_insert(table, None, lines.encode(), fmt="JSONEachRow")

    def stop_merges(self) -> None:
        """Leave the merging of inserted parts to other processes, if the engine is embedded.

        For a process that reads and ends. Otherwise its engine merges what the process before has
        inserted, beside the work: for 7.5 million new spans 1.4 to 2.1 s of CPU time, where reading
        all of their parts takes 0.2 s more than reading one.
        """
        if self.path is not None and not self.read_only:
            self.command("SYSTEM STOP MERGES")

    def schema_version(self) -> int:
        """Return the version of the tables; 0 if there are none yet."""
        from clickhouse_connect.driver.exceptions import DatabaseError

        client = self._client()
        try:
            data = client.raw_query(SELECT_VERSION, fmt="JSONEachRow")
        except DatabaseError as error:
            if error.code == UNKNOWN_TABLE:
                return 0
            raise self._query_error(error) from error
        return int(json.loads(data)["version"])

    def close(self) -> None:
        """Close every thread's client and release the embedded store. May be repeated."""
        self._is_closed = True
        if os.getpid() != self._pid:
            return  # a forked child lacks the engine's threads: closing would hang
        with self._lock:
            clients, self._clients = [self._first_client, *self._clients.values()], {}
            for client in clients:
                client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _query(self, sql: str, parameters: Mapping[str, Any] | None, *, fmt: str) -> bytes:
        client = self._client()
        with self._translated_errors():
            return client.raw_query(sql, parameters=_plain(parameters), fmt=fmt)

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            from clickhouse_connect.driver.exceptions import ClickHouseError

            if not isinstance(error, ClickHouseError):
                raise
            self._forget_client()
            raise self._query_error(error) from error

    def _forget_client(self) -> None:
        """Drop this thread's client of the engine, after an error.

        The engine would begin its next answer with what it had of the one that failed: rows of
        another statement, or bytes of another format.
        """
        if self.path is not None:
            self._local.client = None

    def _query_error(self, error: ClickHouseError) -> StoreQueryError:
        code, text = getattr(error, "code", None), str(error)
        part = DAMAGED_PART.search(text)
        if part is None or code not in DAMAGE_CODES:
            return StoreQueryError(_first_line(error), code=code)
        reason = ENGINE_REASON.search(text)
        return StoreDamagedError(
            table=part[2],
            part=part[1],
            store=str(self.path or self.url),
            reason=reason[1][:100] if reason else f"code {code}",
            code=code,
        )

    def _client(self) -> Client:
        if self._is_closed:
            raise self._closed_error()
        if os.getpid() != self._pid:
            raise StoreClosedError(
                f"the store {self.url} was opened before a fork: open it again in the child"
            )
        client: Client | None = getattr(self._local, "client", None)
        if client is None:
            client = self._local.client = self._new_client()
        return client

    def _new_client(self) -> Client:
        # Opened and closed under the lock, those of ended threads too: after `close` none is left
        # that still holds the engine, so that the process may open another store.
        with self._lock:
            if self._is_closed:
                raise self._closed_error()
            current = threading.current_thread()
            for thread in list(self._clients):
                if thread is current or not thread.is_alive():
                    self._clients.pop(thread).close()
            client = self._clients[current] = self._connect()
            return client

    def _closed_error(self) -> StoreClosedError:
        return StoreClosedError(f"the store {self.url} is closed: open it again")

    def _connect(self) -> Client:
        return _connect(self.location, url=self.url, read_only=self.read_only)


def migrate(
    store: Store,
    *,
    sleep: Callable[[float], None] = time.sleep,
    say: Callable[[str], None] = _say_nothing,
) -> int:
    """Apply the migrations that the store lacks, in order; return its version.

    If the store is current, this is one read. An interrupted migration runs again, because its
    version is recorded after its last statement. Several collectors may migrate one server at
    once, because every statement may run more than once.

    Args:
        sleep: Waits before a retry; only a server is retried.
        say: See `open_store`.

    Raises:
        StoreVersionError: The store has a newer version than this code.
        StoreQueryError: A statement was refused; by a server, also at the last retry.
    """
    is_server = isinstance(store.location, ServerLocation)
    for delay_s in RETRY_DELAYS_S if is_server else ():
        try:
            return _apply_migrations(store, is_server=is_server, say=say)
        except StoreQueryError:
            sleep(delay_s)
    return _apply_migrations(store, is_server=is_server, say=say)


def _apply_migrations(store: Store, *, is_server: bool, say: Callable[[str], None]) -> int:
    newest = known_migrations()[-1].version
    version = store.schema_version()
    if version > newest:
        raise StoreVersionError(store.url, found=version, known=newest)
    if version < newest:
        store.command(CREATE_VERSION_TABLE)
    rows: list[Row] = []
    for migration in known_migrations()[version:]:
        is_needed = not (is_server and migration.is_embedded_only)
        if version:
            say(f"upgrading the store: {migration.name}")
        for statement in migration.statements() if is_needed else ():
            store.command(statement)
        rows.append({"version": migration.version, "name": migration.name})
        # A new embedded store has nothing to lose by all of them once more: it notes them at once.
        if is_server or version or migration.version == newest:
            store.insert_rows("schema_version", rows)
            rows = []
    return newest


def read_damage(store: Store) -> tuple[str, ...]:
    """Return a line for each table that has lost rows because files are damaged.

    When the engine opens a store, it moves damaged files into the table's folder ``detached`` and
    goes on without them. Nothing else reports that rows are missing.
    """
    return tuple(
        f"table {row['table']} has lost the rows of {row['num_parts']} damaged parts, which the"
        f" engine has moved to {row['example']}: restore them from a backup"
        for row in store.rows(SELECT_DAMAGED)
    )


def _connect(location: EmbeddedLocation | ServerLocation, *, url: str, read_only: bool) -> Client:
    if isinstance(location, EmbeddedLocation):
        client = _connect_embedded(location.path)
        if read_only:
            client.command("SET readonly = 1")
        return client
    import clickhouse_connect
    from clickhouse_connect.driver.exceptions import ClickHouseError

    clickhouse_connect.common.set_setting("max_error_size", MAX_ERROR_CHARS)
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
        is_starting = unreachable_reason(error) is not None or PROXY_STATUS.search(str(error))
        kind = StoreUnreachableError if is_starting else StoreError
        raise kind(f"no answer from the store {url}: {_first_line(error)}") from error


def _connect_embedded(path: Path) -> Client:
    import clickhouse_connect
    from clickhouse_connect.driver.exceptions import ClickHouseError

    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StoreError(
            f"cannot create the store's folder {path} ({error.strerror}): pass another --store"
        ) from error
    if is_held_elsewhere(path):
        raise _held_error(path)
    try:
        _load_engine()
    except ModuleNotFoundError as error:
        raise StoreError(
            f"the embedded store {path} needs {error.name}, which is not installed:"
            ' pip install "rankscope[embedded]", or pass --store clickhouse://...'
        ) from error
    _check_folder(path)
    try:
        client = clickhouse_connect.get_client(
            interface="chdb",
            path=str(path),
            settings=SETTINGS | EMBEDDED_LIMITS,
            chdb_options=ENGINE_OPTIONS,
        )
    except ClickHouseError as error:
        raise _embedded_error(path, error) from error
    # The driver hands rows over in a file, and half of a span's columns are constant: to compress
    # them takes a third of the time that the kernel takes to write and read them.
    client.write_compression = "lz4"
    return client


def _check_folder(path: Path) -> None:
    """Make a store's folder private, and check that the engine can write to it.

    A folder that was created by something else, as a volume or by ``mkdir``, may be open to all
    users, and the engine's files are as open as their folder.

    Raises:
        StoreError: The folder is read-only, or it is open to other users and cannot be closed.
    """
    if not os.access(path, os.W_OK | os.X_OK):  # also false for root if the disk is read-only
        raise StoreError(
            f"the store at {path} is read-only, and the engine must write to it: make it writable"
            " for this user, or pass the --store of a copy; nothing is damaged"
        )
    mode = path.stat().st_mode
    if mode & OTHERS == 0:
        return
    if not (path / METADATA).is_dir() and any(path.iterdir()):
        raise StoreError(
            f"{path} is open to other users (mode {stat.S_IMODE(mode):o}) and has files that are"
            f" not a store's: pass a new folder as --store, or run chmod 700 {path}"
        )
    try:
        path.chmod(stat.S_IMODE(mode) & ~OTHERS)
    except OSError as error:
        raise StoreError(
            f"{path} is open to other users (mode {stat.S_IMODE(mode):o}) and belongs to another"
            f" user, so it cannot be made private ({error.strerror}): run chmod 700 {path} as its"
            " owner, or pass another --store"
        ) from error


def _load_engine() -> None:
    """Load the engine's library with our allocator settings, unless the user sets others."""
    is_chosen = ALLOCATOR_VARIABLE in os.environ
    os.environ.setdefault(ALLOCATOR_VARIABLE, ALLOCATOR)
    try:
        importlib.import_module("chdb")
    finally:
        if not is_chosen:
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
    disk = os.statvfs(path)
    if disk.f_bavail * disk.f_frsize < MIB:
        return StoreError(
            f"cannot open the store at {path}: its disk is full; free some space and try again"
        )
    if "EmbeddedServer" in str(error):
        # The engine has written the cause to stderr.
        return StoreError(
            f"cannot open the store at {path}: the engine cannot read its files, and has changed"
            " nothing; keep the folder for recovery, and pass another --store or a backup"
        )
    return StoreError(f"cannot open the store at {path}: {_first_line(error)}")


def _plain(parameters: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return dict(parameters) if parameters else None


def _first_line(error: BaseException) -> str:
    unreachable = unreachable_reason(error)
    if unreachable is not None:
        return unreachable
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def unreachable_reason(error: BaseException) -> str | None:
    """Return why a request got no answer, in one line; None if the server answered.

    The driver's own text has the request's whole address: every bound value, and a number that is
    new in each attempt, so two attempts never give the same line.
    """
    from urllib3.exceptions import HTTPError

    if not isinstance(error.__cause__, HTTPError):
        return None
    return f"{NO_ANSWER} ({_innermost_reason(error.__cause__)})"


def _innermost_reason(error: BaseException) -> str:
    """Return the system's text of the innermost error, or else its type."""
    cause: BaseException = error
    seen: set[int] = set()
    while id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        reason = getattr(cause, "reason", None)
        inner = (
            reason if isinstance(reason, BaseException) else cause.__cause__ or cause.__context__
        )
        cause = inner or cause
    return "timed out" if "Timeout" in type(cause).__name__ else type(cause).__name__
