from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faults.checker import Oracle
from tests.support.collector.agent_rig import OPEN_RIGS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def oracle(tmp_path: Path) -> Iterator[Oracle]:
    with Oracle(tmp_path / "oracle", is_synced=False) as opened:
        yield opened


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    folder = tmp_path / "spool"
    folder.mkdir()
    return folder


@pytest.fixture(autouse=True)
def _close_rigs() -> Iterator[None]:
    """Close what a test left open: its sockets would fail a later test."""
    yield
    for rig in list(OPEN_RIGS):
        rig.close()
