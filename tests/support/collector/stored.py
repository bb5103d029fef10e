"""What a test finds in the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.collector.read.spans import read_spans

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store


def names_of(store: Store, run_id: str) -> list[str]:
    """Return the names of a run's spans, as they are read."""
    return [str(name) for name in read_spans(store, run_id)["name"].to_pylist()]


def shown(store: Store, run_id: str) -> list[str]:
    return sorted(str(name) for name in read_spans(store, run_id)["name"].to_pylist())
