"""Times of small jobs without noise, with expected values from arithmetic."""

from __future__ import annotations

import pytest

from rankscope.tracer.span import SpanFlag
from rankscope.trainer.simulator.scenario import Network, Sends, TpDetail
from tests.support.trainer.recorded import MS, exact, record


@pytest.mark.parametrize(
    ("pp", "num_microbatches", "expected_ms"),
    [(1, 4, 4 * 30 + 5), (2, 4, 5 * 30 + 5), (2, 8, 9 * 30 + 5), (4, 8, 11 * 30 + 5)],
)
@pytest.mark.parametrize("sends", Sends)
def test_a_pipeline_takes_its_micro_batches_and_its_bubble(
    pp: int, num_microbatches: int, expected_ms: float, sends: Sends
) -> None:
    recorded = record(
        exact(pp=pp, dp=2, num_microbatches=num_microbatches, num_steps=2, sends=sends)
    )

    assert recorded.step_ms(0) == expected_ms
    assert recorded.step_ms(1) == expected_ms


@pytest.mark.parametrize(("vpp", "bubble_ms"), [(1, 90.0), (2, 45.0), (3, 30.0)])
def test_interleaving_divides_the_bubble_by_the_chunks(vpp: int, bubble_ms: float) -> None:
    recorded = record(exact(pp=4, dp=1, vpp=vpp, num_microbatches=8, num_steps=1))

    assert recorded.step_ms(0) == pytest.approx(8 * 30 + bubble_ms + 5, abs=0.001)


def test_a_slow_rank_delays_the_step_by_its_own_excess() -> None:
    slow = exact("slow-compute:rank=1,factor=1.5", pp=1, dp=4, num_microbatches=4, num_steps=1)

    recorded = record(slow)

    assert recorded.step_ms(0) == 1.5 * (4 * 30 + 5)
    waits = recorded.spans.where(kind="wait", name="wait reduce_scatter_tensor")
    assert dict(zip(waits["rank"].tolist(), (waits["duration_ns"] / MS).tolist(), strict=True)) == {
        0: 60.0, 1: 0.0, 2: 60.0, 3: 60.0,
    }  # fmt: skip


def test_a_slow_last_stage_sets_the_pace_of_the_pipeline() -> None:
    heavy = exact("stage-imbalance:stage=1,factor=2", pp=2, dp=1, num_microbatches=4, num_steps=1)

    # The last stage begins 10 ms late, computes 4 x 60 ms; the first ends 20 ms after it. The
    # optimizer of the slow stage takes twice as long, too.
    recorded = record(heavy)

    assert recorded.spans.where(kind="optimizer")["start_ns"].min() == (
        recorded.steps["start_ns"].min() + 270 * MS
    )
    assert recorded.step_ms(0) == 270 + 10


def test_a_receive_ends_a_transfer_after_the_send() -> None:
    network = Network(
        host_bytes_per_s=1e9, host_latency_ns=500_000, rack_latency_ns=0, spine_latency_ns=0
    )
    recorded = record(
        exact(pp=2, dp=1, num_microbatches=1, num_steps=1, activation_bytes=MS, network=network)
    )

    # 10 ms forward, 1.5 ms on the link, 30 ms on the last stage, 1.5 ms back, 20 ms backward.
    back, receive = recorded.spans.where(kind="pp-recv").end_ns
    begin = recorded.steps["start_ns"].min()
    assert (back - begin, receive - begin) == (43 * MS, 11.5 * MS)
    # The norm's all-reduce crosses the link twice: 1 ms of latency and 4 bytes.
    assert recorded.step_ms(0) == pytest.approx(63 + 1 + 5, abs=0.001)


def test_a_blocking_send_waits_for_its_receiver() -> None:
    heavy = exact(
        "stage-imbalance:stage=1,factor=3",
        pp=2, dp=1, num_microbatches=3, num_steps=1, sends=Sends.BLOCKING,
    )  # fmt: skip

    spans = record(heavy).spans.where(rank=0)
    sends, receives = spans.where(kind="pp-send"), spans.where(kind="pp-recv")

    # Stage 1 computes 30 ms forward and 60 backward, from 10 ms on. The second forward's output
    # is taken at 100 ms, when the first gradient is sent; the third's 90 ms later.
    assert (sends["duration_ns"] / MS).tolist() == [0.0, 80.0, 60.0]
    assert sends["interval_id"].tolist() == [0, *receives["interval_id"].tolist()[:2]]
    assert len(set(sends["interval_id"].tolist())) == 3
    assert (sends["flags"] & int(SpanFlag.COALESCED) > 0).tolist() == [False, True, True]


