"""Whose state the agent trusts: a forged journal would make it delete rows that were never sent."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.agent.errors import JournalError, StateFolderError
from rankscope.collector.agent.journal import Journal
from rankscope.collector.agent.state_folder import default_state_folder, open_state_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OTHER_USER = 65_534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


def test_a_new_folder_is_private_and_can_be_opened_again(tmp_path: Path) -> None:
    folder = tmp_path / "new/state"
    open_state_folder(folder)
    Journal(folder).close()
    (folder / "dead").mkdir()

    open_state_folder(folder)

    assert folder.stat().st_mode & 0o777 == 0o700


def test_each_spool_has_its_own_folder_outside_of_it(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path / "home")}
    for name in ("spool", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("spool")
    own, other, linked = (
        default_state_folder(tmp_path / name, environ) for name in ("spool", "other", "link")
    )

    assert own.parent == tmp_path / "home/rankscope/agent"
    assert own == linked != other


def test_each_host_has_its_own_folder_in_a_shared_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    folders = set()
    for host in ("a", "b"):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        folders.add(default_state_folder(tmp_path, environ))

    assert len(folders) == 2


def test_a_relative_variable_is_not_used(tmp_path: Path) -> None:
    found = default_state_folder(tmp_path, {"XDG_STATE_HOME": "relative"})

    assert found.is_absolute()
    assert "relative" not in found.parts


@pytest.mark.parametrize(
    "forge",
    [
        lambda path: path.symlink_to("/etc/passwd"),
        lambda path: path.symlink_to("nowhere"),
        os.mkfifo,
        lambda path: path.touch() or path.with_name("second").hardlink_to(path),
        lambda path: path.touch() or path.chmod(0o666),
    ],
    ids=["link", "dangling link", "fifo", "second name", "writable by others"],
)
@pytest.mark.parametrize("name", ["journal", "journal.db", "journal.db-wal", "lock", "dead"])
def test_what_another_user_may_have_put_there_is_refused_and_unchanged(
    tmp_path: Path, name: str, forge: Callable[[Path], object]
) -> None:
    folder = tmp_path / "state"
    open_state_folder(folder)
    forge(folder / name)
    before = (folder / name).lstat()

    with pytest.raises(StateFolderError, match="Move it away"):
        open_state_folder(folder)

    assert (folder / name).lstat() == before


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").symlink_to(tmp_path)

    with pytest.raises(StateFolderError, match="no link"):
        open_state_folder(tmp_path / "state")


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    folder.chmod(mode)

    with pytest.raises(StateFolderError, match="no other user can write"):
        open_state_folder(folder)


def test_a_folder_below_one_that_others_can_write_is_refused(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    spool.mkdir()
    spool.chmod(0o777)
    (tmp_path / "link").symlink_to(spool)

    for folder in (spool / "state", spool / "a/b/state", tmp_path / "link/state"):
        with pytest.raises(StateFolderError, match="can replace"):
            open_state_folder(folder)
    assert list(spool.iterdir()) == []

    spool.chmod(0o1777)
    open_state_folder(spool / "state")


@as_root
@pytest.mark.parametrize("changed", ["folder", "parent", "file", "link on the way"])
def test_what_belongs_to_another_user_is_refused(tmp_path: Path, changed: str) -> None:
    folder = tmp_path / "parent/state"
    open_state_folder(folder)
    (folder / "journal").touch()
    (tmp_path / "link").symlink_to(tmp_path / "parent")
    path = {
        "folder": folder,
        "parent": folder.parent,
        "file": folder / "journal",
        "link on the way": tmp_path / "link",
    }[changed]
    os.chown(path, OTHER_USER, OTHER_USER, follow_symlinks=False)

    with pytest.raises(StateFolderError):
        open_state_folder(tmp_path / "link/state")


def test_links_that_lead_to_each_other_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")

    with pytest.raises(StateFolderError):
        open_state_folder(tmp_path / "a/state")


@pytest.mark.parametrize("name", ["journal.db", "journal.tmp"])
def test_a_journal_that_is_a_link_is_not_opened(tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / name).symlink_to(victim)

    with pytest.raises(JournalError):
        Journal(folder)

    assert victim.read_text() == "precious"
