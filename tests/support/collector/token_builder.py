"""Tokens for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.collector.http.tokens import Role, make_token

if TYPE_CHECKING:
    from rankscope.collector.http.tokens import TokenRecord

NOW_NS = 1_700_000_000 * 10**9
DAY_NS = 86_400 * 10**9


def made(
    role: Role = Role.INGEST, *, run_prefix: str = "", days: int = 7, holder: str = "agent"
) -> tuple[str, TokenRecord]:
    """Return a new token of one holder, created at `NOW_NS`, and its record."""
    return make_token([], role=role, run_prefix=run_prefix, holder=holder, days=days, now_ns=NOW_NS)
