"""The folder of the published traces, and the mark of the tests that need them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.missing_tools import skip_for_missing
from tests.support.paths import ROOT

NAMED = os.environ.get("RANKSCOPE_TRACE_DIR")
TRACES = Path(NAMED or ROOT.parent / "shared" / "data" / "bytedance")
"""Folder of `trace-AR.parquet` and the others; the README says where to get them."""

needs_traces = pytest.mark.traces
"""The mark; `tests/conftest.py` calls `require_traces` before a test that has it."""


def require_traces() -> None:
    """Skip the test if the published traces are missing.

    They are not part of the repository, so without `RANKSCOPE_TRACE_DIR` the test is skipped, also
    with `CI=true`. If the variable is set, they are expected, and `CI=true` makes it a failure.
    """
    if (TRACES / "trace-AR.parquet").is_file():
        return
    if NAMED:
        skip_for_missing(
            f"RANKSCOPE_TRACE_DIR={NAMED} has no trace-AR.parquet: see the README for the files"
        )
    pytest.skip(f"the published traces are not in {TRACES}: set RANKSCOPE_TRACE_DIR")
