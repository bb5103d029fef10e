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
    """The process has died."""


class Interrupted:
    """A store with an event just before, or just after, its statement number ``at``."""

    def __init__(
        self, store: Store, event: Callable[[], None], *, at: int, is_after: bool = False
    ) -> None:
        self._store = store
        self._event = event
        self._left = at
        self._is_after = is_after
        self.path = store.path

    def rows(self, sql: str, parameters: Mapping[str, Any] | None = None) -> list[Row]:
        found: list[Row] = self._do(lambda: self._store.rows(sql, parameters))
        return found

    def arrow(self, sql: str, parameters: Mapping[str, Any] | None = None) -> pa.Table:
        found: pa.Table = self._do(lambda: self._store.arrow(sql, parameters))
        return found

    def stream_arrow(self, sql: str, *parameters: Mapping[str, Any], num_rows: int) -> pa.Table:
        found: pa.Table = self._do(
            lambda: self._store.stream_arrow(sql, *parameters, num_rows=num_rows)
        )
        return found

    def command(self, sql: str, parameters: Mapping[str, Any] | None = None) -> None:
        self._do(lambda: self._store.command(sql, parameters))

    def insert_rows(self, table: str, rows: Iterable[Mapping[str, Any]]) -> None:
        self._do(lambda: self._store.insert_rows(table, rows))

    def insert_arrow(self, table: str, rows: pa.Table) -> None:
        self._do(lambda: self._store.insert_arrow(table, rows))

    @property
    def is_complete(self) -> bool:
        """True if there were fewer statements."""
        return self._left >= 0

    def _do(self, statement: Callable[[], Any]) -> Any:  # noqa: ANN401 -- any result
        self._left -= 1
        if self._left == -1 and not self._is_after:
            self._event()
        found = statement()
        if self._left == -1 and self._is_after:
            self._event()
        return found


def power_cut() -> None:
    raise PowerCutError("power cut")


def interrupted_writer(store: Any, *, is_shared: bool) -> StoreWriter:  # noqa: ANN401 -- a fake
    return StoreWriter(store, ledger=Ledger(store, is_shared=is_shared))
