"""docs/doctor.md has the table of all checks, as the code has it."""

from __future__ import annotations

from rankscope.doctor.active.trials import ACTIVE_TESTS
from rankscope.doctor.checks.table import CHECKS
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")


def test_the_page_has_a_row_for_each_check() -> None:
    wanted = [
        f"| `{check.name}` | {check.source} | {check.warning or '-'} | {check.error or '-'} |"
        for check in CHECKS
    ]

    assert [line for line in PAGE.splitlines() if line in wanted] == wanted


def test_the_page_has_a_row_for_each_active_test() -> None:
    for test in ACTIVE_TESTS:
        assert f"| `{test.name}` | {test.what} | {test.unit} |" in PAGE
