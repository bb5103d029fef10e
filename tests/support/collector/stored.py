"""Contents of the store, as a reader sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.collector.read.spans import read_spans

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store


def names_of(store: Store, run_id: str) -> list[str]:
    """Return the names of a run's spans, in the order of a read."""
    return [str(name) for name in read_spans(store, run_id)["name"].to_pylist()]


def shown(store: Store, run_id: str) -> list[str]:
    """Return the names of a run's spans, sorted."""
    return sorted(names_of(store, run_id))
