from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _empty_store(tables: Path, tmp_path: Path) -> None:
    """Give each test the store that its report is made of, with all tables."""
    shutil.copytree(tables, tmp_path / "store", symlinks=True)
