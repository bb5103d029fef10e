"""Read-only session: results are copied in time, and errors of the engine are QueryError."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.collector.gateway.errors import QueryError
from rankscope.collector.gateway.session import Answer, ReadOnlySession

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rankscope.collector.store.store import Store

TEXT = b"what the engine found"


class Memory:
    """Memory that is overwritten once it is released, as another thread may do in the engine."""

    def __init__(self) -> None:
        self.content = bytearray(TEXT)

    def __del__(self) -> None:
        self.content[:] = bytes(len(TEXT))


class Overwritten(ReadOnlySession):
    """Session whose answers are in a `Memory`."""

    def answer(
        self, sql: str, output_format: str, parameters: Mapping[str, str] | None = None
    ) -> Answer:
        memory = Memory()
        return Answer(view=memoryview(memory.content), owner=memory)


@pytest.fixture
def sessions(store: Store) -> Iterator[list[ReadOnlySession]]:
    opened: list[ReadOnlySession] = []
    yield opened
    for handle in opened:
        handle.close()


def test_a_small_result_is_copied_while_the_engine_has_it(
    store: Store, sessions: list[ReadOnlySession]
) -> None:
    assert store.path is not None
    sessions.append(Overwritten(store.path, {}))

    assert sessions[0].run("SELECT 1", "TSV") == TEXT


def test_a_setting_that_the_engine_refuses_is_an_error_of_the_query(store: Store) -> None:
    assert store.path is not None
    with pytest.raises(QueryError, match="no_such_setting"):
        ReadOnlySession(store.path, {"no_such_setting": 1})


def test_a_session_that_cannot_be_opened_is_an_error_of_the_query(store: Store) -> None:
    assert store.path is not None
    with pytest.raises(QueryError):
        ReadOnlySession(store.path / "another", {})
