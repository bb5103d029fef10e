"""Line files that a training process fills: each poll takes a bounded portion."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.read.runs import read_events
from rankscope.collector.spool.process import (
    FILE_BYTES,
    MAX_LINE_BYTES,
    POLL_BYTES,
    ROW_BYTES,
    JsonLines,
    LineBudget,
)
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.writer import StoreWriter
from tests.support.collector.spool_builder import SpoolBuilder

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.collector.store.store import Store

pytestmark = pytest.mark.slow

NOTE = '{"at_ns": 1, "kind": "note", "text": "%s", "data": {}}\n'
LINES_A_POLL = FILE_BYTES // ROW_BYTES


def read_all(lines: JsonLines) -> list[tuple[int, object]]:
    found: list[tuple[int, object]] = []
    while True:
        found += lines.read()
        if not lines.has_more:
            return found


def test_a_huge_file_is_read_in_portions_and_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("".join(f"[{number}]\n{{}}\n" for number in range(20_000)))
    lines, sizes = JsonLines(path), []

    found = lines.read()
    while lines.has_more:
        portion = lines.read()
        sizes.append(len(portion))
        found += portion

    assert max(sizes) <= LINES_A_POLL
    assert found == [(number, {}) for number in range(1, 40_000, 2)]


def test_a_line_of_any_length_is_skipped_counted_and_has_one_number(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    longest = json.dumps({"a": "x" * (MAX_LINE_BYTES - 9)})
    assert len(longest) == MAX_LINE_BYTES
    too_long = ["x" * (MAX_LINE_BYTES + 1), '{"a": "' + "x" * 5 * MAX_LINE_BYTES + '"}']
    texts = ['{"n": 0}', *too_long, '{"n": 3}', longest, '{"n": 5}', too_long[1]]
    path.write_text("\n".join(texts))  # the last one has no end yet

    lines = JsonLines(path)
    found = read_all(lines)

    assert [number for number, _ in found] == [0, 3, 4, 5]
    assert lines.num_skipped == 3
    with path.open("a") as file:
        file.write('\n{"n": 7}\n')
    assert read_all(lines) == [(7, {"n": 7})]
    assert lines.num_skipped == 3


def test_a_poll_takes_no_more_of_all_files_than_its_budget(tmp_path: Path) -> None:
    budget, num_files = LineBudget(), 3 * POLL_BYTES // FILE_BYTES
    num_lines = 0
    for number in range(num_files):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("{}\n" * 1_000)
        num_lines += len(JsonLines(path).read(budget))

    assert num_lines * ROW_BYTES < POLL_BYTES + FILE_BYTES + ROW_BYTES


def test_a_process_with_a_huge_file_delays_no_other_and_ends_when_all_is_stored(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    # GIVEN many processes with a long file, and one with one line, all of which have ended
    builders = [SpoolBuilder(tmp_path, run_id=run_id, rank=rank) for rank in range(4)]
    num_lines = 2 * LINES_A_POLL
    for builder in builders[:3]:
        (builder.folder / "events.jsonl").write_text(NOTE % "much" * num_lines)
    (builders[3].folder / "events.jsonl").write_text(NOTE % "little")
    for builder in builders:
        builder.end()
    tail = SpoolTail(tmp_path, StoreWriter(store))

    # WHEN the spool is polled once
    progress = tail.poll()

    # THEN the short file is stored, and the others are not at their end
    events = read_events(store, run_id)
    assert [event["rank"] for event in events if event["text"] == "little"] == [3]
    assert sum(event["text"] == "much" for event in events) < 3 * num_lines
    assert progress.num_running == 3

    while tail.poll().num_running:
        pass
    texts = [event["text"] for event in read_events(store, run_id)]
    assert texts.count("much") == 3 * num_lines


def test_files_wait_for_their_turn_but_not_forever(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    # GIVEN more full files than one poll takes, before a short one
    num_full = 2 * POLL_BYTES // FILE_BYTES
    for rank in range(num_full):
        builder = SpoolBuilder(tmp_path, run_id=run_id, rank=rank, world_size=num_full + 1)
        (builder.folder / "events.jsonl").write_text(NOTE % "much" * 3 * LINES_A_POLL)
    last = SpoolBuilder(tmp_path, run_id=run_id, rank=num_full, world_size=num_full + 1)
    (last.folder / "events.jsonl").write_text(NOTE % "little")
    tail = SpoolTail(tmp_path, StoreWriter(store))

    for _ in range(4):
        tail.poll()

    assert "little" in {event["text"] for event in read_events(store, run_id)}


def test_skipped_lines_are_reported(store: Store, run_id: str, tmp_path: Path) -> None:
    builder = SpoolBuilder(tmp_path, run_id=run_id)
    line = "x" * (MAX_LINE_BYTES + 1) + "\n"
    (builder.folder / "events.jsonl").write_text(line * 3)
    tail = SpoolTail(tmp_path, StoreWriter(store))

    (first,) = tail.poll().problems
    builder.end()
    problems = [problem for _ in range(6) for problem in tail.poll().problems]

    assert "1 lines are longer" in first
    assert ["3 lines are longer" in problem for problem in problems] == [True]
