"""Journal of the agent: cuts that were sent, rows that were given up, maps of host clocks.

A SQLite database in WAL mode with ``synchronous=FULL``: a change is on disk when the method that
makes it returns, and survives a kill and a power cut.
"""

from __future__ import annotations

import json
import os
import sqlite3
import zlib
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from ..identity import SEGMENT_BITS, segment_id
from ..spool.cut import CutKey
from .errors import JournalError, JournalVersionError, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from ..spool.cut import Cut

DATABASE = "journal.db"
VERSION_FILE = "journal"
"""Holds the journal of version 1, JSON lines with checksums. Later versions keep one line in it,
their version, so that an agent of version 1 refuses the folder instead of starting anew."""

JOURNAL_VERSION = 2
MAX_ENTRIES = 100_000
"""Of one table. The oldest beyond it are deleted; the agent asks the collector about those."""

PAGE_BYTES = 1_024
LOG_PAGES = 256
"""Pages and log are smaller than SQLite's defaults of 4 KiB and 1,000 pages, because the state
folder may be in memory."""

CHECKSUM_LENGTH = 8
DAMAGED_CODES = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})

# SQLite has no unsigned 64-bit integer: a segment is text of 16 hex digits.
SCHEMA = (
    """
    CREATE TABLE sent (
        run_id TEXT, epoch INT, rank INT, process TEXT, segment TEXT, first_row INT, end_row INT,
        sha256 TEXT, UNIQUE (run_id, segment, first_row, end_row)
    )
    """,
    "CREATE TABLE settled (run_id TEXT, segment TEXT, end_row INT, UNIQUE (run_id, segment))",
    """
    CREATE TABLE dropped (
        run_id TEXT, process TEXT, reason TEXT, num_rows INT, UNIQUE (run_id, process, reason)
    )
    """,
    "CREATE TABLE clock (host TEXT, boot_id TEXT, begin_ns INT, offset_ns INT, drift_ppb INT)",
)

SELECT_RUN = """
SELECT run_id FROM sent WHERE segment LIKE ? UNION ALL
SELECT run_id FROM settled WHERE segment LIKE ? LIMIT 1
"""
INSERT_SENT = "INSERT OR IGNORE INTO sent VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
DELETE_SENT = """
DELETE FROM sent WHERE run_id = ? AND segment = ? AND first_row = ? AND end_row = ?
"""
SELECT_SENT = """
SELECT run_id, epoch, rank, process, segment, first_row, end_row
FROM sent WHERE run_id = ? ORDER BY rowid
"""
UPSERT_SETTLED = """
INSERT INTO settled VALUES (?, ?, ?)
ON CONFLICT DO UPDATE SET end_row = max(end_row, excluded.end_row)
"""
SELECT_IS_SETTLED = """
SELECT EXISTS (SELECT 1 FROM settled WHERE run_id = ?1 AND segment = ?2 AND end_row >= ?4)
   AND NOT EXISTS (SELECT 1 FROM sent
                   WHERE run_id = ?1 AND segment = ?2 AND first_row = ?3 AND end_row = ?4)
"""
UPSERT_DROPPED = """
INSERT INTO dropped VALUES (?, ?, ?, ?)
ON CONFLICT DO UPDATE SET num_rows = num_rows + excluded.num_rows
"""
INSERT_CLOCK = "INSERT INTO clock VALUES (:host, :boot_id, :begin_ns, :offset_ns, :drift_ppb)"
DELETE_OLDEST = "DELETE FROM {0} WHERE rowid <= (SELECT max(rowid) FROM {0}) - {1}"


