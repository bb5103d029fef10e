"""A spool with one wrong byte, at every position that has a meaning (fault B11)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.collector.spool.tail import SpoolTail
from rankscope.tracer.spool import (
    HEADER_BYTES,
    PROCESS_FILE,
    RECORD_BYTES,
    SEALED,
    SEALED_OFFSET,
    name_slot_offset,
)
from tests.support.collector.kept_cuts import KeptCuts
from tests.support.collector.spool_builder import SpoolBuilder

if TYPE_CHECKING:
    from pathlib import Path


NUM_ROWS = 3
HEADER_PLACES = range(SEALED_OFFSET + SEALED.size)
"""Process of the segment, and whether its lane has a later one."""

Seen = tuple[int, str, int, int]


class OwnedCuts(KeptCuts):
    """A sink that records the owners of rows."""

    def owners(self) -> set[tuple[str, int, int]]:
        """Return the owners of the rows: run, epoch and rank."""
        return {(cut.key.run_id, cut.key.epoch, cut.key.rank) for cut in self.cuts}

    def seen(self) -> set[Seen]:
        """Return (row, name, step, duration) of each span."""
        rows = [row for cut in self.cuts for row in cut.rows.spans.to_pylist()]
        return {(row["row"], row["name"], row["step"], row["duration_ns"]) for row in rows}

    def num_accounted(self) -> int:
        """Return the number of rows that were stored, rejected, or counted as torn."""
        return sum(
            cut.num_torn
            + sum(
                table.num_rows
                for table in (
                    cut.rows.spans, cut.rows.steps, cut.rows.microbatches, cut.rows.bad_rows
                )
            )
            for cut in self.cuts
        )  # fmt: skip


@pytest.fixture
def builder(tmp_path: Path) -> SpoolBuilder:
    made = SpoolBuilder(tmp_path, run_id="run", capacity=NUM_ROWS)
    for step, name in enumerate("abc"):
        made.span(name, step=step, start_ns=100 * step, duration_ns=10 + step)
    made.end()
    return made


OWNER = ("run", 0, 0)
WHOLE = {(0, "a", 0, 10), (1, "b", 1, 11), (2, "c", 2, 12)}


def read(spool: Path) -> tuple[OwnedCuts, tuple[str, ...]]:
    """Read a spool as an agent does, twice, and return rows and log lines."""
    sink = OwnedCuts()
    tail = SpoolTail(spool, sink)
    problems = tail.poll().problems + tail.poll().problems
    tail.close()
    return sink, problems


def test_an_undamaged_spool_is_read_completely(builder: SpoolBuilder, tmp_path: Path) -> None:
    sink, problems = read(tmp_path)

    assert sink.seen() == WHOLE
    assert (sink.num_accounted(), problems) == (NUM_ROWS, ())


@pytest.mark.slow
@pytest.mark.parametrize("flip", [0xFF, 0x01])
def test_a_wrong_byte_in_a_record_loses_only_that_record_and_is_counted(
    builder: SpoolBuilder, tmp_path: Path, flip: int
) -> None:
    whole = builder.segment.read_bytes()
    for place in range(HEADER_BYTES, HEADER_BYTES + NUM_ROWS * RECORD_BYTES):
        broken = bytearray(whole)
        broken[place] ^= flip
        builder.segment.write_bytes(broken)

        sink, _ = read(tmp_path)

        row = (place - HEADER_BYTES) // RECORD_BYTES
        others = {span for span in WHOLE if span[0] != row}
        assert others <= sink.seen(), place
        assert sink.num_accounted() == NUM_ROWS, place


@pytest.mark.parametrize("content", [b"", b"\0" * 5000, b"x" * 4096, b"\xff" * 9000])
def test_a_segment_of_other_content_is_reported_and_its_neighbour_read(
    builder: SpoolBuilder, tmp_path: Path, content: bytes
) -> None:
    other = SpoolBuilder(tmp_path, run_id="run", rank=1)
    other.span("fine")
    other.end()
    builder.segment.write_bytes(content)

    sink, _ = read(tmp_path)

    assert {name for _, name, _, _ in sink.seen()} == {"fine"}


@pytest.mark.slow
def test_a_wrong_byte_in_a_segment_header_changes_no_row_and_is_reported_if_rows_are_lost(
    builder: SpoolBuilder, tmp_path: Path
) -> None:
    whole = builder.segment.read_bytes()
    num_problems = 0
    for place in HEADER_PLACES:
        broken = bytearray(whole)
        broken[place] ^= 0xFF
        builder.segment.write_bytes(broken)

        sink, problems = read(tmp_path)

        assert sink.seen() == (set() if problems else WHOLE), place
        assert sink.owners() <= {OWNER}, place
        num_problems += len(problems)
    assert num_problems >= 40  # magic word, version, both sizes, run, epoch, rank and process


@pytest.mark.slow
def test_a_wrong_byte_in_a_process_header_or_names_loses_no_row_without_a_report(
    builder: SpoolBuilder, tmp_path: Path
) -> None:
    path = builder.folder / PROCESS_FILE
    whole = path.read_bytes()
    names = [name_slot_offset(number) + at for number in range(4) for at in range(8)]
    for place in [*HEADER_PLACES, *names]:
        broken = bytearray(whole)
        broken[place] ^= 0xFF
        path.write_bytes(broken)

        sink, problems = read(tmp_path)

        assert sink.num_accounted() == (0 if problems else NUM_ROWS), place
        assert sink.owners() <= {OWNER}, place
        # A name may differ; row, step and duration do not.
        assert {(row, step) for row, _, step, _ in sink.seen()} <= {(0, 0), (1, 1), (2, 2)}
