from __future__ import annotations

import numpy as np

from rankscope.collector.spool.records import RECORD
from rankscope.tracer.spool import COMM, CORE, MICROBATCH, RECORD_BYTES, STEP


def fields_of(record: bytes, *names: str) -> list[float]:
    (row,) = np.frombuffer(record, dtype=RECORD)
    return [row[name].item() for name in names]


def test_the_numpy_view_of_a_record_is_the_spools_core() -> None:
    core = CORE.pack(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13)

    assert fields_of(
        core + bytes(64),
        "type", "kind", "flags", "name", "step", "microbatch", "chunk", "track",
        "start_ns", "end_ns", "depth", "commit", "launch_ns",
    ) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]  # fmt: skip
    assert RECORD.itemsize == RECORD_BYTES


def test_the_numpy_view_of_each_second_half_is_the_spools() -> None:
    core = bytes(CORE.size)

    comm = core + COMM.pack(2**64 - 1, -2, -3, -4, 5, -6)
    assert fields_of(
        comm, "group_id", "seq", "src_rank", "dst_rank", "num_bytes", "interval_id"
    ) == [2**64 - 1, -2, -3, -4, 5, -6]
    step = core + STEP.pack(7, 0.5, 9, 2**32 - 1, 10, 11)
    assert fields_of(
        step, "num_tokens", "loss", "peak_memory_bytes", "left_out", "peak_reserved_bytes",
        "num_alloc_retries",
    ) == [7, 0.5, 9, 2**32 - 1, 10, 11]  # fmt: skip
    microbatch = core + MICROBATCH.pack(7, 8, 9, 10)
    assert fields_of(
        microbatch, "num_tokens", "sum_squared_lengths", "sum_windowed_lengths", "num_elements"
    ) == [7, 8, 9, 10]  # fmt: skip
