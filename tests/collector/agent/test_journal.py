from __future__ import annotations

import errno
import json
import os
import zlib
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.agent.errors import JournalError, JournalVersionError
from rankscope.collector.agent.journal import COMPACT_BYTES, Disk, Journal, JournalFile
from rankscope.collector.spool.cut import CutKey
from tests.support.collector.cut_builder import PROCESS, SEGMENT, span_cut
from tests.support.paths import GOLDEN

if TYPE_CHECKING:
    from pathlib import Path


class SmallDisk(Disk):
    """A disk with so many bytes left, which cuts the write that does not fit."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def append(self, descriptor: int, data: bytes) -> None:
        fits = data[: self.num_bytes]
        super().append(descriptor, fits)
        self.num_bytes -= len(fits)
        if len(fits) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class ForgetfulDisk(Disk):
    """A disk whose next sync fails, and which has then lost what was not synced."""

    def __init__(self) -> None:
        self.is_failing = False
        self.num_syncs = 0

    def sync(self, descriptor: int) -> None:
        self.num_syncs += 1
        if self.is_failing:
            self.is_failing = False
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync(descriptor)


def key(first_row: int, end_row: int, *, segment: int = SEGMENT) -> CutKey:
    return CutKey(
        run_id="run", epoch=0, rank=0, process=PROCESS, segment=segment, first_row=first_row,
        end_row=end_row,
    )  # fmt: skip


def reopened(journal: Journal, path: Path) -> Journal:
    journal.close()
    return Journal(path)


def test_a_cut_that_was_noted_is_unanswered_until_it_is_settled(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.note_cuts([span_cut("run", 0, 4), span_cut("run", 4, 9)])
    assert not journal.is_settled(key(0, 4))

    journal.note_settled([key(0, 4)])
    journal = reopened(journal, tmp_path / "journal")

    assert journal.unanswered("run") == (key(4, 9),)
    assert journal.end_rows("run") == {SEGMENT: 4}
    assert journal.is_settled(key(0, 4))
    assert not journal.is_settled(key(4, 9))
    journal.close()


def test_rows_that_were_given_up_are_counted_across_restarts(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.note_dropped(key(0, 4), reason="refused", num_rows=3)
    journal = reopened(journal, tmp_path / "journal")
    journal.note_dropped(key(4, 9), reason="refused", num_rows=5)
    journal = reopened(journal, tmp_path / "journal")

    assert journal.dropped("run") == {PROCESS: {"refused": 8}}
    assert journal.end_rows("run") == {SEGMENT: 9}
    journal.close()


def test_a_kill_at_any_byte_of_the_last_line_costs_that_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.note_cuts([span_cut("run", 0, 4)])
    num_whole = path.stat().st_size
    journal.note_cuts([span_cut("run", 4, 9)])
    journal.close()
    whole = path.read_bytes()

    for num_bytes in range(num_whole, len(whole)):
        path.write_bytes(whole[:num_bytes])
        journal = Journal(path)
        assert journal.unanswered("run") == (key(0, 4),)
        assert path.stat().st_size == num_whole
        journal.close()


def test_a_tail_of_zeros_as_after_a_power_cut_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.note_cuts([span_cut("run", 0, 4)])
    journal.close()
    num_whole = path.stat().st_size
    path.write_bytes(path.read_bytes() + bytes(4096) + b"\n" + bytes(100))

    journal = Journal(path)

    assert (journal.unanswered("run"), journal.num_damaged) == ((key(0, 4),), 0)
    assert path.stat().st_size == num_whole
    journal.close()


def test_a_flipped_bit_in_the_middle_costs_its_line_and_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    for first in (0, 4, 8):
        journal.note_cuts([span_cut("run", first, first + 4)])
    journal.close()
    lines = path.read_bytes().splitlines(keepends=True)
    flipped = bytearray(lines[2])
    flipped[30] ^= 1
    path.write_bytes(lines[0] + lines[1] + bytes(flipped) + lines[3])

    journal = Journal(path)

    assert journal.unanswered("run") == (key(0, 4), key(8, 12))
    assert journal.num_damaged == 1
    journal.close()


def test_a_full_disk_refuses_and_later_goes_on_with_a_file_that_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    disk = SmallDisk(400)
    journal = Journal(path, storage=disk)
    journal.note_cuts([span_cut("run", 0, 4)])
    with pytest.raises(JournalError, match="No space left"):
        journal.note_cuts([span_cut("run", 4, 9)])
    assert journal.unanswered("run") == (key(0, 4),)

    disk.num_bytes = 10_000
    journal.note_cuts([span_cut("run", 4, 10)])
    journal = reopened(journal, path)

    assert journal.unanswered("run") == (key(0, 4), key(4, 10))
    assert journal.num_damaged == 0
    journal.close()


def test_after_a_failed_sync_nothing_is_trusted_to_that_file(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    disk = ForgetfulDisk()
    journal = Journal(path, storage=disk)
    journal.note_cuts([span_cut("run", 0, 4)])
    inode = path.stat().st_ino
    disk.is_failing = True
    with pytest.raises(JournalError, match="Input/output error"):
        journal.note_cuts([span_cut("run", 4, 9)])

    journal.note_cuts([span_cut("run", 4, 9)])

    assert path.stat().st_ino != inode
    journal = reopened(journal, path)
    assert journal.unanswered("run") == (key(0, 4), key(4, 9))
    journal.close()


def test_a_long_journal_is_written_anew_and_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    disk = ForgetfulDisk()
    journal = Journal(path, storage=disk)
    journal.note_clock({"host": "h", "boot_id": "b", "begin_ns": 1, "offset_ns": 2, "drift_ppb": 3})
    journal.note_dropped(key(0, 2, segment=9), reason="refused", num_rows=2)
    journal.note_cuts([span_cut("run", 0, 5)])
    many = [key(row, row + 1, segment=8) for row in range(2_000)]
    while path.stat().st_size <= COMPACT_BYTES:
        journal.note_settled(many)
    journal.note_settled(many[:1])

    assert path.stat().st_size < 2_000
    journal = reopened(journal, path)
    assert journal.end_rows("run") == {9: 2, 8: 2_000}
    assert journal.unanswered("run") == (key(0, 5),)
    assert journal.dropped("run") == {PROCESS: {"refused": 2}}
    assert [line["offset_ns"] for line in journal.clock_lines] == [2]
    journal.close()


def line_of(document: object) -> bytes:
    """Return a line as a journal of any version holds it."""
    body = json.dumps(document, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def test_a_journal_of_the_first_release_is_read_as_it_was_meant(tmp_path: Path) -> None:
    # GIVEN the golden one, which says no version
    path = tmp_path / "journal"
    path.write_bytes((GOLDEN / "journal-v1").read_bytes())

    journal = Journal(path)

    assert journal.num_damaged == 0
    assert journal.end_rows("run") == {7: 4, 8: 12}
    assert journal.unanswered("run") == (key(4, 9, segment=7),)
    assert journal.dropped("run") == {PROCESS: {"refused": 3, "agent-spool-full": 12}}
    assert [line["offset_ns"] for line in journal.clock_lines] == [-5]
    journal.close()


def test_a_fresh_journal_says_its_version_first(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.note_cuts([span_cut("run", 0, 4)])
    journal.close()

    first, _ = (tmp_path / "journal").read_bytes().splitlines(keepends=True)
    assert first == line_of({"journal": 1})


def test_a_journal_of_a_newer_agent_is_refused_with_both_versions_and_left(tmp_path: Path) -> None:
    # GIVEN lines that today's agent would not understand, one of them of another form
    path = tmp_path / "journal"
    newer = line_of({"journal": 2}) + line_of({"cut": {"new": 1}}) + b"another form\n"
    path.write_bytes(newer)

    with pytest.raises(JournalVersionError, match="has version 2, this rankscope knows 1: upgrade"):
        Journal(path)

    assert path.read_bytes() == newer


def test_a_file_that_nobody_may_write_is_told_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()

    with pytest.raises(JournalError, match="journal can't be opened"):
        Journal(tmp_path / "journal")


def test_every_note_is_synced_before_it_counts(tmp_path: Path) -> None:
    disk = ForgetfulDisk()
    journal = Journal(tmp_path / "journal", storage=disk)
    journal.note_cuts([span_cut("run", 0, 4)])
    journal.note_settled([key(0, 4)])

    assert disk.num_syncs == 2
    journal.close()


def test_an_unsound_file_refuses_more(tmp_path: Path) -> None:
    file = JournalFile(tmp_path / "journal", storage=SmallDisk(3))
    with pytest.raises(OSError, match="No space"):
        file.append([{"run": "x"}], durable=True)
    with pytest.raises(OSError, match="earlier write failed"):
        file.append([{"run": "x"}], durable=True)
    file.close()
