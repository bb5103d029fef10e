"""Waits for what another thread or process does."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

LONGEST_S = 120.0
"""Longest wait of a test: a busy machine must not fail it."""

PAUSE_S = 0.005


def wait_until(condition: Callable[[], bool], *, timeout_s: float = LONGEST_S) -> None:
    """Wait until another thread or process has made ``condition`` true; fail after a timeout."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"still false after {timeout_s:.0f} s"
        time.sleep(PAUSE_S)