class Journal:
    """The agent's durable memory.

    Opening it takes over a journal of version 1. A damaged database is moved away, and the agent
    asks the collector what it has stored, as after the loss of the file.

    Args:
        connect: Opens the database; tests pass a connection that fails.

    Raises:
        JournalError: The database can't be opened.
        JournalVersionError: A newer agent wrote it. It is left unchanged.
    """

    def __init__(
        self, folder: Path, *, connect: Callable[..., sqlite3.Connection] = sqlite3.connect
    ) -> None:
        self.path = folder / DATABASE
        self.damaged: Path | None = None
        """Path to which a damaged database was moved."""

        self.num_damaged = 0
        """Lines of a version 1 journal that were skipped because their checksum is wrong."""

        self._dropped: dict[str, dict[str, dict[str, int]]] = {}
        try:
            self._db = self._open_sound(connect)
            with ExitStack() as stack:
                stack.callback(self._db.close)
                self._prepare(folder / VERSION_FILE)
                for row in self._db.execute("SELECT * FROM dropped"):
                    self._count_dropped(*row)
                stack.pop_all()
        except (sqlite3.Error, OSError) as error:
            raise JournalError(f"{self.path} can't be opened ({reason_of(error)})") from error

    def end_rows(self, run_id: str) -> dict[int, int]:
        """Return the first row of each segment that is not settled."""
        sql = "SELECT segment, end_row FROM settled WHERE run_id = ?"
        return {int(segment, 16): end_row for segment, end_row in self._select(sql, run_id)}

    def unanswered(self, run_id: str) -> tuple[CutKey, ...]:
        """Return the cuts that may have been sent and are not settled, the oldest first."""
        columns = ("run_id", "epoch", "rank", "process", "segment", "first_row", "end_row")
        rows = [dict(zip(columns, row, strict=True)) for row in self._select(SELECT_SENT, run_id)]
        return tuple(CutKey(**{**row, "segment": int(row["segment"], 16)}) for row in rows)

    def run_of(self, process: str) -> str | None:
        """Return the run under which a process's segments were sent; None if none was.

        It differs from the declared one if another job has the same name.
        """
        segments = f"{segment_id(process, 0) >> SEGMENT_BITS:010x}%"
        rows = self._select(SELECT_RUN, segments, segments)
        return rows[0][0] if rows else None

    def dropped(self, run_id: str) -> Mapping[str, Mapping[str, int]]:
        """Return the number of given up rows by process and reason; the mapping is kept current."""
        return self._dropped.setdefault(run_id, {})

    def is_settled(self, key: CutKey) -> bool:
        """Return whether a cut was acknowledged or given up."""
        ((found,),) = self._select(SELECT_IS_SETTLED, *_place(key))
        return bool(found)

    def clock_rows(self) -> list[dict[str, Any]]:
        """Return the stretches of host clocks, in the order in which they were added."""
        columns = ("host", "boot_id", "begin_ns", "offset_ns", "drift_ppb")
        rows = self._select("SELECT * FROM clock ORDER BY rowid")
        return [dict(zip(columns, row, strict=True)) for row in rows]

    def add_sent(self, cuts: Iterable[Cut]) -> None:
        """Add cuts before they are sent for the first time; known ones stay as they are."""
        with self._transaction() as db:
            db.executemany(INSERT_SENT, [_sent_row(cut.key, cut.sha256) for cut in cuts])
            db.execute(DELETE_OLDEST.format("sent", MAX_ENTRIES))

    def settle(self, keys: Iterable[CutKey]) -> None:
        """Mark cuts as acknowledged."""
        with self._transaction() as db:
            _settle(db, keys)

    def drop(self, num_rows: Mapping[CutKey, int], *, reason: str) -> None:
        """Mark cuts as given up.

        Args:
            num_rows: Number of given up rows by cut.
            reason: Reason in `ranks.dropped`.
        """
        rows = [(key.run_id, key.process, reason, num) for key, num in num_rows.items()]
        with self._transaction() as db:
            _settle(db, num_rows)
            db.executemany(UPSERT_DROPPED, rows)
            db.execute(DELETE_OLDEST.format("dropped", MAX_ENTRIES))
        for row in rows:
            self._count_dropped(*row)

    def add_clock(self, row: Mapping[str, Any]) -> None:
        """Add a stretch of a host's clock before it is used."""
        with self._transaction() as db:
            db.execute(INSERT_CLOCK, row)

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def _select(self, sql: str, *values: object) -> list[Any]:
        try:
            return self._db.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise JournalError(f"{self.path} can't be read ({reason_of(error)})") from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._db:
                yield self._db
        except sqlite3.Error as error:
            raise JournalError(
                f"the journal {self.path} can't be written ({reason_of(error)}):"
                " nothing is sent until it can"
            ) from error

    def _count_dropped(self, run_id: str, process: str, reason: str, num_rows: int) -> None:
        of_process = self._dropped.setdefault(run_id, {}).setdefault(process, {})
        of_process[reason] = of_process.get(reason, 0) + num_rows

    def _open_sound(self, connect: Callable[..., sqlite3.Connection]) -> sqlite3.Connection:
        """Return a connection to the database; to a new one if the present one is damaged."""
        database = _open(self.path, connect)
        if _is_sound(database):
            return database
        database.close()
        self.damaged = self.path.with_suffix(".damaged")
        self.path.replace(self.damaged)
        # SQLite would replay it into the new database.
        self.path.with_name(f"{DATABASE}-wal").unlink(missing_ok=True)
        return _open(self.path, connect)

    def _prepare(self, version_file: Path) -> None:
        """Create the tables of a new database and fill them from a journal of version 1.

        Raises:
            JournalVersionError: The journal is of a later version.
        """
        ((version,),) = self._db.execute("PRAGMA user_version").fetchall()
        _check_version(self.path, version)
        if not version:
            lines, self.num_damaged = _read_lines(version_file)
            _check_version(version_file, max((line.get("journal", 0) for line in lines), default=0))
            with self._db as db:
                db.execute("BEGIN")
                for statement in SCHEMA:
                    db.execute(statement)
                for line in lines:
                    _import_line(db, line)
                db.execute(f"PRAGMA user_version = {JOURNAL_VERSION}")
        # Only now: until the database is complete, the lines are the journal.
        body = json.dumps({"journal": JOURNAL_VERSION}, separators=(",", ":")).encode()
        guard = b"%08x %s\n" % (zlib.crc32(body), body)
        if not version_file.exists() or version_file.read_bytes() != guard:
            scratch = version_file.with_suffix(".tmp")
            write_durably(scratch, guard)
            scratch.replace(version_file)
            sync_folder(version_file.parent)


