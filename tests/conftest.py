"""Settings and fixtures for all tests: hypothesis profiles, one thread for torch, skips, stores.

A submission's result must depend on the submission alone, so hypothesis tries the same examples in
each run. `make nightly` explores with a fresh seed. No example has a deadline, because a shared
machine can stand still for seconds.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.support.collected import COLLECTED, functions_by_file
from tests.support.traces import require_traces

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

    from clickhouse_connect.driver.client import Client

    from rankscope.analysis.report.report import RunReport
    from rankscope.collector.store.store import Store

# Set before torch is loaded, here and in child processes: its threads spin while they wait for each
# other, and if other processes hold the cores, a step takes up to a hundred times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TABLES = "store-with-tables"
MIGRATING = {"store", "deploy"}
"""Folders of tests that let the migrations run."""

settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
# A test with a number of examples of its own keeps it.
settings.register_profile(
    "nightly",
    deadline=None,
    max_examples=1000,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("steady")


@pytest.fixture(autouse=True)
def consistent_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test in which a report contradicts itself; users get a warning."""
    if "rankscope.analysis.analyze" not in sys.modules:
        return
    from rankscope.analysis import analyze
    from rankscope.analysis.severity import find_contradictions

    def check(report: RunReport) -> tuple[str, ...]:
        found = tuple(find_contradictions(report))
        assert not found
        return found

    monkeypatch.setattr(analyze, "find_contradictions", check)


@pytest.fixture(scope="session")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a store without rows. A copy costs less than the migrations do."""
    from rankscope.collector.store.store import open_store

    folder = tmp_path_factory.mktemp("tables") / TABLES
    open_store(f"chdb://{folder}").close()
    return folder


@pytest.fixture(scope="module", autouse=True)
def new_stores(request: pytest.FixtureRequest) -> Iterator[None]:
    """Begin each new embedded store of this process as a copy of `tables`.

    Its migrations take 0.9 s of CPU time, a copy 0.05.
    """
    from rankscope.collector.store import store

    connect = store._connect_embedded

    def connect_copied(path: Path) -> Client:
        with suppress(OSError):  # the store says what is wrong with its folder
            if path.name != TABLES and not (path.exists() and any(path.iterdir())):
                made = request.getfixturevalue("tables")
                shutil.copytree(made, path, symlinks=True, dirs_exist_ok=True)
        return connect(path)

    with pytest.MonkeyPatch.context() as patch:
        if not MIGRATING & {folder.name for folder in request.path.parents}:
            patch.setattr(store, "_connect_embedded", connect_copied)
        yield


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Open an embedded store that the tests of a module share."""
    from rankscope.collector.store.store import open_store

    with open_store(f"chdb://{tmp_path_factory.mktemp('store')}") as opened:
        yield opened


@pytest.fixture
def empty_store(tmp_path: Path) -> Iterator[Store]:
    """Open an empty embedded store for one test."""
    from rankscope.collector.store.store import open_store

    with open_store(f"chdb://{tmp_path / 'store'}") as opened:
        yield opened


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage meanwhile, and never visit modules and test items again: both stay.

    Collections of a million objects that live on took a quarter of the collection's CPU time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note what was collected, before `-m` or `-k` deselects any of it, and order the files.

    Processes of xdist take file by file. The last files by name start ranks and take minutes: as
    the last ones, one of them would run alone at the end.
    """
    config.stash[COLLECTED] = functions_by_file(items)
    items.sort(key=lambda item: item.path, reverse=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs the published traces if they are missing."""
    if item.get_closest_marker("traces") is not None:
        require_traces()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape text in a report that UTF-8 cannot encode.

    Processes of xdist exchange reports as UTF-8. A lone surrogate in what a test logged, even a
    passed one, would end the whole session.
    """
    report = yield
    report.sections = [(title, _encodable(text)) for title, text in report.sections]
    longrepr = report.longreprtext
    if longrepr != _encodable(longrepr):
        report.longrepr = _encodable(longrepr)
    return report


def _encodable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
