"""Spool -> queryable spans, as a ratio to a bare `insert_arrow` of the same rows.

    python -m benchmarks.ingest [--ranks 8] [--rows 131072]

Writes one spool a rank (segments full of communication spans, 64 names), follows
it into a fresh embedded store, then inserts the very same Arrow table into an
empty copy of the table by one bare `insert_arrow`. Both include ClickHouse's
fsync. Files are freshly written, so they come from the page cache.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from collector.records import RECORD
from collector.store import open_store
from collector.tail import SpoolTail
from tests.collector.spool_builder import SpoolBuilder
from tracer.span import KIND_CODES, SpanKind
from tracer.spool import HAS_COMM, HEADER_BYTES, RECORD_BYTES, RecordType

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

NUM_NAMES = 64
SEGMENT_ROWS = 65_536

READ_BACK = "SELECT * FROM spans ORDER BY run_id, epoch, step, rank, start_ns, segment, row"
COUNT = "SELECT count() AS num_spans FROM spans"
COPY_TABLE = "CREATE TABLE bare AS spans"


def write_spool(spool_dir: Path, *, num_ranks: int, num_rows: int) -> None:
    """Write ``num_rows`` records for each rank."""
    for rank in range(num_ranks):
        spool = SpoolBuilder(
            spool_dir, run_id="bench", rank=rank, world_size=num_ranks, capacity=SEGMENT_ROWS
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
    records["duration_ns"] = random.integers(1_000, 9_000, len(number))
    records["step"] = number // 2_000
    records["microbatch"] = number % 8
    records["track"] = name_ids[0]
    records["launch_ns"] = records["start_ns"] - 500
    records["group_id"] = 0xABCDEF0123 + number % 4
    records["seq"] = number
    records["src_rank"] = records["dst_rank"] = -1
    records["num_bytes"] = 1 << 20
    records["commit"] = np.arange(len(number)) + 1
    with spool.segment.open("r+b") as file:
        file.seek(HEADER_BYTES)
        file.write(records.tobytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of wall time and of CPU time, all threads of the process together."""

    wall_s: float
    cpu_s: float


def measure(folder: Path, *, num_ranks: int, num_rows: int) -> tuple[Cost, Cost]:
    """Return the cost of the whole path and of the bare insert."""
    write_spool(folder / "spool", num_ranks=num_ranks, num_rows=num_rows)
    num_spans = num_ranks * num_rows
    with open_store(f"chdb://{folder / 'store'}") as store:
        tail = SpoolTail(folder / "spool", store)
        whole = cost_of(tail.poll)
        if store.rows(COUNT)[0]["num_spans"] != num_spans:
            raise RuntimeError(f"stored {store.rows(COUNT)[0]} instead of {num_spans} spans")
        table = store.arrow(READ_BACK).unify_dictionaries()
        store.command(COPY_TABLE)
        return whole, cost_of(lambda: store.insert_arrow("bare", table))


def cost_of(work: Callable[[], object]) -> Cost:
    """Run ``work`` once."""
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    work()
    return Cost(wall_s=time.perf_counter() - begin_s, cpu_s=time.process_time() - begin_cpu_s)


def main() -> None:
    """Print both rates and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rows", type=int, default=131_072, help="records a rank")
    options = parser.parse_args()
    num_spans = options.ranks * options.rows
    with tempfile.TemporaryDirectory() as folder:
        whole, bare = measure(Path(folder), num_ranks=options.ranks, num_rows=options.rows)
    print(
        f"{num_spans} spans of {RECORD_BYTES} bytes:"
        f" spool to queryable {num_spans / whole.wall_s / 1e3:.0f}k spans/s,"
        f" bare insert {num_spans / bare.wall_s / 1e3:.0f}k spans/s;"
        f" ratio {bare.wall_s / whole.wall_s:.2f} of wall time,"
        f" {bare.cpu_s / whole.cpu_s:.2f} of CPU time"
    )


if __name__ == "__main__":
    main()
