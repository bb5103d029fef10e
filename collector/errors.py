"""What collector raises. Each message is one plain line that says what to do."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class CollectorError(Exception):
    """Base of every error that this package raises on purpose."""


class StoreError(CollectorError):
    """The store could not be opened, read or written."""


class StoreUrlError(StoreError):
    """The store's URL is of no known form."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(
            f"store URL {url!r}: {reason};"
            " give chdb:///absolute/path or clickhouse://user:password@host:8123/database"
        )
        self.url = url


class StoreHeldError(StoreError):
    """Another process owns the embedded store's path; it allows one owner at a time."""

    def __init__(self, path: Path, *, holder_pid: int | None, holder_url: str | None) -> None:
        who = f"process {holder_pid}" if holder_pid is not None else "another process"
        where = f" (serving {holder_url})" if holder_url else ""
        super().__init__(
            f"the store at {path} is held by {who}{where}:"
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
        self.found = found
        self.known = known


class StoreClosedError(StoreError):
    """The store was used after `Store.close`, or in a forked child."""


class StoreQueryError(StoreError):
    """The engine refused a statement.

    Args:
        reason: The engine's first line.
        code: The engine's number of the error; None where it gave none (no answer, say).
    """

    def __init__(self, reason: str, *, code: int | None = None) -> None:
        super().__init__(reason)
        self.code = code


class RunNameError(CollectorError):
    """The run's name can't be stored or put into a URL as it is."""

    def __init__(self, run_id: str) -> None:
        super().__init__(
            f"run name {run_id!r}: use 1 to 128 letters, digits, '.', '_', '-' or ':',"
            " beginning with a letter or digit"
        )
        self.run_id = run_id


class RunExistsError(CollectorError):
    """The name is taken by a run with another content."""

    def __init__(self, run_id: str, *, source_format: str) -> None:
        super().__init__(
            f"run {run_id!r} is already in the store with another content"
            f" (format {source_format}): choose another --run name"
        )
        self.run_id = run_id


class RunBegunError(CollectorError):
    """Rows of another content lie under the name, of a run that was never finished."""

    def __init__(self, run_id: str) -> None:
        super().__init__(
            f"run {run_id!r} was begun with another content and never finished:"
            " choose another --run name, or stop the server and try again, which removes it"
        )
        self.run_id = run_id


class RunDeletedError(CollectorError):
    """The run was deleted: its name takes in nothing any more."""

    def __init__(self, run_id: str, *, at_ns: int) -> None:
        when = datetime.fromtimestamp(at_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S")
        super().__init__(
            f"run {run_id!r} was deleted at {when} UTC, and its name is not given again:"
            " choose another one"
        )
        self.run_id = run_id
        self.at_ns = at_ns


class TraceError(CollectorError):
    """A file to import is not what its format says; nothing of it was stored."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path


class MetaError(CollectorError):
    """The sizes that belong to a trace are missing, unreadable, or contradict it."""


class ClockReplyError(CollectorError):
    """The collector's answer to a clock probe is none."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the answer to a clock probe can't be used: {reason}")
        self.reason = reason


class TokenFileError(CollectorError):
    """A file with tokens can't be trusted or read; nobody comes in by it."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path


class TokenRequestError(CollectorError):
    """A token can't be made or revoked as asked."""


class WireError(CollectorError):
    """A body from the wire can't be taken; nothing of it was stored.

    Args:
        status: 413 or 422, as the answer has it.
        reason: One plain line.
        supported: Oldest and newest schema version that are read, where that is the matter.
    """

    def __init__(
        self, status: int, reason: str, *, supported: tuple[int, int] | None = None
    ) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.supported = supported


class TlsError(CollectorError):
    """A certificate, its key or the clients' CA can't be used; nothing is served with it."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"TLS can't be served with {path}: {reason}")
        self.path = path
        self.reason = reason
