"""Links, hard links and exchanged folders in a spool: they lead to nothing outside of it."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.agent.agent import ranks_in
from rankscope.collector.host.heartbeat import find_local_ranks, newest_step
from rankscope.collector.spool.folder import (
    open_spool_file,
    process_folders,
    remove_process_folder,
    run_folders,
    segment_paths,
    used_bytes,
)
from rankscope.collector.spool.tail import SegmentPolicy, SpoolTail
from rankscope.collector.store.writer import StoreWriter
from tests.support.collector.spool_builder import ELSEWHERE, SpoolBuilder
from tests.support.collector.stored import names_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rankscope.collector.spool.cut import Cut
    from rankscope.collector.store.store import Store

pytestmark = pytest.mark.slow

OTHER_USER = 65_534


def private_spool(tmp_path: Path, run_id: str) -> SpoolBuilder:
    """Return an ended process in a spool that is not the reader's."""
    builder = SpoolBuilder(tmp_path / "private", run_id=run_id)
    builder.span("secret")
    builder.end()
    return builder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("place", ["run", "process"])
def test_a_linked_folder_is_reported_once_and_neither_read_nor_emptied(
    store: Store, run_id: str, tmp_path: Path, place: str
) -> None:
    # GIVEN a link in the spool to a folder of another spool
    private, spool = private_spool(tmp_path, run_id), tmp_path / "spool"
    link = spool / run_id if place == "run" else spool / run_id / private.folder.name
    link.parent.mkdir(parents=True)
    link.symlink_to(private.folder.parent if place == "run" else private.folder)
    before = content(private.folder)

    # WHEN the spool is read
    tail = SpoolTail(spool, StoreWriter(store), segment_policy=SegmentPolicy.DELETE)
    (problem,) = tail.poll().problems

    # THEN nothing of it is stored or deleted
    assert str(link.name) in problem
    assert "links in a spool are not followed" in problem
    assert tail.poll().problems == ()
    assert names_of(store, run_id) == []
    assert content(private.folder) == before
    assert ranks_in(spool, run_id) == []
    assert find_local_ranks(spool, ELSEWHERE, ()) == ({}, set())
    assert newest_step(link) == -1 or place == "run"


def test_a_spool_that_is_a_link_itself_is_read(store: Store, run_id: str, tmp_path: Path) -> None:
    private_spool(tmp_path, run_id)
    (tmp_path / "spool").symlink_to("private")

    SpoolTail(tmp_path / "spool", StoreWriter(store)).poll()

    assert names_of(store, run_id) == ["secret"]


class InterruptedWriter(StoreWriter):
    """A writer with a callback between the storing of rows and their deletion from the spool."""

    then: Callable[[], None]

    def ingest(self, cuts: Sequence[Cut]) -> None:
        super().ingest(cuts)
        self.then()


@pytest.mark.parametrize("place", ["run", "process"])
@pytest.mark.parametrize("by", ["link", "folder"])
def test_an_exchange_after_the_reading_deletes_nothing_elsewhere(
    store: Store, run_id: str, tmp_path: Path, place: str, by: str
) -> None:
    # GIVEN a process, and another one whose folder and files have the same names
    spool = tmp_path / "spool"
    own = SpoolBuilder(spool, run_id=run_id)
    own.span("own")
    own.end()
    private = private_spool(tmp_path, run_id)
    victim = private.folder.rename(private.folder.with_name(own.folder.name))
    exchanged, target = own.folder, victim
    if place == "run":
        exchanged, target = own.folder.parent, victim.parent
    before = content(victim)

    def exchange() -> None:
        exchanged.rename(tmp_path / "former")
        if by == "link":
            exchanged.symlink_to(target)
        else:
            target.rename(exchanged)

    # WHEN they are exchanged after the rows were stored
    writer = InterruptedWriter(store)
    writer.then = exchange
    tail = SpoolTail(spool, writer, segment_policy=SegmentPolicy.DELETE)
    tail.poll()

    # THEN the other one's files are all there
    assert content(own.folder) == before
    assert names_of(store, run_id) == ["own"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_hard_link_to_the_file_of_another_user_is_not_read(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text('{"config": {"password": "x"}}')
    secret.chmod(0o600)
    builder = SpoolBuilder(tmp_path / "spool", run_id=run_id)
    for path in [*builder.folder.iterdir(), builder.folder]:
        os.chown(path, OTHER_USER, OTHER_USER)
    (builder.folder / "manifest.json").unlink()
    (builder.folder / "manifest.json").hardlink_to(secret)

    (problem,) = SpoolTail(tmp_path / "spool", StoreWriter(store)).poll().problems

    assert "belongs to another user" in problem


def test_no_link_on_the_way_to_a_file_is_followed(tmp_path: Path) -> None:
    private = private_spool(tmp_path, "run")
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool/run").symlink_to(private.folder.parent)
    through = tmp_path / "spool/run" / private.folder.name

    for call in (segment_paths, lambda path: open_spool_file(path / "process.rsp")):
        with pytest.raises(NotADirectoryError):
            call(through)
    with pytest.raises(NotADirectoryError):
        process_folders(tmp_path / "spool/run")
    assert remove_process_folder(through) == 0
    assert private.folder.exists()
    assert [path.name for path in run_folders(tmp_path / "spool")] == ["run"]


def test_a_process_folder_is_removed_with_the_links_in_it_and_not_their_targets(
    tmp_path: Path,
) -> None:
    private, own = private_spool(tmp_path, "run"), SpoolBuilder(tmp_path / "spool", run_id="run")
    before = content(private.folder)
    (own.folder / "more").symlink_to(private.folder)

    assert remove_process_folder(own.folder) > 0

    assert not own.folder.exists()
    assert content(private.folder) == before


def test_the_size_of_a_spool_is_that_of_its_files_and_of_no_link(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    builder = SpoolBuilder(spool, run_id="run")
    (spool / "run/link").symlink_to("/usr")
    before = used_bytes(spool)
    at = os.open(builder.folder, os.O_RDONLY)
    for _ in range(1_200):  # deeper than the interpreter's limit of recursion
        os.mkdir("d", dir_fd=at)
        inner = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = inner
    os.close(at)

    files = sum(path.stat().st_blocks * 512 for path in builder.folder.iterdir() if path.is_file())
    assert files <= before < files + (1 << 20)
    assert used_bytes(spool) < before + (1 << 20)
    remove_process_folder(builder.folder)
    subprocess.run(["rm", "-rf", spool], check=True)
