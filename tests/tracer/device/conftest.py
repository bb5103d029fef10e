from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests that need a GPU out where there is none: each has a twin on the fake device."""
    if torch.cuda.is_available():
        return
    needing = [item for item in items if item.get_closest_marker("gpu") is not None]
    if needing:
        config.hook.pytest_deselected(items=needing)
        items[:] = [item for item in items if item not in needing]
