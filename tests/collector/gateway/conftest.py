"""Store with one row, and a query engine on it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.gateway.engine import QueryEngine, QueryRequest
from rankscope.collector.store.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rankscope.collector.store.store import Store

    Ask = Callable[..., bytes]

CANARY = "canary-7f3a"
"""Content of a file next to the store, which no answer may contain."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("store")
    (folder / "secret.txt").write_text(CANARY + "\n")
    with open_store(f"chdb://{folder}") as opened:
        opened.insert_rows("clock", [{"host": "node-1", "boot_id": "b", "at_ns": 1}])
        yield opened


@pytest.fixture(scope="module")
def engine(store: Store) -> Iterator[QueryEngine]:
    assert store.path is not None
    opened = QueryEngine(store.path)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def ask(engine: QueryEngine) -> Ask:
    """Return a function that executes a statement and returns bytes."""

    def answer(text: str, **parameters: str) -> bytes:
        request = QueryRequest(text=text, parameters=parameters)
        return bytes(asyncio.run(engine.answer(request)).answer.view)

    return answer
