"""Read-only sessions of the embedded engine, each for one thread."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import engine_error

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Bytes of a result, in the engine's memory."""

    view: memoryview
    owner: object
    """Owner of the bytes. The view alone does not keep them alive."""


@contextmanager
def _query_errors() -> Iterator[None]:
    """Raise the engine's errors as `QueryError`. Their own class has no public name."""
    try:
        yield
    except Exception as error:
        raise engine_error(error) from error


def purge_engine(path: Path) -> None:
    """Return the memory that the engine keeps for reuse to the machine.

    Args:
        path: Folder of the store, which this process has open.
    """
    import chdb

    with _query_errors():
        connection: Any = chdb.connect(os.path.realpath(path))  # type: ignore[no-untyped-call]
        try:
            connection.query("SYSTEM JEMALLOC PURGE")
        finally:
            connection.close()


class ReadOnlySession:
    """Read-only session on the embedded store, which this process has open.

    Each session has its own settings. They cannot be changed once ``readonly`` is set, so a
    statement cannot affect the next one.

    Args:
        path: Folder of the store.
        settings: Values by name. Both come from our own tables, never from a request.

    Raises:
        QueryError: The engine could not open a session with these settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, int | str]) -> None:
        import chdb

        # The engine compares paths literally, and the store was opened with the real path.
        where = os.path.realpath(path)
        with _query_errors():
            self._connection: Any = chdb.connect(where)  # type: ignore[no-untyped-call]
        try:
            with _query_errors():
                self._configure(settings)
        except BaseException:
            self._connection.close()
            raise

    def run(
        self, sql: str, output_format: str, parameters: Mapping[str, str] | None = None
    ) -> bytes:
        """Return a small result.

        Raises:
            QueryError: The engine refused the statement.
        """
        answer = self.answer(sql, output_format, parameters)
        return bytes(answer.view)  # `answer` keeps the engine's memory alive until here

    def answer(
        self, sql: str, output_format: str, parameters: Mapping[str, str] | None = None
    ) -> Answer:
        """Return a result without copying it.

        Raises:
            QueryError: The engine refused the statement.
        """
        with _query_errors():
            result = self._connection.query(sql, output_format, params=dict(parameters or {}))
        held = result.get_memview()
        return Answer(view=held.view() if result.size() else memoryview(b""), owner=(result, held))

    def lines(self, explain: str, statement: str, parameters: Mapping[str, str]) -> list[str]:
        """Return the lines of an EXPLAIN, which parses a statement and does not run it.

        Args:
            explain: One of the EXPLAIN forms that only parse.
            statement: Statement in canonical form, so that it is a single one.
            parameters: Bound parameters.

        Raises:
            QueryError: The statement cannot be parsed.
        """
        answer = self.run(explain + statement, "JSONCompactEachRow", parameters)
        return [json.loads(line)[0] for line in answer.splitlines()]

    def close(self) -> None:
        """End the session. May be repeated."""
        self._connection.close()

    def _configure(self, settings: Mapping[str, int | str]) -> None:
        for name, value in settings.items():
            shown = str(value) if isinstance(value, int) else f"'{value}'"
            self._connection.query(f"SET {name} = {shown}")
        self._connection.query("SET readonly = 1")
