"""Skips for missing tools."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

import pytest

from tests.support.missing_tools import skip_for_missing
from tests.support.mounts import needs_mounts

if TYPE_CHECKING:
    from pathlib import Path

REFUSING = """#!/bin/sh
echo "unshare: write failed /proc/self/uid_map: Operation not permitted" >&2
exit 1
"""


def test_a_missing_tool_skips_a_test_and_fails_it_in_ci(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="there is no saw"):
        skip_for_missing("there is no saw")

    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="there is no saw"):
        skip_for_missing("there is no saw")


@pytest.mark.parametrize("program", [None, REFUSING], ids=["no unshare", "a kernel that refuses"])
def test_a_test_without_mounts_fails_in_ci_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str | None
) -> None:
    # GIVEN a machine without the program, or whose kernel forbids mounts
    if program is not None:
        (tmp_path / "unshare").write_text(program)
        (tmp_path / "unshare").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CI", "true")

    with pytest.raises(pytest.fail.Exception, match="allows no mounts") as failed:
        needs_mounts()

    assert "\n" not in str(failed.value)
    assert "unshare: " in str(failed.value)
