"""Where the published traces are, and the mark of the tests that need them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.paths import ROOT

TRACES = Path(
    os.environ.get("RANKSCOPE_TRACE_DIR") or ROOT.parent / "shared" / "data" / "bytedance"
)
"""Folder of ``trace-AR.parquet`` and the rest; docs say where a user gets them."""

needs_traces = pytest.mark.skipif(
    not (TRACES / "trace-AR.parquet").is_file(),
    reason=f"the published traces are not in {TRACES}: set RANKSCOPE_TRACE_DIR",
)
