from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

from rankscope.tracer.record.current import set_current
from rankscope.tracer.record.interface import NOOP_TRACER
from tests.support.tracer.recording import recorder_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _long_stop_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a shutdown wait for the background thread on a busy machine: a test reads its files."""
    monkeypatch.setattr("rankscope.tracer.record.background_thread.STOP_TIMEOUT_S", 60.0)


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Path]:
    """Return a folder into which `tracer.span` of this process records."""
    recorder = recorder_in(tmp_path, segment_bytes=1 << 20)
    set_current(recorder)
    yield tmp_path
    set_current(NOOP_TRACER)
    recorder.shutdown()


@pytest.fixture(autouse=True)
def _only_own_models() -> Iterator[None]:
    """Hide models and optimizers of earlier tests: the tracer looks for the job's among all."""
    gc.freeze()  # `gc.get_objects` returns no frozen object
    yield
    gc.unfreeze()
