"""Errors of the collector. Each message is one line that says what to do."""

from __future__ import annotations

import traceback
from datetime import UTC, datetime
from pathlib import Path


class CollectorError(Exception):
    """Base of all errors of this package."""


def describe_defect(error: Exception) -> str:
    """Return type and place of an unexpected error, whose text may contain data of the job."""
    (frame,) = traceback.extract_tb(error.__traceback__)[-1:]
    place = f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno}"
    return f"{type(error).__name__} at {place}: please report it"


class StoreError(CollectorError):
    """The store can't be opened, read or written."""


class StoreUrlError(StoreError):
    """The store's URL has an unknown form."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(
            f"store URL {url!r}: {reason};"
            " give chdb:///absolute/path or clickhouse://user:password@host:8123/database"
        )


class StoreUnreachableError(StoreError):
    """No server answers at the store's address, or not yet."""


class StoreHeldError(StoreError):
    """Another process has opened the embedded store, which allows one process at a time."""

    def __init__(self, path: Path, *, holder_pid: int | None, holder_url: str | None) -> None:
        who = f"process {holder_pid}" if holder_pid is not None else "another process"
        where = f" (serving {holder_url})" if holder_url else ""
        super().__init__(
            f"the store at {path} is in use by {who}{where}:"
            " stop it, or pass another --store (or RANKSCOPE_STORE)"
        )
        self.path = path
        self.holder_pid = holder_pid
        self.holder_url = holder_url


class StoreVersionError(StoreError):
    """The store was written by a newer rankscope."""

    def __init__(self, url: str, *, found: int, known: int) -> None:
        super().__init__(
            f"the store {url} has schema version {found}, this rankscope knows {known}:"
            " upgrade rankscope, or pass another --store"
        )


class StoreClosedError(StoreError):
    """The store was used after `Store.close`, or in a forked child."""


class StoreQueryError(StoreError):
    """The engine rejected a statement.

    Args:
        reason: First line of the engine's message.
        code: The engine's error code; None if it gave none, for instance no answer.
    """

    def __init__(self, reason: str, *, code: int | None = None) -> None:
        super().__init__(reason)
        self.code = code


class StoreDamagedError(StoreQueryError):
    """A part of a table has other bytes than were written, so its rows can't be read.

    Args:
        part: Folder of the part.
        store: Folder or URL of the store.
    """

    def __init__(self, *, table: str, part: str, store: str, reason: str, code: int | None) -> None:
        super().__init__(
            f"table {table} of the store {store} has a damaged part at {part} ({reason}): restore"
            " the store from a backup, and check the disk",
            code=code,
        )


class RunNameError(CollectorError):
    """The name is not allowed for a run: it must be safe in a URL."""

    def __init__(self, run_id: str) -> None:
        super().__init__(
            f"run name {run_id!r}: use 1 to 128 letters, digits, '.', '_', '-' or ':',"
            " beginning with a letter or digit"
        )
        self.run_id = run_id


class RunExistsError(CollectorError):
    """The name belongs to a run with other data."""

    def __init__(self, run_id: str, *, source_format: str) -> None:
        super().__init__(
            f"run {run_id!r} is already in the store with other data"
            f" (format {source_format}): choose another --run name"
        )
        self.run_id = run_id


class RunBegunError(CollectorError):
    """The name belongs to an unfinished import of other data."""

    def __init__(self, run_id: str) -> None:
        super().__init__(
            f"run {run_id!r} is an unfinished import of other data:"
            " choose another --run name, or stop the server and try again, which removes it"
        )
        self.run_id = run_id


class RunDeletedError(CollectorError):
    """The run was deleted, and its name can't be used again."""

    def __init__(self, run_id: str, *, at_ns: int) -> None:
        when = datetime.fromtimestamp(at_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S")
        super().__init__(
            f"run {run_id!r} was deleted at {when} UTC, and its name can't be used again:"
            " choose another name"
        )
        self.run_id = run_id


class TraceError(CollectorError):
    """A file to import does not have its format; nothing of it was stored."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")


class NotATraceError(TraceError):
    """A file is of another format; of a folder with traces it is left out."""


class MetaError(CollectorError):
    """The parallel sizes of a trace are missing, unreadable, or contradict it."""


class ClockReplyError(CollectorError):
    """The collector's answer to a clock probe is not valid."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the answer to a clock probe is not valid: {reason}")


class TokenFileError(CollectorError):
    """A token file can't be read, or others can change it; its tokens are not accepted."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")


class TokenRequestError(CollectorError):
    """A token can't be created or revoked as requested."""


class WireError(CollectorError):
    """A request body is rejected; nothing of it was stored.

    Args:
        status: Status of the answer, 413 or 422.
        supported: Oldest and newest supported schema version, if the version is the reason.
    """

    def __init__(
        self, status: int, reason: str, *, supported: tuple[int, int] | None = None
    ) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.supported = supported


class TlsError(CollectorError):
    """A certificate, its key or the clients' CA can't be used."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"TLS can't be served with {path}: {reason}")
