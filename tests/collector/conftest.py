"""One store per test module: embedded, and also on a server if one is given.

``RANKSCOPE_TEST_CLICKHOUSE`` is the URL of a ClickHouse server whose account may create databases
(`clickhouse://user:password@host:8123/default`, with `?cluster=NAME` for a cluster). Each module
gets its own database there.
"""

from __future__ import annotations

import itertools
import os
import shutil
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.store.store import open_store
from tests.deploy.servers import database_of_its_own

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rankscope.collector.store.store import Store

_RUN_NUMBERS = itertools.count()

GIVEN_SERVER = os.environ.get("RANKSCOPE_TEST_CLICKHOUSE")

STORES = [pytest.param("embedded", id="embedded")]
if GIVEN_SERVER:  # it may have a password, which must not show in a test's name
    STORES.append(pytest.param(GIVEN_SERVER, id="given"))


@pytest.fixture(scope="module", params=STORES)
def store(
    request: pytest.FixtureRequest, tables: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Store]:
    if request.param == "embedded":
        folder = shutil.copytree(tables, tmp_path_factory.mktemp("store") / "store", symlinks=True)
        with open_store(f"chdb://{folder}") as opened:
            yield opened
    else:
        with database_of_its_own(request.param) as url, open_store(url) as opened:
            yield opened


@pytest.fixture
def run_id() -> str:
    """Return a unique name, so that tests can share a store."""
    return f"run-{next(_RUN_NUMBERS)}"


class FakeClock:
    """A monotonic clock that moves only when a test advances it."""

    def __init__(self) -> None:
        self.now_ns = 10**12

    def __call__(self) -> int:
        return self.now_ns

    def advance_s(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()
