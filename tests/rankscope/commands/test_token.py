from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.errors import TokenRequestError
from rankscope.collector.http.token_file import TokenBook
from rankscope.collector.http.tokens import Role
from rankscope.commands.token import NO_TOKENS, create_token, list_tokens, revoke_token
from rankscope.errors import BadInputError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "tokens.json"


def create(path: Path, *, role: str = "ingest", out: Path | None = None) -> str:
    return create_token(
        role=role,
        run_prefix="llama-",
        holder="node-agents",
        days=30,
        out=out,
        as_json=True,
        tokens_path=path,
    )


def test_a_token_is_created_shown_once_listed_and_revoked(path: Path) -> None:
    assert list_tokens(as_json=False, tokens_path=path) == NO_TOKENS

    # WHEN one is created
    made = json.loads(create(path))

    # THEN the server accepts it
    grant = TokenBook(path).grant(made["token"])
    assert grant is not None
    assert (grant.role, grant.run_prefix) == (Role.INGEST, "llama-")
    # AND the list shows everything except the token and its hash
    (listed,) = json.loads(list_tokens(as_json=True, tokens_path=path))["tokens"]
    assert listed == {name: value for name, value in made.items() if name != "token"}
    assert listed["expires_ns"] - listed["created_ns"] == 30 * 86_400 * 10**9
    table = list_tokens(as_json=False, tokens_path=path)
    assert made["token"] not in table
    assert made["id"] in table
    assert table.endswith("live")
    # AND after it is revoked, the server does not accept it
    assert revoke_token(made["id"], as_json=False, tokens_path=path).startswith("revoked token ")
    assert TokenBook(path).grant(made["token"]) is None
    assert list_tokens(as_json=False, tokens_path=path).endswith("revoked")


def test_a_token_written_to_a_new_private_file_is_not_shown(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "agent.token"
    made = json.loads(create(path, out=out))

    assert out.stat().st_mode & 0o777 == 0o600
    assert TokenBook(path).grant(out.read_text().strip()) is not None
    assert "token" not in made
    with pytest.raises(BadInputError, match="exists: give the name of a new file"):
        create(path, out=out)


def test_an_unknown_role_and_an_unknown_id_are_refused(path: Path) -> None:
    with pytest.raises(BadInputError, match="unknown --role root: give ingest, read, admin"):
        create(path, role="root")
    with pytest.raises(TokenRequestError, match="no token has the id 'x'"):
        revoke_token("x", as_json=False, tokens_path=path)


@pytest.mark.slow
def test_the_command_has_plain_output_and_exit_statuses(tmp_path: Path) -> None:
    def rankscope(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "rankscope", "token", *words],
            env={**os.environ, "RANKSCOPE_TOKENS": str(tmp_path / "tokens.json")},
            capture_output=True,
            text=True,
            check=False,
        )

    made = rankscope("create", "--role", "read", "--days", "1")
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout.startswith("rst_")
    (tmp_path / "tokens.json").chmod(0o644)
    broken = rankscope("list")
    assert (broken.returncode, broken.stdout) == (2, "")
    assert broken.stderr.count("\n") == 1
    assert "chmod 600" in broken.stderr
    wrong = rankscope("create", "--role", "root")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
