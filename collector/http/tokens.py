"""Tokens: a role, a scope, an expiry date, the server's file of hashes, a client's own token.

The secret of a token is 256 random bits that this module generates; users cannot choose one. Slow
hashes and salts protect passwords that can be guessed or listed in advance, which 2^256 values
cannot. So SHA-256 is enough, and it keeps the check of invalid tokens cheap.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import stat
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import TokenFileError, TokenRequestError
from ..new_file import new_file
from ..store.location import data_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

PREFIX = "rst"
ID_BYTES = 6
SECRET_BYTES = 32
TOKEN_FORM = re.compile(r"rst_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
"""Form of a token. Secret scanners and people can recognize it by its prefix."""

HASH_CONTEXT = b"rankscope token v1\0"
NO_HASH = "0" * 64
"""Compared with if no token has the id. No input with this SHA-256 is known."""

MAX_LIVE = 2
"""Valid tokens of one holder: the current one and, during a rotation, the next one."""

SCOPE_FORM = re.compile(r"|[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
HOLDER_FORM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,63}")
MAX_DAYS = 3_650
NS_PER_DAY = 86_400 * 10**9


class Role(StrEnum):
    """Role of a token, spelled as in the file and on the command line."""

    INGEST = "ingest"
    """May send batches and probe the clock. May not read."""

    READ = "read"
    """May read runs. May not change anything."""

    SQL = "sql"
    """May also send statements to an embedded store, which may slow or stop the server."""

    ADMIN = "admin"
    """May do all of this, and delete runs."""


class TokenState(StrEnum):
    """State of a token: valid (``live``), or why it is not."""

    LIVE = "live"
    EXPIRED = "expired"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """Stored data of a token: everything except its secret."""

    token_id: str
    role: Role
    run_prefix: str
    """Prefix of the names of the runs in scope; "" for all runs."""

    holder: str
    """User or program that has the token, in a word."""

    hash_hex: str
    created_ns: int
    expires_ns: int
    revoked_ns: int | None = None

    def state(self, now_ns: int) -> TokenState:
        """Return the state of the token at a Unix time."""
        if self.revoked_ns is not None:
            return TokenState.REVOKED
        return TokenState.LIVE if now_ns < self.expires_ns else TokenState.EXPIRED

    def document(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        return {**asdict(self), "role": str(self.role)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Rights of an authenticated request."""

    role: Role
    run_prefix: str
    token_id: str | None
    """Id of the token. None: the server's own token, or a session opened with it."""

    holder: str = ""
    """Holder of the token; "" for the server's own."""

    reserved: tuple[str, ...] = ()
    """Prefixes of runs that are reserved to other owners' tokens of role ingest."""

    def allows(self, needed: Role) -> bool:
        """Return whether the grant's role includes a role."""
        return self.role in {needed, Role.ADMIN} or (self.role, needed) == (Role.SQL, Role.READ)

    def covers(self, run_id: str) -> bool:
        """Return whether a run is in the grant's scope, and not reserved by a longer prefix."""
        if not run_id.startswith(self.run_prefix):
            return False
        num_letters = len(self.run_prefix)
        return not any(len(one) > num_letters and run_id.startswith(one) for one in self.reserved)


def owner_name(holder: str) -> str:
    """Return the owner of a holder's runs: agents of one job hold tokens of ``team@host``."""
    return holder.partition("@")[0]


FULL_GRANT = Grant(role=Role.ADMIN, run_prefix="", token_id=None)
"""Grant of the token that `rankscope serve` prints, and of its sessions."""


