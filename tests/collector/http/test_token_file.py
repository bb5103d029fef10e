from __future__ import annotations

import json
import os
import threading
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.errors import TokenFileError, TokenRequestError
from rankscope.collector.http.tokens import (
    ClientToken,
    Role,
    TokenFile,
    default_tokens_path,
    edit_tokens,
    mark_revoked,
    read_client_token,
    read_tokens,
    write_private,
    write_tokens,
)
from tests.support.collector.token_builder import NOW_NS, made

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens.json"


def test_a_written_file_is_readable_by_its_owner_only(path: Path) -> None:
    record = made(Role.READ, run_prefix="a")[1]
    write_tokens(path, [record])

    assert read_tokens(path) == [record]
    assert path.stat().st_mode & 0o777 == 0o600
    assert [found.name for found in path.parent.iterdir()] == ["tokens.json"]


def test_a_missing_file_has_no_tokens(path: Path) -> None:
    assert read_tokens(path) == []


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o666])
def test_a_file_accessible_to_others_is_refused(path: Path, mode: int) -> None:
    write_tokens(path, [made()[1]])
    path.chmod(mode)

    with pytest.raises(TokenFileError, match=f"mode {mode:04o}.: chmod 600"):
        read_tokens(path)


def test_a_link_a_folder_and_a_pipe_are_refused(path: Path) -> None:
    real = path.with_name("real.json")
    write_tokens(real, [made()[1]])
    path.symlink_to(real)
    with pytest.raises(TokenFileError, match="cannot be opened"):
        read_tokens(path)
    path.unlink()
    path.mkdir(mode=0o700)
    with pytest.raises(TokenFileError, match="not a regular file"):
        read_tokens(path)
    path.rmdir()
    os.mkfifo(path, 0o600)
    with pytest.raises(TokenFileError, match="not a regular file"):
        read_tokens(path)


GOOD = made()[1].document()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"version": 1}',
        b'{"version": 1, "tokens": [{}]}',
        b'{"version": 1, "tokens": 7}',
        b"[" * 100_000,
        json.dumps({"version": 1, "tokens": [{**GOOD, "role": "root"}]}).encode(),
        json.dumps({"version": 1, "tokens": [{**GOOD, "hash_hex": "é" * 64}]}).encode(),
        json.dumps({"version": 1, "tokens": [{**GOOD, "hash_hex": ""}]}).encode(),
        json.dumps({"version": 1, "tokens": [{**GOOD, "expires_ns": "never"}]}).encode(),
        json.dumps({"version": 1, "tokens": [{**GOOD, "run_prefix": None}]}).encode(),
        json.dumps({"version": 1, "tokens": [{**GOOD, "more": 1}]}).encode(),
    ],
)
def test_a_file_with_invalid_content_is_refused_and_grants_nothing(
    path: Path, content: bytes
) -> None:
    write_private(path, content)

    with pytest.raises(TokenFileError, match="invalid content"):
        read_tokens(path)
    book = TokenFile(path)
    assert book.problem is not None
    assert book.grant(made()[0]) is None


def test_a_file_of_a_newer_version_is_refused_naming_both(path: Path) -> None:
    write_private(path, b'{"version": 2, "tokens": []}')

    with pytest.raises(TokenFileError, match="version 2, expected 1"):
        read_tokens(path)


def test_a_failed_change_leaves_the_file_unchanged(path: Path) -> None:
    write_tokens(path, [made()[1]])
    before = path.read_bytes()

    def change() -> None:
        with edit_tokens(path) as records:
            records.clear()
            mark_revoked(records, "none", now_ns=NOW_NS)

    with pytest.raises(TokenRequestError):
        change()

    assert path.read_bytes() == before


def test_concurrent_commands_lose_no_tokens(path: Path) -> None:
    def add() -> None:
        for _ in range(5):
            with edit_tokens(path) as records:
                records.append(made()[1])

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(read_tokens(path)) == 20


def test_the_server_follows_the_file_without_a_restart(path: Path) -> None:
    # GIVEN a server that started without tokens
    book = TokenFile(path, unix_ns=lambda: NOW_NS)
    token, record = made()
    assert book.grant(token) is None
    # WHEN one is created THEN it is valid, until it is revoked
    write_tokens(path, [record])
    assert book.grant(token) is not None
    write_tokens(path, mark_revoked([record], record.token_id, now_ns=NOW_NS))
    assert book.grant(token) is None
    # AND while others can access the file, no token is valid
    write_tokens(path, [record])
    path.chmod(0o644)
    assert book.grant(token) is None
    assert book.problem is not None
    path.chmod(0o600)
    assert book.grant(token) is not None
    assert book.problem is None


def test_the_path_of_the_file_comes_from_the_environment(tmp_path: Path) -> None:
    assert default_tokens_path({"RANKSCOPE_TOKENS": "/etc/x.json"}).as_posix() == "/etc/x.json"
    found = default_tokens_path({"XDG_DATA_HOME": str(tmp_path)})
    assert found == tmp_path / "rankscope" / "tokens.json"


# Token of a client


def test_a_client_reads_its_token_from_the_environment_or_a_private_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    write_private(file, b"rst_from_file\n")

    assert read_client_token({}) is None
    assert read_client_token({"RANKSCOPE_TOKEN": " rst_a\n"}) == ClientToken("rst_a")
    both = {"RANKSCOPE_TOKEN": "rst_a", "RANKSCOPE_TOKEN_FILE": str(file)}
    assert read_client_token(both) == ClientToken("rst_from_file")
    # Rotation: the file is read again.
    write_private(file, b"rst_next\n")
    assert read_client_token(both) == ClientToken("rst_next")


def test_a_clients_token_file_that_is_accessible_missing_or_empty_is_refused(
    tmp_path: Path,
) -> None:
    file = tmp_path / "token"
    environment = {"RANKSCOPE_TOKEN_FILE": str(file)}
    with pytest.raises(TokenFileError, match="does not exist"):
        read_client_token(environment)
    for content in (b"", b"\n", b"two words", b"\xff", b"a\nb", b"x" * 5_000):
        write_private(file, content)
        with pytest.raises(TokenFileError):
            read_client_token(environment)
    write_private(file, b"secret-of-ours")
    file.chmod(0o644)
    with pytest.raises(TokenFileError, match="chmod 600") as caught:
        read_client_token(environment)
    assert "secret-of-ours" not in str(caught.value)


def test_a_clients_token_does_not_show_when_printed() -> None:
    assert "rst_a" not in f"{ClientToken('rst_a')!r} {ClientToken('rst_a')}"
    assert ClientToken("rst_a").header() == "Bearer rst_a"
