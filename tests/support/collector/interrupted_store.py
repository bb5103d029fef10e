"""A store that a collector loses at its n-th statement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankscope.collector.errors import StoreError
from rankscope.collector.store.ledger import Ledger
from rankscope.collector.store.writer import StoreWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import pyarrow as pa

    from rankscope.collector.identity import Row
    from rankscope.collector.store.store import Store


class PowerCutError(StoreError):
    """The process is no more."""


class Interrupted:
    """A store on which something happens just before, or just after, its n-th statement."""

    def __init__(
        self, store: Store, happening: Callable[[], None], *, at: int, is_after: bool = False
    ) -> None:
        self._store = store
        self._happening = happening
        self._left = at
        self._is_after = is_after
        self.path = store.path

    def rows(self, sql: str, parameters: Mapping[str, Any] | None = None) -> list[Row]:
        found: list[Row] = self._do(lambda: self._store.rows(sql, parameters))
        return found

    def arrow(self, sql: str, parameters: Mapping[str, Any] | None = None) -> pa.Table:
        found: pa.Table = self._do(lambda: self._store.arrow(sql, parameters))
        return found

    def long_arrow(self, sql: str, parameters: Mapping[str, Any], *, num_rows: int) -> pa.Table:
        found: pa.Table = self._do(
            lambda: self._store.long_arrow(sql, parameters, num_rows=num_rows)
        )
        return found

    def insert_rows(self, table: str, rows: Iterable[Mapping[str, Any]]) -> None:
        self._do(lambda: self._store.insert_rows(table, rows))

    def insert_arrow(self, table: str, rows: pa.Table) -> None:
        self._do(lambda: self._store.insert_arrow(table, rows))

    @property
    def is_through(self) -> bool:
        """Whether there were fewer statements than that."""
        return self._left >= 0

    def _do(self, statement: Callable[[], Any]) -> Any:  # noqa: ANN401 -- whatever it returns
        self._left -= 1
        if self._left == -1 and not self._is_after:
            self._happening()
        found = statement()
        if self._left == -1 and self._is_after:
            self._happening()
        return found


def power_cut() -> None:
    raise PowerCutError("power cut")


def interrupted_writer(store: Any, *, has_rivals: bool) -> StoreWriter:  # noqa: ANN401 -- a fake
    return StoreWriter(store, ledger=Ledger(store, has_rivals=has_rivals))