def _open(path: Path, connect: Callable[..., sqlite3.Connection]) -> sqlite3.Connection:
    # SQLite itself would let others read it.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    # Opened in the main thread, used in the agent's.
    database = connect(path, timeout=0.0, check_same_thread=False)
    # Alone, SQLite needs no shared memory, which could kill the process with SIGBUS.
    database.execute("PRAGMA locking_mode = EXCLUSIVE")
    database.execute("PRAGMA synchronous = FULL")
    database.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    database.execute(f"PRAGMA wal_autocheckpoint = {LOG_PAGES}")
    return database


def _is_sound(database: sqlite3.Connection) -> bool:
    try:
        database.execute("PRAGMA journal_mode = WAL")
        ((found,),) = database.execute("PRAGMA quick_check(1)").fetchall()
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF in DAMAGED_CODES:
            return False
        raise
    return bool(found == "ok")


def _check_version(path: Path, version: int) -> None:
    if version > JOURNAL_VERSION:
        raise JournalVersionError(path, found=version, known=JOURNAL_VERSION)


def _settle(db: sqlite3.Connection, keys: Iterable[CutKey]) -> None:
    places = [_place(key) for key in keys]
    db.executemany(DELETE_SENT, places)
    db.executemany(UPSERT_SETTLED, [(run, segment, end) for run, segment, _, end in places])
    db.execute(DELETE_OLDEST.format("settled", MAX_ENTRIES))


def _place(key: CutKey) -> tuple[str, str, int, int]:
    return key.run_id, f"{key.segment:016x}", key.first_row, key.end_row


def _sent_row(key: CutKey, sha256: str) -> tuple[object, ...]:
    run_id, segment, first_row, end_row = _place(key)
    return run_id, key.epoch, key.rank, key.process, segment, first_row, end_row, sha256


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the lines of a version 1 journal, and how many others have a wrong checksum.

    The last lines, if torn, are not counted: the agent was killed while it wrote them.
    """
    if not path.exists():
        return [], 0
    lines = [_unpacked(line) for line in path.read_bytes().splitlines(keepends=True)]
    while lines and lines[-1] is None:
        lines.pop()
    return [line for line in lines if line is not None], lines.count(None)


def _unpacked(raw: bytes) -> dict[str, Any] | None:
    """Return a line of version 1; None if its checksum is wrong."""
    checksum, body = raw[:CHECKSUM_LENGTH], raw[CHECKSUM_LENGTH + 1 :].removesuffix(b"\n")
    if checksum != b"%08x" % zlib.crc32(body):
        return None
    line = json.loads(body)
    return line if isinstance(line, dict) else None


def _import_line(db: sqlite3.Connection, line: dict[str, Any]) -> None:
    match line:
        case {"clock": row}:
            db.execute(INSERT_CLOCK, row)
        case {"cut": cut, "sha256": sha256}:
            db.execute(INSERT_SENT, _sent_row(CutKey(**cut), sha256))
        case {"done": cut}:
            key = CutKey(**cut)
            _settle(db, [key])
            if "reason" in line:
                values = (key.run_id, key.process, line["reason"], line["num_rows"])
                db.execute(UPSERT_DROPPED, values)
        case {"run": run_id, "segment": segment, "end_row": end_row}:
            db.execute(UPSERT_SETTLED, (run_id, f"{segment:016x}", end_row))
        case {"dropped": run_id, "process": process, "reason": reason, "num_rows": num_rows}:
            db.execute(UPSERT_DROPPED, (run_id, process, reason, num_rows))
        case _:
            pass  # the version


def write_durably(path: Path, data: bytes) -> None:
    """Write a file, readable by its owner alone; return once it is on disk."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Return once the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