def test_partners_end_a_collapsed_forward_together() -> None:
    slow = exact("slow-compute:rank=0,factor=2", pp=1, dp=1, tp=2, num_microbatches=1, num_steps=1)

    forwards = record(slow).spans.where(kind="forward")

    assert (forwards["duration_ns"] / MS).tolist() == [20.0, 20.0]


def test_partners_wait_inside_a_recorded_forward() -> None:
    slow = exact(
        "slow-compute:rank=0,factor=2",
        pp=1, dp=1, tp=2, num_microbatches=1, num_steps=1, num_layers=1, tp_detail=TpDetail.FULL,
    )  # fmt: skip

    spans = record(slow).spans.where(microbatch=0)
    waits = spans.where(kind="wait", rank=1)

    assert (spans.where(kind="forward")["duration_ns"] / MS).tolist() == [20.0, 20.0]
    # Rank 1 computes each half of a forward in 5 ms and waits 5 ms, of a backward 10 and 10.
    assert (waits["duration_ns"] / MS).tolist() == [5.0, 5.0, 10.0, 10.0]
    assert spans.where(kind="wait", rank=0)["duration_ns"].tolist() == [0, 0, 0, 0]


def test_overlapped_gradients_are_reduced_during_the_last_backward() -> None:
    network = Network(
        host_bytes_per_s=1e9, host_latency_ns=0, rack_latency_ns=0, spine_latency_ns=0
    )
    sizes = {"pp": 1, "dp": 2, "num_microbatches": 2, "num_steps": 1, "network": network}
    # Half of 16 MB at 1 GB/s: 8 ms to scatter, 8 ms to gather.
    launched = record(exact(**sizes, gradient_bytes=16 * MS))
    overlapped = record(exact(**sizes, gradient_bytes=16 * MS, overlap=True, num_buckets=4))

    assert launched.step_ms(0) == pytest.approx(60 + 8 + 5 + 8, abs=0.001)
    # Four buckets of 2 ms are launched 5 ms after each other: only the last one shows.
    assert overlapped.step_ms(0) == pytest.approx(60 + 2 + 5 + 8, abs=0.001)
    buckets = overlapped.spans.where(rank=0, name="reduce_scatter_tensor")
    begin = overlapped.steps["start_ns"].min()
    assert ((buckets["start_ns"] - begin) / MS).tolist() == [45.0, 50.0, 55.0, 60.0]


def test_a_ring_is_as_slow_as_its_slowest_link() -> None:
    network = Network(
        host_bytes_per_s=1e9, rack_bytes_per_s=1e9,
        host_latency_ns=0, rack_latency_ns=0, spine_latency_ns=0,
    )  # fmt: skip
    sizes = {"pp": 1, "dp": 4, "num_microbatches": 1, "num_steps": 1, "network": network}
    healthy = record(exact(**sizes, gradient_bytes=8 * MS))
    slow = record(exact("slow-link:src=1,dst=2,factor=3", **sizes, gradient_bytes=8 * MS))

    # 3/4 of 8 MB at 1 GB/s, twice a step.
    assert healthy.step_ms(0) == pytest.approx(30 + 6 + 5 + 6, abs=0.001)
    assert slow.step_ms(0) == pytest.approx(30 + 18 + 5 + 18, abs=0.001)


@pytest.mark.parametrize("detail", TpDetail)
def test_the_detail_of_recording_does_not_change_times(detail: TpDetail) -> None:
    network = Network(
        host_bytes_per_s=1e9, host_latency_ns=0, rack_latency_ns=0, spine_latency_ns=0
    )
    recorded = record(
        exact(
            pp=1, dp=1, tp=2, num_microbatches=2, num_layers=3, num_steps=1,
            tp_detail=detail, tp_bytes=MS, network=network,
        )
    )  # fmt: skip

    # An all-reduce of 1 MB between two ranks takes 1 ms; a layer has two, each way.
    assert recorded.step_ms(0) == pytest.approx(2 * (30 + 2 * 3 * 2 * 1) + 5, abs=0.001)


def test_a_forward_waits_for_each_bucket_of_its_parameters() -> None:
    # Two ranks, 4 pieces of 8 MB, half of each over 1 GB/s: 4 ms per bucket, one after the other.
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
    # A quarter of the forward is 2.5 ms, less than the transfer of a bucket.
    assert at == ([0.0, 6.5, 10.5, 14.5], [4.0, 8.0, 12.0, 16.0])
    forward = mine.where(kind="forward")
    assert sorted((forward["duration_ns"] / MS).tolist()) == [10.0, 18.5]
    assert len(mine.where(name="all_gather_into_tensor")) == 4
