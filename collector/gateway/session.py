"""One session of the embedded engine that can't write: made, used by one thread, and closed."""

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
    """The bytes of a result, which lie in the engine's memory."""

    view: memoryview
    owner: object
    """What the bytes belong to: the view does not keep them alive."""


@contextmanager
def _its_errors() -> Iterator[None]:
    """Raise the engine's errors as `QueryError`; its own class has no public name."""
    try:
        yield
    except Exception as error:
        raise engine_error(error) from error


class ReadOnlySession:
    """A read-only session on a store that this process has open.

    Each session has settings of its own, and once ``readonly`` is set none of them can be
    changed: what one statement does leaves nothing behind for the next.

    Args:
        path: The store's folder.
        settings: Name and value; both come from our own tables, never from a request's text.

    Raises:
        QueryError: The engine opened no session, or not with these settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, int | str]) -> None:
        import chdb

        # The engine compares paths literally, and this is the spelling that opened it.
        where = os.path.realpath(path)
        with _its_errors():
            self._connection: Any = chdb.connect(where)  # type: ignore[no-untyped-call]
        try:
            with _its_errors():
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
        return bytes(answer.view)  # the name keeps the engine's memory until this copy is made

    def answer(
        self, sql: str, output_format: str, parameters: Mapping[str, str] | None = None
    ) -> Answer:
        """Return a result without copying it.

        Raises:
            QueryError: The engine refused the statement.
        """
        with _its_errors():
            result = self._connection.query(sql, output_format, params=dict(parameters or {}))
        held = result.get_memview()
        return Answer(view=held.view() if result.size() else memoryview(b""), owner=(result, held))

    def lines(self, explain: str, statement: str, parameters: Mapping[str, str]) -> list[str]:
        """Return what the engine's parser says of a statement, which it does not run.

        Args:
            explain: One of the EXPLAIN forms that only parse.
            statement: In canonical form: one statement, by the engine's own word.
            parameters: Its bound parameters.

        Raises:
            QueryError: The statement can't be parsed.
        """
        told = self.run(explain + statement, "JSONCompactEachRow", parameters)
        return [json.loads(line)[0] for line in told.splitlines()]

    def close(self) -> None:
        """End the session. Safe to repeat."""
        self._connection.close()

    def _configure(self, settings: Mapping[str, int | str]) -> None:
        for name, value in settings.items():
            shown = str(value) if isinstance(value, int) else f"'{value}'"
            self._connection.query(f"SET {name} = {shown}")
        self._connection.query("SET readonly = 1")
