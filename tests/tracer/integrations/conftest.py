from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope import tracer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let each test install its own tracer, as rank 0 of 1."""
    for name in ("RANKSCOPE_TRACE", "RANKSCOPE_DISABLE", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANKSCOPE_RUN", "run")
    yield
    tracer.shutdown()
