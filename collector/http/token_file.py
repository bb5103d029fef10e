"""Where tokens live: a file that only its owner can read, replaced as a whole."""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import stat
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import TokenFileError
from .tokens import TOKEN_FORM, Grant, Role, TokenRecord, TokenSet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

TOKENS_VARIABLE = "RANKSCOPE_TOKENS"
"""Names the server's file of hashes."""

TOKEN_VARIABLE = "RANKSCOPE_TOKEN"  # noqa: S105  # the name of a variable
"""Holds a client's own token."""

TOKEN_FILE_VARIABLE = "RANKSCOPE_TOKEN_FILE"  # noqa: S105  # as above
"""Names the file with a client's own token; it is read anew at each use, for rotation."""

FORM_VERSION = 1
MAX_FILE_BYTES = 4 * 2**20
MAX_TOKEN_FILE_BYTES = 4096
OWNER_ONLY = 0o600
HASH_FORM = re.compile(r"[0-9a-f]{64}")


def default_tokens_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Return ``RANKSCOPE_TOKENS``, else ``tokens.json`` in the user's data folder."""
    chosen = environment.get(TOKENS_VARIABLE)
    if chosen:
        return Path(chosen)
    data_home = environment.get("XDG_DATA_HOME")
    base = Path(data_home) if data_home else Path.home() / ".local" / "share"
    return base.absolute() / "rankscope" / "tokens.json"


def read_private(path: Path, *, max_bytes: int) -> bytes:
    """Return a file's bytes, if nobody but its owner could have written or read it.

    Raises:
        FileNotFoundError: There is none.
        TokenFileError: It is a link or no plain file, another user's, open to others, too
            long, or unreadable.
    """
    try:
        # Opened first and looked at by descriptor, so nobody can swap it in between.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise TokenFileError(path, f"can't be opened ({error.strerror})") from None
    try:
        _check_private(path, os.fstat(descriptor))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(max_bytes + 1)
    finally:
        os.close(descriptor)
    if len(content) > max_bytes:
        raise TokenFileError(path, f"is longer than {max_bytes} bytes")
    return content


def _check_private(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise TokenFileError(path, "is no plain file")
    if found.st_uid != os.geteuid():
        raise TokenFileError(path, "belongs to another user")
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise TokenFileError(path, f"is open to others (mode {mode:04o}): chmod 600 it")


def write_private(path: Path, content: bytes) -> None:
    """Replace a file by ``content``, whole and durable, readable by its owner alone."""
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(scratch, flags, OWNER_ONLY)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_tokens(path: Path) -> list[TokenRecord]:
    """Return the records in the file; none where there is no file.

    Raises:
        TokenFileError: It can't be trusted, or is not of its form.
    """
    try:
        content = read_private(path, max_bytes=MAX_FILE_BYTES)
    except FileNotFoundError:
        return []
    try:
        document = json.loads(content)
        if document["version"] != FORM_VERSION:
            raise TokenFileError(path, f"has form {document['version']!r}, known is {FORM_VERSION}")
        return [_record(fields) for fields in document["tokens"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise TokenFileError(path, "is not of the form that `rankscope token` writes") from None


def write_tokens(path: Path, records: Sequence[TokenRecord]) -> None:
    """Replace the file by these records."""
    document = {"version": FORM_VERSION, "tokens": [record.document() for record in records]}
    write_private(path, (json.dumps(document, indent=1) + "\n").encode())


@contextmanager
def edit_tokens(path: Path) -> Iterator[list[TokenRecord]]:
    """Lend the file's records to be changed in place; written back where nothing was raised.

    Two commands at once wait for each other, so neither loses the other's change.

    Raises:
        TokenFileError: The file can't be trusted, or is not of its form.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.lock")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, OWNER_ONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        records = read_tokens(path)
        yield records
        write_tokens(path, records)
    finally:
        os.close(descriptor)


class TokenFile:
    """The server's view of the file: a change, such as a revocation, holds from the next request.

    A file that can't be trusted opens to nobody.
    """

    def __init__(self, path: Path, *, unix_ns: Callable[[], int] = time.time_ns) -> None:
        self._path = path
        self._unix_ns = unix_ns
        self._seen: tuple[int, ...] | None = None
        self._tokens = TokenSet(())
        self.problem: str | None = None
        """Why nobody comes in by the file; None where it is in order."""
        self._refresh()

    def grant(self, text: str) -> Grant | None:
        """Return what ``text`` may do; None where it is no live token of the file."""
        if TOKEN_FORM.fullmatch(text) is None:
            return None
        self._refresh()
        return self._tokens.grant(text, now_ns=self._unix_ns())

    def _refresh(self) -> None:
        seen = _stamp(self._path)
        if seen == self._seen:
            return
        try:
            self._tokens, self.problem = TokenSet(read_tokens(self._path)), None
        except (TokenFileError, OSError) as error:
            self._tokens, self.problem = TokenSet(()), str(error)
        self._seen = seen


@dataclass(frozen=True, slots=True)
class ClientToken:
    """A client's token; its text never shows in a message, a log or a traceback."""

    text: str

    def __repr__(self) -> str:
        return "ClientToken(***)"

    def header(self) -> str:
        """Return the value of ``Authorization``."""
        return f"Bearer {self.text}"


def read_client_token(environment: Mapping[str, str] = os.environ) -> ClientToken | None:
    """Return the token that this process was given; None where it was given none.

    ``RANKSCOPE_TOKEN_FILE`` goes before ``RANKSCOPE_TOKEN``. It is never taken from the
    command line: every user of a machine reads that.

    Raises:
        TokenFileError: The file is missing, can't be trusted, or holds no single line.
    """
    named = environment.get(TOKEN_FILE_VARIABLE)
    if not named:
        given = environment.get(TOKEN_VARIABLE, "").strip()
        return ClientToken(given) if given else None
    path = Path(named)
    try:
        text = read_private(path, max_bytes=MAX_TOKEN_FILE_BYTES).decode().strip()
    except FileNotFoundError:
        raise TokenFileError(path, f"is not there ({TOKEN_FILE_VARIABLE} names it)") from None
    except UnicodeDecodeError:
        raise TokenFileError(path, "holds no token") from None
    if not text or not text.isprintable() or " " in text:
        raise TokenFileError(path, "holds no token")
    return ClientToken(text)


def _record(fields: Mapping[str, Any]) -> TokenRecord:
    record = TokenRecord(**{**fields, "role": Role(fields["role"])})
    texts = (record.token_id, record.run_prefix, record.holder)
    times = (record.created_ns, record.expires_ns, record.revoked_ns or 0)
    is_typed = all(type(text) is str for text in texts) and all(type(t) is int for t in times)
    if not is_typed or not HASH_FORM.fullmatch(record.hash_hex):
        raise TypeError
    return record


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    # The mode and its time too: a file that is opened to others is trusted no longer.
    return (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
