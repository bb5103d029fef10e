from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from rankscope.__main__ import main
from rankscope.collector.http.tokens import Role, TokenFile
from rankscope.commands.token import NO_TOKENS

if TYPE_CHECKING:
    from pathlib import Path

CREATE = ("create", "--role", "ingest", "--run-prefix", "llama-", "--holder", "a", "--days", "30")


class Command:
    """`rankscope token` on a file of tokens of its own."""

    def __init__(
        self,
        path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        self.path = path
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        monkeypatch.setenv("RANKSCOPE_TOKENS", str(path))

    def run(self, *words: str) -> str:
        """Return what a command prints."""
        self._monkeypatch.setattr(sys, "argv", ["rankscope", "token", *words])
        status = main()
        output = self._capsys.readouterr()
        assert (status, output.err) == (0, "")
        return output.out.removesuffix("\n")

    def error(self, *words: str) -> str:
        """Return the line of a command that refuses its input."""
        self._monkeypatch.setattr(sys, "argv", ["rankscope", "token", *words])
        status = main()
        output = self._capsys.readouterr()
        assert (status, output.out) == (2, "")
        assert output.err.count("\n") == 1
        return output.err


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    return Command(tmp_path / "data" / "tokens.json", monkeypatch, capsys)


def test_a_token_is_created_shown_once_listed_and_revoked(command: Command) -> None:
    assert command.run("list") == NO_TOKENS

    # WHEN one is created
    created = json.loads(command.run(*CREATE, "--json"))

    # THEN the server accepts it
    grant = TokenFile(command.path).grant(created["token"])
    assert grant is not None
    assert (grant.role, grant.run_prefix) == (Role.INGEST, "llama-")
    # AND the list shows everything except the token and its hash
    (listed,) = json.loads(command.run("list", "--json"))["tokens"]
    assert listed == {name: value for name, value in created.items() if name != "token"}
    assert listed["expires_ns"] - listed["created_ns"] == 30 * 86_400 * 10**9
    table = command.run("list")
    assert created["token"] not in table
    assert created["id"] in table
    assert table.endswith("live")
    # AND after it is revoked, the server does not accept it
    assert command.run("revoke", created["id"]) == f"revoked token {created['id']}"
    assert TokenFile(command.path).grant(created["token"]) is None
    assert command.run("list").endswith("revoked")


def test_a_token_written_to_a_new_private_file_is_not_shown(
    command: Command, tmp_path: Path
) -> None:
    out = tmp_path / "agent.token"

    created = json.loads(command.run(*CREATE, "--json", "--out", str(out)))

    assert out.stat().st_mode & 0o777 == 0o600
    assert TokenFile(command.path).grant(out.read_text().strip()) is not None
    assert "token" not in created
    assert "exists: give the name of a new file" in command.error(*CREATE, "--out", str(out))


def test_without_json_only_the_token_is_printed(command: Command) -> None:
    assert command.run(*CREATE).startswith("rst_")


def test_an_unknown_role_and_an_unknown_id_are_refused(command: Command) -> None:
    line = command.error("create", "--role", "root")
    assert "unknown --role root: give ingest, read, sql, admin" in line
    assert "no token has the id 'x'" in command.error("revoke", "x")


def test_a_file_of_tokens_that_others_may_read_is_refused(command: Command) -> None:
    command.run(*CREATE)
    command.path.chmod(0o644)

    assert "chmod 600" in command.error("list")
