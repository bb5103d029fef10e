"""Files of tokens: the server's file of hashes, and a client's own token."""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import TokenFileError
from ..new_file import new_file
from .tokens import TOKEN_FORM, Grant, Role, TokenRecord, TokenSet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

TOKENS_VARIABLE = "RANKSCOPE_TOKENS"
"""Variable with the path of the server's file of hashes."""

TOKEN_VARIABLE = "RANKSCOPE_TOKEN"  # noqa: S105  # the name of a variable
"""Variable with a client's token."""

TOKEN_FILE_VARIABLE = "RANKSCOPE_TOKEN_FILE"  # noqa: S105  # as above
"""Variable with the path of a client's token. The file is read at each use, for rotation."""

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
    """Return the bytes of a file that only its owner can read and write.

    Raises:
        FileNotFoundError: The file does not exist.
        TokenFileError: The file is a link, not a regular file, owned by another user, accessible
            to others, too long, or unreadable.
    """
    try:
        # Opened first and checked by descriptor, so it cannot be replaced in between.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise TokenFileError(path, f"cannot be opened ({error.strerror})") from None
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
        raise TokenFileError(path, "is not a regular file")
    if found.st_uid != os.geteuid():
        raise TokenFileError(path, "belongs to another user")
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise TokenFileError(path, f"is accessible to other users (mode {mode:04o}): chmod 600 it")


def write_private(path: Path, content: bytes) -> None:
    """Replace a file atomically and durably. Only its owner can read it."""
    with new_file(path, mode=OWNER_ONLY) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_tokens(path: Path) -> list[TokenRecord]:
    """Return the records of the file; [] if there is no file.

    Raises:
        TokenFileError: The file is not private (`read_private`), or its content is invalid.
    """
    try:
        content = read_private(path, max_bytes=MAX_FILE_BYTES)
    except FileNotFoundError:
        return []
    try:
        document = json.loads(content)
        if document["version"] != FORM_VERSION:
            found = document["version"]
            raise TokenFileError(path, f"has version {found!r}, expected {FORM_VERSION}")
        return [_record(fields) for fields in document["tokens"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise TokenFileError(path, "has invalid content, not from `rankscope token`") from None


def write_tokens(path: Path, records: Sequence[TokenRecord]) -> None:
    """Replace the records of the file."""
    document = {"version": FORM_VERSION, "tokens": [record.document() for record in records]}
    write_private(path, (json.dumps(document, indent=1) + "\n").encode())


@contextmanager
def edit_tokens(path: Path) -> Iterator[list[TokenRecord]]:
    """Yield the file's records for changes in place, and write them if nothing was raised.

    The file is locked meanwhile, so that two commands do not lose each other's changes.

    Raises:
        TokenFileError: The file is not private (`read_private`), or its content is invalid.
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
    """The server's file of tokens. A change, such as a revocation, applies to the next request.

    If the file cannot be trusted, no token of it is accepted.
    """

    def __init__(self, path: Path, *, unix_ns: Callable[[], int] = time.time_ns) -> None:
        self._path = path
        self._unix_ns = unix_ns
        self._seen: tuple[int, ...] | None = None
        self._tokens = TokenSet(())
        self.problem: str | None = None
        """Reason why no token of the file is accepted; None if the file is valid."""
        self._refresh()

    def grant(self, text: str) -> Grant | None:
        """Return the grant of a token; None if the file has no such valid token."""
        if TOKEN_FORM.fullmatch(text) is None:
            return None
        self._refresh()
        return self._tokens.grant(text, now_ns=self._unix_ns())

    def grant_by_id(self, token_id: str) -> Grant | None:
        """Return the grant of a token of the file by its id; None if it is no longer valid."""
        self._refresh()
        return self._tokens.grant_by_id(token_id, now_ns=self._unix_ns())

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
    """A client's token. Its text never appears in a message, a log or a traceback."""

    text: str

    def __repr__(self) -> str:
        return "ClientToken(***)"

    def header(self) -> str:
        """Return the value of the header ``Authorization``."""
        return f"Bearer {self.text}"


def read_client_token(environment: Mapping[str, str] = os.environ) -> ClientToken | None:
    """Return this process's token; None if it was given none.

    ``RANKSCOPE_TOKEN_FILE`` takes precedence over ``RANKSCOPE_TOKEN``. There is no flag for it:
    all users of a machine can read command lines.

    Raises:
        TokenFileError: The file is missing, is not private (`read_private`), or contains no
            token.
    """
    named = environment.get(TOKEN_FILE_VARIABLE)
    if not named:
        given = environment.get(TOKEN_VARIABLE, "").strip()
        return ClientToken(given) if given else None
    path = Path(named)
    try:
        text = read_private(path, max_bytes=MAX_TOKEN_FILE_BYTES).decode().strip()
    except FileNotFoundError:
        raise TokenFileError(path, f"does not exist, but {TOKEN_FILE_VARIABLE} names it") from None
    except UnicodeDecodeError:
        raise TokenFileError(path, "contains no token") from None
    if not text or not text.isprintable() or " " in text:
        raise TokenFileError(path, "contains no token")
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
    # The change time too: a file whose mode now allows others is not trusted any more.
    return (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
