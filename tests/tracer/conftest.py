from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _patient_goodbye(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a shutdown wait for its thread however busy the machine is: a test reads its files."""
    monkeypatch.setattr("tracer.background.GOODBYE_S", 60.0)
