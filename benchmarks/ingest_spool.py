"""Spools for the ingest benchmarks: full segments of communication spans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.collector.spool.records import RECORD
from rankscope.tracer.span import KIND_CODES, NONE, SpanKind
from rankscope.tracer.spool import HAS_COMM, HEADER_BYTES, RECORD_BYTES, RecordType
from tests.support.collector.spool_builder import SpoolBuilder

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

NUM_NAMES = 64
SEGMENT_ROWS = 65_536
STEP_SPANS = 2_000
"""Spans of one rank in one step."""


def write_spool(spool_dir: Path, *, run_id: str, num_ranks: int, num_rows: int) -> None:
    """Write ``num_rows`` records for each rank."""
    for rank in range(num_ranks):
        spool = SpoolBuilder(
            spool_dir, run_id=run_id, rank=rank, world_size=num_ranks, capacity=SEGMENT_ROWS
        )
        name_ids = [spool.name(f"operation-{number}") for number in range(NUM_NAMES)]
        for first in range(0, num_rows, SEGMENT_ROWS):
            if first:
                spool.new_segment()
            count = min(SEGMENT_ROWS, num_rows - first)
            _fill(spool, np.arange(first, first + count), np.array(name_ids))
            spool.next_row = count
            spool.seal()
        spool.end()


def _fill(spool: SpoolBuilder, number: NDArray[Any], name_ids: NDArray[Any]) -> None:
    random = np.random.default_rng(number[0])
    records = np.zeros(len(number), dtype=RECORD)
    records["type"] = RecordType.SPAN
    records["kind"] = KIND_CODES[SpanKind.TP_COMM]
    records["flags"] = HAS_COMM | 16
    records["name"] = name_ids[number % NUM_NAMES]
    records["start_ns"] = number * 10_000 + random.integers(0, 5_000, len(number))
    records["end_ns"] = records["start_ns"] + random.integers(1_000, 9_000, len(number))
    records["step"] = number // STEP_SPANS
    records["microbatch"] = number % 8
    records["chunk"] = NONE
    records["track"] = name_ids[0]
    records["launch_ns"] = records["start_ns"] - 500
    records["group_id"] = 0xABCDEF0123 + number % 4
    records["seq"] = number
    records["src_rank"] = records["dst_rank"] = NONE
    records["num_bytes"] = 1 << 20
    records["interval_id"] = NONE
    records["commit"] = HEADER_BYTES + np.arange(len(number)) * RECORD_BYTES
    with spool.segment.open("r+b") as file:
        file.seek(HEADER_BYTES)
        file.write(records.tobytes())
