"""What holds for all tests: how properties are examined, one thread for torch, plain reports.

A machine may stand still while an example is drawn or tried, so no deadline holds one, and what a
submission is told depends on the submission alone: each run tries the same examples. To look for
new ones: ``make pytest ARGS="--hypothesis-profile fresh"``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Generator

# Before torch is loaded, here and in all that a test starts: its threads spin while they wait for
# each other, and where other processes hold the cores a step takes up to a hundred times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "fresh", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("steady")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape what UTF-8 can't say in a report: it goes from process to process as that.

    Tests with lone surrogates would else end the whole session, also where they pass: what they
    logged is a part of their report.
    """
    report = yield
    report.sections = [(title, _encodable(text)) for title, text in report.sections]
    told = report.longreprtext
    if told != _encodable(told):
        report.longrepr = _encodable(told)
    return report


def _encodable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
