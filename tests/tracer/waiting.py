"""Wait for what another thread or process does, for a bounded time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

LONGEST_S = 60.0
PAUSE_S = 0.005


def wait_until(condition: Callable[[], bool]) -> None:
    """Return once ``condition`` holds; fail where it never does."""
    deadline_s = time.monotonic() + LONGEST_S
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(PAUSE_S)
