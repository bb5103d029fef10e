from __future__ import annotations

import json
import shutil
import sqlite3
import zlib
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.agent.errors import JournalError, JournalVersionError
from rankscope.collector.agent.journal import MAX_ENTRIES, Journal
from rankscope.collector.spool.cut import CutKey
from tests.support.collector.agent_rig import faulty
from tests.support.collector.cut_builder import PROCESS, SEGMENT, span_cut
from tests.support.paths import GOLDEN

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PAGE_BYTES = 4096
LARGEST_SEGMENT = (1 << 64) - 1


def key(first_row: int, end_row: int, *, segment: int = SEGMENT) -> CutKey:
    return CutKey(
        run_id="run", epoch=0, rank=0, process=PROCESS, segment=segment, first_row=first_row,
        end_row=end_row,
    )  # fmt: skip


def line_of(document: object) -> bytes:
    """Return a line as a journal of version 1 has it."""
    body = json.dumps(document, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def kept_in(connections: list[sqlite3.Connection]) -> Callable[..., sqlite3.Connection]:
    """Return what opens a database and adds the connection to a list."""

    def connect(path: Path, *, timeout: float, check_same_thread: bool) -> sqlite3.Connection:
        connections.append(
            sqlite3.connect(path, timeout=timeout, check_same_thread=check_same_thread)
        )
        return connections[-1]

    return connect


def reopened(journal: Journal) -> Journal:
    journal.close()
    return Journal(journal.path.parent)


def test_a_cut_is_unanswered_until_it_is_settled(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.add_sent([span_cut("run", 0, 4), span_cut("run", 4, 9)])
    assert not journal.is_settled(key(0, 4))

    journal.settle([key(0, 4)])
    journal = reopened(journal)

    assert journal.unanswered("run") == (key(4, 9),)
    assert journal.end_rows("run") == {SEGMENT: 4}
    assert journal.is_settled(key(0, 4))
    assert not journal.is_settled(key(4, 9))
    journal.close()


def test_a_settled_cut_never_moves_the_end_of_its_segment_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.settle([key(4, 9), key(0, 4)])

    assert journal.end_rows("run") == {SEGMENT: 9}
    journal.close()


def test_a_segment_may_be_any_unsigned_64_bit_number(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.add_sent([span_cut("run", 0, 4, segment=LARGEST_SEGMENT)])
    assert journal.unanswered("run") == (key(0, 4, segment=LARGEST_SEGMENT),)

    journal.settle([key(0, 4, segment=LARGEST_SEGMENT)])

    assert journal.end_rows("run") == {LARGEST_SEGMENT: 4}
    journal.close()


def test_dropped_rows_are_counted_across_restarts(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.drop({key(0, 4): 3}, reason="refused")
    journal = reopened(journal)
    dropped = journal.dropped("run")
    journal.drop({key(4, 9): 5}, reason="refused")

    assert dropped == {PROCESS: {"refused": 8}}
    journal = reopened(journal)
    assert journal.dropped("run") == {PROCESS: {"refused": 8}}
    assert journal.end_rows("run") == {SEGMENT: 9}
    journal.close()


def test_a_power_cut_at_any_byte_of_the_last_change_loses_that_change_alone(tmp_path: Path) -> None:
    # GIVEN a journal that is not closed: its last change is in the write-ahead log
    folder = tmp_path / "running"
    folder.mkdir()
    journal = Journal(folder)
    log = folder / "journal.db-wal"
    journal.add_sent([span_cut("run", 0, 4)])
    num_whole = log.stat().st_size
    journal.add_sent([span_cut("run", 4, 9)])
    num_bytes = log.stat().st_size

    # THEN a copy of which the log is cut short holds the first change
    for length in range(num_whole, num_bytes, 997):
        copy = tmp_path / str(length)
        shutil.copytree(folder, copy)
        with (copy / log.name).open("r+b") as file:
            file.truncate(length)
        cut_short = Journal(copy)
        assert cut_short.unanswered("run") == (key(0, 4),)
        assert cut_short.damaged is None
        cut_short.close()
    journal.close()


def test_a_change_is_synced_before_its_method_returns(tmp_path: Path) -> None:
    connections: list[sqlite3.Connection] = []
    journal = Journal(tmp_path, connect=kept_in(connections))

    (connection,) = connections
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
    journal.close()


def test_a_change_that_fails_is_not_there_and_may_be_made_again(tmp_path: Path) -> None:
    is_failing = False

    def fail() -> None:
        if is_failing:
            raise sqlite3.OperationalError("disk I/O error")

    journal = Journal(tmp_path, connect=faulty(fail))
    journal.add_sent([span_cut("run", 0, 4)])
    is_failing = True
    with pytest.raises(JournalError, match="can't be written \\(disk I/O error\\)"):
        journal.add_sent([span_cut("run", 4, 9)])
    with pytest.raises(JournalError):
        journal.drop({key(0, 4): 4}, reason="refused")
    assert journal.unanswered("run") == (key(0, 4),)
    assert journal.dropped("run") == {}

    is_failing = False
    journal.add_sent([span_cut("run", 4, 10)])
    journal = reopened(journal)

    assert journal.unanswered("run") == (key(0, 4), key(4, 10))
    journal.close()


@pytest.mark.slow
def test_a_full_database_refuses_changes_until_there_is_room(tmp_path: Path) -> None:
    connections: list[sqlite3.Connection] = []
    journal = Journal(tmp_path, connect=kept_in(connections))
    journal.add_sent([span_cut("run", 0, 1)])
    many = [span_cut("run", row, row + 1) for row in range(1, 500)]
    (connection,) = connections
    connection.execute("PRAGMA max_page_count = 16")
    with pytest.raises(JournalError, match="database or disk is full"):
        journal.add_sent(many)
    assert journal.unanswered("run") == (key(0, 1),)

    connection.execute("PRAGMA max_page_count = 1000")
    journal.add_sent(many)

    journal = reopened(journal)
    assert len(journal.unanswered("run")) == 500
    journal.close()


def test_a_damaged_database_is_moved_away(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.add_sent([span_cut("run", 0, 4)])
    journal.close()
    damaged = bytearray(journal.path.read_bytes())
    damaged[PAGE_BYTES : PAGE_BYTES + 64] = bytes(64)
    journal.path.write_bytes(damaged)

    journal = Journal(tmp_path)

    assert journal.unanswered("run") == ()
    assert journal.damaged is not None
    assert journal.damaged.read_bytes() == damaged
    journal.add_sent([span_cut("run", 4, 9)])
    journal = reopened(journal)
    assert journal.unanswered("run") == (key(4, 9),)
    assert journal.damaged is None
    journal.close()


@pytest.mark.slow
def test_the_oldest_segments_are_forgotten_beyond_the_bound(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.settle([key(0, 1, segment=segment) for segment in range(MAX_ENTRIES)])
    journal.settle([key(0, 2, segment=MAX_ENTRIES)])

    found = journal.end_rows("run")

    assert len(found) == MAX_ENTRIES
    assert 0 not in found
    assert found[MAX_ENTRIES] == 2
    journal.close()


def test_a_journal_of_version_1_is_taken_over(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "journal-v1", tmp_path / "journal")

    journal = Journal(tmp_path)
    for _ in range(2):
        assert journal.num_damaged == 0
        assert journal.end_rows("run") == {7: 4, 8: 12}
        assert journal.unanswered("run") == (key(4, 9, segment=7),)
        assert journal.dropped("run") == {PROCESS: {"refused": 3, "agent-spool-full": 12}}
        assert [row["offset_ns"] for row in journal.clock_rows()] == [-5]
        journal = reopened(journal)
    journal.close()


def test_a_kill_at_any_moment_of_the_takeover_loses_nothing(tmp_path: Path) -> None:
    class KilledError(BaseException):
        pass

    num_calls = 0

    def kill() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == point:
            raise KilledError

    for point in (1, 2):
        folder, num_calls = tmp_path / str(point), 0
        folder.mkdir()
        shutil.copy(GOLDEN / "journal-v1", folder / "journal")
        with pytest.raises(KilledError):
            Journal(folder, connect=faulty(kill))

        journal = Journal(folder)

        assert journal.unanswered("run") == (key(4, 9, segment=7),)
        assert journal.dropped("run") == {PROCESS: {"refused": 3, "agent-spool-full": 12}}
        journal.close()


def test_damaged_lines_of_version_1_are_counted_and_torn_ones_are_not(tmp_path: Path) -> None:
    lines = (GOLDEN / "journal-v1").read_bytes().splitlines(keepends=True)
    flipped = bytearray(lines[0])
    flipped[30] ^= 1
    torn = bytes(4096) + b"\n" + lines[1][:50]
    (tmp_path / "journal").write_bytes(bytes(flipped) + b"".join(lines[1:]) + torn)

    journal = Journal(tmp_path)

    assert journal.num_damaged == 1
    assert journal.clock_rows() == []
    assert journal.unanswered("run") == (key(4, 9, segment=7),)
    journal.close()


def test_an_agent_of_version_1_finds_a_version_that_it_refuses(tmp_path: Path) -> None:
    Journal(tmp_path).close()

    assert (tmp_path / "journal").read_bytes() == line_of({"journal": 2})


def test_a_journal_of_a_newer_agent_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    newer = line_of({"journal": 3}) + line_of({"cut": {"new": 1}}) + b"another form\n"
    (tmp_path / "journal").write_bytes(newer)

    with pytest.raises(JournalVersionError, match="has version 3, this rankscope knows 2: upgrade"):
        Journal(tmp_path)

    assert (tmp_path / "journal").read_bytes() == newer


def test_a_database_of_a_newer_agent_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path).close()
    with sqlite3.connect(tmp_path / "journal.db") as database:
        database.execute("PRAGMA user_version = 3")
    database.close()

    with pytest.raises(JournalVersionError, match=r"journal.db has version 3"):
        Journal(tmp_path)


def test_a_path_that_is_no_file_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "journal.db").mkdir()

    with pytest.raises(JournalError, match=r"journal.db can't be opened"):
        Journal(tmp_path)
