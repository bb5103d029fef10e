"""One embedded store a module: a process can have a single path open at a time."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from collector.store import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from collector.store import Store

_RUN_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with open_store(f"chdb://{tmp_path_factory.mktemp('store')}") as opened:
        yield opened


@pytest.fixture
def run_id() -> str:
    """Return a name that no other test has used, so that tests share a store."""
    return f"run-{next(_RUN_NUMBERS)}"


class FakeClock:
    """A monotonic clock that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now_ns = 10**12

    def __call__(self) -> int:
        return self.now_ns

    def advance_s(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()
