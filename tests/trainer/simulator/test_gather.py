from __future__ import annotations

from rankscope.trainer.simulator.scenario import Network
from tests.support.trainer.recorded import MS, exact, record


def test_a_forward_waits_for_each_piece_of_its_parameters_where_it_needs_it() -> None:
    # Two ranks, 4 pieces of 8 MB, half of each over 1 GB/s: 4 ms a piece, one behind the other.
    network = Network(host_bytes_per_s=1e9, host_latency_ns=0)
    recorded = record(
        exact(
            pp=1, dp=2, num_microbatches=2, num_steps=1, prefetch=True, network=network,
            gradient_bytes=32 * MS, forward_ms=10.0,
        )
    )  # fmt: skip

    mine = recorded.spans.where(rank=0)
    begin = mine["start_ns"].min()
    waits = mine.where(name="wait all_gather_into_tensor")
    at = ((waits["start_ns"] - begin) / MS).tolist(), ((waits.end_ns - begin) / MS).tolist()
    # A quarter of the forward is 2.5 ms, less than a piece takes to come.
    assert at == ([0.0, 6.5, 10.5, 14.5], [4.0, 8.0, 12.0, 16.0])
    forward = mine.where(kind="forward")
    assert sorted((forward["duration_ns"] / MS).tolist()) == [10.0, 18.5]
    assert len(mine.where(name="all_gather_into_tensor")) == 4
