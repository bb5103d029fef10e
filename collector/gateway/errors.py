"""Errors of the gateway, with ClickHouse's codes and HTTP status."""

from __future__ import annotations

import re

from ..errors import CollectorError

READONLY = 164
ACCESS_DENIED = 497
TOO_MANY_QUERIES = 202
NOT_IMPLEMENTED = 48
UNKNOWN_FORMAT = 73
UNKNOWN_DATABASE = 81
BAD_ARGUMENTS = 36
SYNTAX_ERROR = 62
TIMEOUT_EXCEEDED = 159
MEMORY_LIMIT_EXCEEDED = 241

NAMES = {
    READONLY: "READONLY",
    ACCESS_DENIED: "ACCESS_DENIED",
    TOO_MANY_QUERIES: "TOO_MANY_SIMULTANEOUS_QUERIES",
    NOT_IMPLEMENTED: "NOT_IMPLEMENTED",
    UNKNOWN_FORMAT: "UNKNOWN_FORMAT",
    UNKNOWN_DATABASE: "UNKNOWN_DATABASE",
    BAD_ARGUMENTS: "BAD_ARGUMENTS",
    SYNTAX_ERROR: "SYNTAX_ERROR",
}

STATUSES = {
    READONLY: 403,
    ACCESS_DENIED: 403,
    TOO_MANY_QUERIES: 503,
    NOT_IMPLEMENTED: 501,
    TIMEOUT_EXCEEDED: 408,
    UNKNOWN_DATABASE: 404,
    60: 404,  # UNKNOWN_TABLE
    46: 404,  # UNKNOWN_FUNCTION
    47: 404,  # UNKNOWN_IDENTIFIER
    UNKNOWN_FORMAT: 404,
    MEMORY_LIMIT_EXCEEDED: 507,
    396: 413,  # TOO_MANY_ROWS_OR_BYTES
}
"""HTTP status by code. Other codes are errors of the client: 400."""

ENGINE_FORM = re.compile(r"Code: (\d+)\. (?:DB::)?(?:Exception|NetException): (.*)", re.DOTALL)
VERSION_SUFFIX = re.compile(r" ?\(version [^)]*\)")
MAX_TEXT = 2_000


class QueryError(CollectorError):
    """A statement was refused or failed.

    Attributes:
        code: Error code of ClickHouse.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code

    @property
    def status(self) -> int:
        """HTTP status."""
        return STATUSES.get(self.code, 400)

    def body(self) -> str:
        """Return the message in one line, in the form of a ClickHouse server."""
        name = NAMES.get(self.code)
        suffix = f". ({name})" if name is not None else ""
        return f"Code: {self.code}. DB::Exception: {self}{suffix}\n"


def refused(text: str) -> QueryError:
    """Return the error for a statement that does more than read."""
    return QueryError(READONLY, f"{text}: the gateway only reads the store's own tables")


def engine_error(error: Exception) -> QueryError:
    """Return an error of the engine, with its code and without its version."""
    text = str(error).strip()
    found = ENGINE_FORM.search(text)
    if found is None:
        return QueryError(BAD_ARGUMENTS, _one_line(text))
    return QueryError(int(found[1]), _one_line(VERSION_SUFFIX.sub("", found[2])))


def _one_line(text: str) -> str:
    return " ".join(text.split())[:MAX_TEXT]