def make_token(
    records: Sequence[TokenRecord],
    *,
    role: Role,
    run_prefix: str,
    holder: str,
    days: int,
    now_ns: int,
) -> tuple[str, TokenRecord]:
    """Return a new token, which is not stored, and its record.

    Args:
        run_prefix: Prefix of the names of the runs in scope; "" for all runs.
        now_ns: Unix time.

    Raises:
        TokenRequestError: A field is invalid, or the holder already has `MAX_LIVE` valid tokens
            of the same role and scope.
    """
    if not SCOPE_FORM.fullmatch(run_prefix):
        raise TokenRequestError(
            f"run prefix {run_prefix!r}: use letters, digits, '.', '_', '-' or ':',"
            " and begin with a letter or digit"
        )
    if not HOLDER_FORM.fullmatch(holder):
        raise TokenRequestError(f"holder {holder!r}: use 1 to 64 letters, digits, or '.:@_-'")
    if not 1 <= days <= MAX_DAYS:
        raise TokenRequestError(f"a token is valid for 1 to {MAX_DAYS} days, not {days}")
    purpose = (role, run_prefix, holder)
    live = [
        record.token_id
        for record in records
        if (record.role, record.run_prefix, record.holder) == purpose
        and record.state(now_ns) is TokenState.LIVE
    ]
    if len(live) >= MAX_LIVE:
        raise TokenRequestError(
            f"{holder} already has {len(live)} valid {role} tokens for runs {run_prefix!r}"
            f" ({', '.join(live)}): revoke one first"
        )
    token_id = secrets.token_hex(ID_BYTES)
    token = f"{PREFIX}_{token_id}_{secrets.token_urlsafe(SECRET_BYTES)}"
    record = TokenRecord(
        token_id=token_id,
        role=role,
        run_prefix=run_prefix,
        holder=holder,
        hash_hex=hash_token(token),
        created_ns=now_ns,
        expires_ns=now_ns + days * NS_PER_DAY,
    )
    return token, record


def hash_token(token: str) -> str:
    """Return the hash of a token, as it is stored."""
    return hashlib.sha256(HASH_CONTEXT + token.encode("utf-8", "surrogatepass")).hexdigest()


def mark_revoked(
    records: Iterable[TokenRecord], token_id: str, *, now_ns: int
) -> list[TokenRecord]:
    """Return the records with one of them revoked. Revoking it again changes nothing.

    Raises:
        TokenRequestError: No token has this id.
    """
    found = list(records)
    if token_id not in {record.token_id for record in found}:
        raise TokenRequestError(
            f"no token has the id {token_id!r}: `rankscope token list` shows them"
        )
    return [
        replace(record, revoked_ns=now_ns)
        if record.token_id == token_id and record.revoked_ns is None
        else record
        for record in found
    ]


class TokenSet:
    """Check of tokens whose duration reveals nothing about the secrets.

    The id in a token is not secret, so a dictionary lookup is safe. Hashes are compared in
    constant time; for an unknown id with `NO_HASH`.
    """

    def __init__(self, records: Iterable[TokenRecord]) -> None:
        self._by_id = {record.token_id: record for record in records}
        self._with_prefix = [
            record
            for record in self._by_id.values()
            if record.run_prefix and record.role is Role.INGEST
        ]

    def grant(self, text: str, *, now_ns: int) -> Grant | None:
        """Return the grant of a token; None if it is not valid.

        Args:
            text: Text given as a token, of any form and length.
            now_ns: Unix time.
        """
        form = TOKEN_FORM.fullmatch(text)
        if form is None:
            return None
        record = self._by_id.get(form[1])
        kept = NO_HASH if record is None else record.hash_hex
        matches = hmac.compare_digest(hash_token(text), kept)
        if record is None or not matches or record.state(now_ns) is not TokenState.LIVE:
            return None
        return self._grant_of(record, now_ns)

    def grant_by_id(self, token_id: str, *, now_ns: int) -> Grant | None:
        """Return the grant of a token whose secret was checked before; None if it is not valid."""
        record = self._by_id.get(token_id)
        is_live = record is not None and record.state(now_ns) is TokenState.LIVE
        return self._grant_of(record, now_ns) if record is not None and is_live else None

    def _grant_of(self, record: TokenRecord, now_ns: int) -> Grant:
        owner = owner_name(record.holder)
        reserved = tuple(
            other.run_prefix
            for other in self._with_prefix
            if owner_name(other.holder) != owner and other.state(now_ns) is TokenState.LIVE
        )
        return Grant(
            role=record.role,
            run_prefix=record.run_prefix,
            token_id=record.token_id,
            holder=record.holder,
            reserved=reserved if record.role is Role.INGEST else (),
        )


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
    return Path(chosen) if chosen else data_folder(environment) / "tokens.json"


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
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise TokenFileError(path, "is not a regular file")
        if status.st_uid != os.geteuid():
            raise TokenFileError(path, "belongs to another user")
        if status.st_mode & 0o077:
            mode = f"{stat.S_IMODE(status.st_mode):04o}"
            raise TokenFileError(path, f"is accessible to other users (mode {mode}): chmod 600 it")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(max_bytes + 1)
    finally:
        os.close(descriptor)
    if len(content) > max_bytes:
        raise TokenFileError(path, f"is longer than {max_bytes} bytes")
    return content


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
            version = document["version"]
            raise TokenFileError(path, f"has version {version!r}, expected {FORM_VERSION}")
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
