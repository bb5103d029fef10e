"""Who may do what: tokens with a role, a scope and an end, of which only hashes are kept.

A token's secret is 256 random bits that this module made; nobody can choose one. Its
SHA-256 is therefore as hard to invert as a slow hash's: a slow hash (and a salt) defends
words that can be guessed or tabled in advance, which 2^256 values can't. A fast hash also
keeps wrong tokens cheap to refuse, so that they are no way to keep the server busy.
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
"""So that secret scanners and people know one when they see it."""

HASH_CONTEXT = b"rankscope token v1\0"
NO_HASH = "0" * 64
"""Compared with where no token has the id; no SHA-256 anybody knows is this."""

MAX_LIVE = 2
"""Live tokens for one holder: the one in use and, while it is rotated, the next one."""

SCOPE_FORM = re.compile(r"|[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
HOLDER_FORM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,63}")
MAX_DAYS = 3_650
NS_PER_DAY = 86_400 * 10**9


class Role(StrEnum):
    """What a token is good for; the spelling is what the file and the command use."""

    INGEST = "ingest"
    """Ship batches and probe the clock; read nothing."""

    READ = "read"
    """Look at runs; change nothing."""

    ADMIN = "admin"
    """Both, and delete runs."""


class TokenState(StrEnum):
    """Whether a token still opens anything, and why not."""

    LIVE = "live"
    EXPIRED = "expired"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """What is kept of a token: everything but the token."""

    token_id: str
    role: Role
    run_prefix: str
    """Runs whose names begin so; "" is every run."""

    holder: str
    """Who or what carries it, in a word."""

    hash_hex: str
    created_ns: int
    expires_ns: int
    revoked_ns: int | None = None

    def state(self, now_ns: int) -> TokenState:
        """Return whether the token is live at a Unix time."""
        if self.revoked_ns is not None:
            return TokenState.REVOKED
        return TokenState.LIVE if now_ns < self.expires_ns else TokenState.EXPIRED

    def document(self) -> dict[str, Any]:
        """Return the record as JSON has it."""
        return {**asdict(self), "role": str(self.role)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What a request may do that proved itself."""

    role: Role
    run_prefix: str
    token_id: str | None
    """None: the server's own token or a session opened with it."""

    holder: str = ""
    """Who carries the token; "" for the server's own."""

    def allows(self, needed: Role) -> bool:
        """Return whether this role covers what needs another."""
        return self.role in {needed, Role.ADMIN}

    def covers(self, run_id: str) -> bool:
        """Return whether a run is in scope."""
        return run_id.startswith(self.run_prefix)


FULL_GRANT = Grant(role=Role.ADMIN, run_prefix="", token_id=None)
"""Of the token that `rankscope serve` prints, and of its sessions."""


def make_token(
    records: Sequence[TokenRecord],
    *,
    role: Role,
    run_prefix: str,
    holder: str,
    days: int,
    now_ns: int,
) -> tuple[str, TokenRecord]:
    """Return a new token, which nothing keeps, and the record of it.

    Args:
        records: Those that there are.
        role: What it is good for.
        run_prefix: Which runs; "" for all.
        holder: Who will carry it.
        days: How long it lives.
        now_ns: Unix time.

    Raises:
        TokenRequestError: A field is not of its form, or the holder already has
            `MAX_LIVE` live tokens of the same role and scope.
    """
    if not SCOPE_FORM.fullmatch(run_prefix):
        raise TokenRequestError(
            f"run prefix {run_prefix!r}: use letters, digits, '.', '_', '-' or ':',"
            " beginning with a letter or digit"
        )
    if not HOLDER_FORM.fullmatch(holder):
        raise TokenRequestError(f"holder {holder!r}: use 1 to 64 letters, digits, or '.:@_-'")
    if not 1 <= days <= MAX_DAYS:
        raise TokenRequestError(f"a token lives 1 to {MAX_DAYS} days, not {days}")
    purpose = (role, run_prefix, holder)
    live = [
        record.token_id
        for record in records
        if (record.role, record.run_prefix, record.holder) == purpose
        and record.state(now_ns) is TokenState.LIVE
    ]
    if len(live) >= MAX_LIVE:
        raise TokenRequestError(
            f"{holder} already has {len(live)} live {role} tokens for runs {run_prefix!r}"
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
    """Return the hash under which a token is kept."""
    return hashlib.sha256(HASH_CONTEXT + token.encode("utf-8", "surrogatepass")).hexdigest()


def mark_revoked(
    records: Iterable[TokenRecord], token_id: str, *, now_ns: int
) -> list[TokenRecord]:
    """Return the records with one of them revoked; revoking it again changes nothing.

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
    """Looks up what a request shows, in time that tells nothing of the secrets.

    The id in a token is no secret, so a dictionary may find it; hashes are compared in
    constant time, an unknown id's with `NO_HASH`.
    """

    def __init__(self, records: Iterable[TokenRecord]) -> None:
        self._by_id = {record.token_id: record for record in records}

    def grant(self, text: str, *, now_ns: int) -> Grant | None:
        """Return what ``text`` may do; None where it is no live token.

        Args:
            text: What the request shows, of any form and length.
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
        return Grant(
            role=record.role,
            run_prefix=record.run_prefix,
            token_id=record.token_id,
            holder=record.holder,
        )
