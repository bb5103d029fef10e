"""A store that a collector loses at its n-th statement."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from rankscope.collector.errors import StoreError
from rankscope.collector.store.ledger import Ledger
from rankscope.collector.store.writer import StoreWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankscope.collector.store.store import Store


STATEMENTS = {"rows", "arrow", "stream_arrow", "command", "insert_rows", "insert_arrow"}


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

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a kind of statement of the store, counted."""
        if name not in STATEMENTS:
            raise AttributeError(name)
        return partial(self._do, getattr(self._store, name))

    @property
    def is_complete(self) -> bool:
        """True if there were fewer statements."""
        return self._left >= 0

    def _do(self, statement: Callable[..., Any], *values: Any, **options: Any) -> Any:  # noqa: ANN401 -- of any statement
        self._left -= 1
        if self._left == -1 and not self._is_after:
            self._event()
        found = statement(*values, **options)
        if self._left == -1 and self._is_after:
            self._event()
        return found


def power_cut() -> None:
    raise PowerCutError("power cut")


def interrupted_writer(store: Any, *, is_shared: bool) -> StoreWriter:  # noqa: ANN401 -- a fake
    return StoreWriter(store, ledger=Ledger(store, is_shared=is_shared))
