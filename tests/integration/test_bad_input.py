"""Invalid input of users: one line on stderr, exit status 2, and nothing is written."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rankscope.__main__ import main
from tests.support.collector.spool_builder import SpoolBuilder
from tests.support.ports import fixed_port

if TYPE_CHECKING:
    from pathlib import Path

META = "dp_size: 2\ndsp_size: 1\npp_size: 1\ntp_size: 1\nvpp_size: 1\nworld_size: 2\n"


class Command:
    """The command in this process, with a new store."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        monkeypatch.setenv("RANKSCOPE_STORE", f"chdb://{folder / 'store'}")
        monkeypatch.setenv("RANKSCOPE_TOKENS", str(folder / "tokens.json"))
        self.meta = folder / "meta.yaml"
        self.meta.write_text(META)

    def run(self, *arguments: str) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", ["rankscope", *arguments])
        self._capsys.readouterr()
        status = main()
        captured = self._capsys.readouterr()
        return status, captured.out, captured.err

    def refuses(self, *arguments: str) -> str:
        """Run a command that must be refused, and return its error line."""
        status, out, err = self.run(*arguments)
        assert status == 2
        assert out == ""
        assert err.count("\n") == 1
        assert err.startswith("rankscope: ")
        return err


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    return Command(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["analyze", "nosuch"], "there is no store"),
        (["analyze", "x", "--steps", "5"], "is not A:B"),
        (["analyze", "x", "--steps", "9:5"], "ends before it begins"),
        (["analyze"], "Missing argument"),
        (["runs", "--bogus"], "--bogus"),
        (["nosuch"], "nosuch"),
        (["runs", "--store", "sqlite:///x"], "chdb:///absolute/path"),
        (["runs", "--store", "chdb://relative"], "absolute"),
        (["import", "x.parquet", "--format", "kineto", "--run", "x"], "a folder of .json"),
        (["import", "a", "b", "--format", "bytedance", "--run", "x"], "takes one path, got 2"),
        (["import", "x.parquet", "--format", "bytedance"], "--run"),
        (["serve", "--port", "99999"], "--port"),
        (["serve", "--host", "0.0.0.0"], "--tls-cert and --tls-key"),
        (["serve", "--alert-webhook", "ftp://host/"], "https://host/path"),
        (["serve", "--alert-webhook-file", "/nowhere"], "--alert-webhook-file"),
        (["serve", "--alert-webhook-file", "/etc/passwd"], "chmod 600"),
        (["demo", "--fault", "slow-compute:rank=8,factor=2"], "ranks 0 to 7"),
        (["demo", "--fault", "slow-fan:rank=1"], "unknown cause"),
        (["demo", "--tp", "3", "--no-serve"], "tp 3"),
        (["demo", "--pp", "0"], "--pp"),
        (
            ["demo", "--steps", "8", "--fault", "slow-compute:rank=1,factor=2,steps=9-12"],
            "last step",
        ),
    ],
)
def test_an_invalid_flag_is_refused_with_the_fix(
    command: Command, arguments: list[str], says: str
) -> None:
    assert says in command.refuses(*arguments)


def import_arguments(file: Path, meta: Path) -> list[str]:
    return ["import", str(file), "--format", "bytedance", "--meta", str(meta), "--run", "x"]


@pytest.mark.slow
def test_an_invalid_trace_is_refused_and_creates_no_run(command: Command, tmp_path: Path) -> None:
    not_parquet = tmp_path / "not.parquet"
    not_parquet.write_bytes(b"PAR? no")
    incomplete = tmp_path / "incomplete.parquet"
    pq.write_table(pa.table({"dp_rank": [0], "stage": [0]}), incomplete)
    empty = tmp_path / "empty.parquet"
    empty.touch()

    for file in (not_parquet, incomplete, empty, tmp_path / "missing.parquet", tmp_path):
        assert str(file) in command.refuses(*import_arguments(file, command.meta))

    assert command.run("runs", "--json")[1] == '{"runs": []}\n'


@pytest.mark.slow
def test_a_spool_of_a_future_version_is_refused_with_its_name(
    command: Command, tmp_path: Path
) -> None:
    SpoolBuilder(tmp_path / "spool", run_id="later", version=99)

    port = str(fixed_port())  # A server of another test may hold the default port.
    said = command.refuses("serve", "--port", port, "--spool", str(tmp_path / "spool"))

    assert "version 99" in said
    assert command.run("runs", "--json")[1] == '{"runs": []}\n'
