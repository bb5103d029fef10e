"""The job's commit, compared with what git says, and repositories that run programs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from rankscope.tracer.job.manifest import read_commit
from tests.support.tracer.reading import only_folder

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")

ALONE = {
    **{name: text for name, text in os.environ.items() if not name.startswith("GIT_")},
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
}


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@localhost", *words]
    done = subprocess.run(
        command, cwd=folder, env=ALONE, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def commit_in(folder: Path, *options: str) -> str:
    """Make a repository with one commit and return the commit."""
    folder.mkdir()
    git(folder, "init", "--quiet", *options)
    (folder / "train.py").write_text("from rankscope import tracer\ntracer.install()\n")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "first")
    return git(folder, "rev-parse", "HEAD")


@pytest.mark.parametrize("options", [(), ("--object-format=sha256",)])
def test_the_commit_of_a_branch_is_found_from_any_folder_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    commit = commit_in(tmp_path / "code", *options)
    below = tmp_path / "code" / "jobs" / "one"
    below.mkdir(parents=True)

    for folder in (tmp_path / "code", below):
        monkeypatch.chdir(folder)
        assert read_commit() == commit


@pytest.mark.parametrize(
    "words",
    [
        ("checkout", "--quiet", "--detach"),
        ("pack-refs", "--all"),
        ("checkout", "--quiet", "-b", "feature/a+b"),
        ("symbolic-ref", "refs/heads/other", "refs/heads/first"),
    ],
)
def test_the_commit_is_the_one_that_git_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    commit = commit_in(tmp_path / "code", "--initial-branch=first")
    git(tmp_path / "code", *words)
    if words[0] == "symbolic-ref":
        git(tmp_path / "code", "symbolic-ref", "HEAD", "refs/heads/other")

    monkeypatch.chdir(tmp_path / "code")

    assert read_commit() == commit


def test_a_linked_checkout_has_a_commit_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_in(tmp_path / "code")
    linked = tmp_path / "linked"
    git(tmp_path / "code", "worktree", "add", "--quiet", "-b", "other", str(linked))
    git(linked, "commit", "--quiet", "--allow-empty", "--message", "second")

    monkeypatch.chdir(linked)

    assert read_commit() == git(linked, "rev-parse", "HEAD")


def test_without_a_commit_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_commit() is None

    git(tmp_path, "init", "--quiet")
    assert read_commit() is None


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\xff\0",
        b"ref: HEAD\n",
        b"ref: refs/heads/../../../secret\n",
        b"ref: /etc/passwd\n",
        b"ref: refs/heads/.invalid\n",
        b"ref: refs/heads/" + b"x" * 10_000,
        b"ref: refs/heads/loop\n",
    ],
)
def test_a_damaged_repository_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    commit_in(tmp_path / "code")
    (tmp_path / "secret").write_text("a" * 40)
    (tmp_path / "code" / ".git" / "refs" / "heads" / "loop").write_text("ref: refs/heads/loop\n")
    (tmp_path / "code" / ".git" / "HEAD").write_bytes(head)

    monkeypatch.chdir(tmp_path / "code")

    assert read_commit() is None


def test_a_foreign_repository_runs_no_program(tmp_path: Path) -> None:
    # GIVEN a repository whose monitor, hook and filter write files
    code = tmp_path / "code"
    commit = commit_in(code)
    marks = [tmp_path / name for name in ("monitor", "post-index-change", "filter")]
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\ntouch "$1"\ncat > /dev/null\n')
    program.chmod(0o755)
    hook = code / ".git" / "hooks" / "post-index-change"
    hook.write_text(f"#!/bin/sh\n{program} {marks[1]} < /dev/null\n")
    hook.chmod(0o755)
    (code / ".git" / "info" / "attributes").write_text("* filter=foreign\n")
    git(code, "config", "core.fsmonitor", f"{program} {marks[0]} < /dev/null; true")
    git(code, "config", "filter.foreign.clean", f"{program} {marks[2]}")
    os.utime(code / "train.py", (0, 0))  # git reads the file again, through the filter

    # WHEN a job is traced there
    environ = {**ALONE, "RANKSCOPE_TRACE": str(tmp_path / "spool"), "RANKSCOPE_RUN": "run"}
    done = subprocess.run(
        [sys.executable, "-m", "rankscope.tracer", "train.py"],
        cwd=code, env=environ, capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip

    # THEN none of them runs, and the commit is known; git itself would run all three
    assert done.returncode == 0, done.stderr
    manifest = json.loads((only_folder(tmp_path / "spool") / "manifest.json").read_text())
    assert manifest["git"] == {"commit": commit}
    assert [mark.name for mark in marks if mark.exists()] == []
    git(code, "status", "--porcelain")
    assert [mark.name for mark in marks if not mark.exists()] == []
