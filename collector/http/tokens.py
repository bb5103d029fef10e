"""Tokens with a role, a scope and an expiry date. Only their hashes are stored.

The secret of a token is 256 random bits that this module generates; users cannot choose one. Slow
hashes and salts protect passwords that can be guessed or listed in advance, which 2^256 values
cannot. So SHA-256 is enough, and it keeps the check of invalid tokens cheap.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from ..errors import TokenRequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
        records: Existing records.
        role: Role of the token.
        run_prefix: Prefix of the names of the runs in scope; "" for all runs.
        holder: User or program that gets the token.
        days: Validity in days.
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
        return Grant(
            role=record.role,
            run_prefix=record.run_prefix,
            token_id=record.token_id,
            holder=record.holder,
            reserved=self._reserved_from(record, now_ns) if record.role is Role.INGEST else (),
        )

    def _reserved_from(self, record: TokenRecord, now_ns: int) -> tuple[str, ...]:
        owner = owner_name(record.holder)
        return tuple(
            one.run_prefix
            for one in self._with_prefix
            if owner_name(one.holder) != owner and one.state(now_ns) is TokenState.LIVE
        )
