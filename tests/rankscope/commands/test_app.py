"""The command line as a whole: hints, and stores that do not exist."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from rankscope.__main__ import main
from rankscope.analysis.trace.errors import UnknownRunError
from rankscope.collector.errors import StoreError
from rankscope.commands.alerts import list_alerts
from rankscope.commands.analyze import AnalyzeOptions, analyze_stored
from rankscope.commands.runs import delete_stored, list_findings, list_runs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (("bogus",), "No such command 'bogus'. See `rankscope --help`"),
        (("import", "x"), "Missing option '--format'. See `rankscope import --help`"),
        (("token", "crate"), "Did you mean 'create'? See `rankscope token --help`"),
    ],
    ids=["unknown command", "missing option", "misspelt subcommand"],
)
def test_a_wrong_call_is_led_to_the_help_of_its_command(
    args: tuple[str, ...],
    hint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["rankscope", *args])

    assert main() == 2
    assert capsys.readouterr().err.endswith(f"{hint}\n")


def test_commands_that_read_create_no_store(tmp_path: Path) -> None:
    url = f"chdb://{tmp_path / 'mistyped'}"
    commands: tuple[Callable[[], str], ...] = (
        lambda: list_runs(as_json=False, store_url=url),
        lambda: list_alerts(as_json=False, store_url=url),
        lambda: list_findings(None, as_json=False, store_url=url),
        lambda: delete_stored("r", as_json=False, store_url=url),
        lambda: analyze_stored(AnalyzeOptions(run_id="r", as_json=False, store_url=url)),
    )
    for command in commands:
        with pytest.raises(
            StoreError, match=r"there is no store at .*mistyped: check --store or RANKSCOPE_STORE"
        ):
            command()

    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_findings_of_an_unknown_run_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnknownRunError, match="no run 'r' in this store"):
        list_findings("r", as_json=False, store_url=f"chdb://{tmp_path}")
