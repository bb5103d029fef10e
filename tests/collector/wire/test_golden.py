"""Golden bodies of every released layout, each of which must stay readable.

A new layout adds a file and leaves the others unchanged.
"""

from __future__ import annotations

from rankscope.collector.ingest.screening import screen
from rankscope.collector.spool.cut import CutKey
from rankscope.collector.wire.codec import decode_batch
from rankscope.collector.wire.schema import OLDEST_VERSION, SCHEMA_VERSION
from tests.support.paths import GOLDEN


def test_there_is_a_golden_body_of_every_supported_layout() -> None:
    names = {path.name for path in GOLDEN.glob("spans-v*.arrow")}

    assert names == {
        f"spans-v{version}.arrow" for version in range(OLDEST_VERSION, SCHEMA_VERSION + 1)
    }


def test_the_first_layout_is_read_as_it_was_written() -> None:
    batch = screen(decode_batch((GOLDEN / "spans-v1.arrow").read_bytes()))

    process, began_ns = "ab" * 16, 17 * 10**17
    assert batch.keys == (
        CutKey(
            run_id="golden", epoch=0, rank=0, process=process, segment=7, first_row=0, end_row=7
        ),
        CutKey(
            run_id="golden",
            epoch=0,
            rank=1,
            process=process,
            segment=2**64 - 1,
            first_row=0,
            end_row=2,
        ),
    )
    assert batch.num_torn == (1, 0)
    first, second = batch.cut(0), batch.cut(1)
    assert first.rows.spans.select(["step", "name", "kind", "start_ns", "row"]).to_pylist() == [
        {"step": 4, "name": "forward", "kind": "forward", "start_ns": began_ns, "row": 0},
        {"step": 4, "name": "all-reduce", "kind": "forward", "start_ns": began_ns + 10, "row": 1},
        {"step": 5, "name": "ünïcödé", "kind": "forward", "start_ns": began_ns + 20, "row": 2},
    ]
    assert first.rows.steps.to_pylist() == [
        {
            "run_id": "golden", "epoch": 0, "rank": 0, "segment": 7, "step": 4, "start_ns": 10,
            "end_ns": 90, "num_tokens": 7, "loss": 0.5, "peak_memory_bytes": -1, "left_out": 3,
            "peak_reserved_bytes": -1, "num_alloc_retries": -1, "row": 3,
        }
    ]  # fmt: skip
    assert first.rows.microbatches.select(["microbatch", "sum_squared_lengths"]).to_pylist() == [
        {"microbatch": 1, "sum_squared_lengths": 49}
    ]
    assert first.rows.bad_rows.select(["row", "reason", "record"]).to_pylist() == [
        {"row": 5, "reason": "unknown kind", "record": "00ff"}
    ]
    assert second.rows.spans["segment"].to_pylist() == [2**64 - 1] * 2
