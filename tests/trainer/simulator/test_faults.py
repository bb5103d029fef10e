"""Each fault acts as its label says, and on nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.trainer.errors import ScenarioError
from rankscope.trainer.simulator.scenario import Network, RankOrder, TpDetail
from rankscope.trainer.simulator.simulation import simulate
from tests.support.trainer.recorded import MS, Recorded, exact, record

if TYPE_CHECKING:
    from numpy.typing import NDArray

LINKS = Network(
    host_bytes_per_s=1e9, rack_bytes_per_s=1e9, spine_bytes_per_s=1e9,
    host_latency_ns=0, rack_latency_ns=0, spine_latency_ns=0,
)  # fmt: skip


def compute_ms(recorded: Recorded, rank: int, step: int) -> float:
    """Return the own compute of a rank in a step."""
    rows = recorded.spans.where(rank=rank, step=step)
    return sum(
        float(rows.where(kind=kind)["duration_ns"].sum()) / MS
        for kind in ("forward", "backward", "optimizer")
    )


def test_slow_compute_acts_on_its_ranks_in_its_steps() -> None:
    recorded = record(exact("slow-compute:rank=1+2,factor=1.2,steps=1-2", dp=4, pp=1, num_steps=4))
    (label,) = recorded.simulation.labels

    table = [[compute_ms(recorded, rank, step) for rank in range(4)] for step in range(4)]

    assert table[0] == table[3] == [245.0] * 4
    assert table[1] == table[2] == [245.0, 294.0, 294.0, 245.0]
    assert (label.cause, label.ranks, label.steps, label.factor) == (
        "slow-compute", (1, 2), (1, 2), 1.2,
    )  # fmt: skip


def test_with_tp_collapsed_the_label_has_all_partners() -> None:
    settings = {"dp": 2, "pp": 1, "tp": 2, "num_steps": 1}
    hidden = simulate(exact("slow-compute:rank=3,factor=2", **settings))
    seen = simulate(exact("slow-compute:rank=3,factor=2", **settings, tp_detail=TpDetail.COARSE))

    assert (hidden.labels[0].ranks, hidden.labels[0].visible_ranks) == ((3,), (2, 3))
    assert (seen.labels[0].ranks, seen.labels[0].visible_ranks) == ((3,), (3,))


def test_a_throttled_clock_shows_in_the_samples_of_its_host_only() -> None:
    recorded = record(
        exact("clock-throttle:host=1,factor=2,steps=1", dp=4, pp=1, num_steps=2, ranks_per_host=2)
    )
    clock_hz = recorded.samples.where(name="gpu-clock-hz")
    throttled = recorded.samples.where(name="gpu-throttle-reasons", value=0x40)

    assert recorded.simulation.labels[0].ranks == (2, 3)
    assert compute_ms(recorded, 2, 1) == 2 * compute_ms(recorded, 1, 1)
    assert set(throttled["host"]) == {"sim-00001"}
    assert sorted(throttled["device"].tolist()) == [0, 1]
    assert set(throttled["at_ns"]) == {clock_hz["at_ns"].max()}
    hot = clock_hz.where(host="sim-00001", at_ns=clock_hz["at_ns"].max())["value"]
    cool = clock_hz.where(host="sim-00001", at_ns=clock_hz["at_ns"].min())["value"]
    assert (hot < 0.52 * cool).all()


def test_a_slow_adapter_slows_every_transfer_that_leaves_its_host() -> None:
    settings = {
        "dp": 1, "pp": 3, "num_microbatches": 1, "num_steps": 1, "ranks_per_host": 1,
        "network": LINKS, "activation_bytes": MS,
    }  # fmt: skip
    recorded = record(exact("slow-link:rank=0,factor=5", **settings))
    sends = recorded.spans.where(kind="pp-send")
    receives = recorded.spans.where(kind="pp-recv")

    transfer_ms = {
        (int(src), int(dst)): (end - start) / MS
        for src, dst, start, end in zip(
            sends["src_rank"], sends["dst_rank"], sends["start_ns"], sends.end_ns, strict=True
        )
    }

    assert transfer_ms == {(0, 1): 5.0, (1, 2): 1.0, (2, 1): 1.0, (1, 0): 5.0}
    assert sorted(receives.end_ns) == sorted(sends.end_ns)


def test_a_slow_uplink_slows_every_transfer_across_it() -> None:
    settings = {
        "dp": 1, "pp": 4, "num_microbatches": 1, "num_steps": 1, "network": LINKS,
        "activation_bytes": MS, "ranks_per_host": 1, "hosts_per_rack": 2,
    }  # fmt: skip
    recorded = record(exact("slow-link:rack=0,factor=3", **settings))
    receives = recorded.spans.where(kind="pp-recv")
    transfer_ms = (receives.end_ns - np.maximum(receives["start_ns"], _sent_ns(recorded))) / MS
    pairs = zip(receives["src_rank"].tolist(), receives["dst_rank"].tolist(), strict=True)

    assert dict(zip(pairs, transfer_ms.tolist(), strict=True)) == {
        (0, 1): 1.0, (1, 2): 3.0, (2, 3): 1.0, (3, 2): 1.0, (2, 1): 3.0, (1, 0): 1.0,
    }  # fmt: skip
    assert recorded.simulation.labels[0].ranks == (0, 1)


def test_an_unused_link_is_refused_with_the_used_ones() -> None:
    with pytest.raises(ScenarioError, match=r"rank 0 sends to and receives from 1, 3$"):
        simulate(exact("slow-link:src=0,dst=2,factor=2", dp=4, pp=1))


@pytest.mark.parametrize(
    ("fault", "settings"),
    [
        # Neighbours in the ring of the whole job, which carries four bytes a step.
        ("slow-link:src=1,dst=2,factor=9", {"dp": 2, "pp": 1, "tp": 2}),
        # The last stage sends nothing to the first one without interleaving.
        ("slow-link:src=0,dst=2,factor=9", {"dp": 1, "pp": 3}),
        ("slow-link:rank=0,factor=9", {"dp": 2, "pp": 1}),
        ("slow-link:rack=0,factor=9", {"dp": 4, "pp": 1, "ranks_per_host": 1}),
        ("network-degradation:factor=9", {"dp": 2, "pp": 2}),
    ],
)
def test_a_fault_without_effect_is_refused(fault: str, settings: dict[str, int]) -> None:
    with pytest.raises(ScenarioError, match="nothing is sent"):
        simulate(exact(fault, **settings))


def test_a_degraded_network_slows_the_share_of_hosts_that_its_label_names() -> None:
    settings = {"dp": 2, "pp": 4, "ranks_per_host": 2, "num_steps": 1, "network": LINKS,
                "activation_bytes": MS}  # fmt: skip
    recorded = record(exact("network-degradation:factor=3,share=0.25", **settings))
    label, at = recorded.simulation.labels[0], recorded.simulation.cluster.placement
    ends = recorded.spans.where(kind="pp-recv")
    touched = np.isin(ends["src_rank"], label.ranks) | np.isin(ends["dst_rank"], label.ranks)
    sent = _sent_ns(recorded)
    transfer_ms = (ends.end_ns - np.maximum(ends["start_ns"], sent)) / MS
    counted = recorded.samples.where(name="rdma-ecn-marked-packets")
    marking = {str(host) for host in counted.rows(counted["value"] > 1_000)["host"]}

    assert len(label.ranks) == 2
    assert label.detail == "congestion"
    assert set(transfer_ms[touched]) == {3.0}
    assert set(transfer_ms[~touched]) == {1.0}
    assert marking == {f"sim-{at.host[rank]:05d}" for rank in label.ranks}


@pytest.mark.parametrize(
    ("reason", "counter"),
    [("retransmit", "rdma-retransmitted-packets"), ("flap", "link-down-events")],
)
def test_the_counter_of_the_reason_grows(reason: str, counter: str) -> None:
    recorded = record(
        exact(
            f"network-degradation:factor=2,reason={reason}",
            dp=2, pp=2, num_steps=6, ranks_per_host=1,
        )
    )  # fmt: skip
    healthy = record(exact(dp=2, pp=2, num_steps=6, ranks_per_host=1))

    grown = recorded.samples.where(name=counter)["value"].max()

    assert grown > 5 * max(healthy.samples.where(name=counter)["value"].max(), 1 / 5)


def test_a_flapping_link_is_up_in_some_of_its_steps() -> None:
    recorded = record(
        exact(
            "network-degradation:factor=9,reason=flap",
            dp=2,
            pp=1,
            num_steps=20,
            ranks_per_host=1,
            network=LINKS,
            gradient_bytes=MS,
        )
    )

    lengths = {round(recorded.step_ms(step), 3) for step in range(20)}

    assert lengths == {246.0, 254.0}


def test_gc_pauses_are_before_forwards_as_spans_or_gaps() -> None:
    settings = {"dp": 2, "pp": 1, "num_steps": 4}
    spans = record(exact("gc-pause:ms=100,probability=0.2", **settings)).spans
    gaps = record(exact("gc-pause:ms=100,probability=0.2,spans=no", **settings)).spans
    pauses = spans.where(kind="gc")

    assert 4 <= len(pauses) <= 24
    assert set(pauses["rank"].tolist()) == {0, 1}
    assert not len(gaps.where(kind="gc"))
    forwards = [table.where(kind="forward")["start_ns"].tolist() for table in (spans, gaps)]
    assert forwards[0] == forwards[1]
    assert set(pauses.end_ns.tolist()) <= set(forwards[0])


def test_a_host_stall_is_a_gap_before_each_compute_span() -> None:
    recorded = record(exact("host-stall:rank=0,ms=2", dp=1, pp=1, num_microbatches=3, num_steps=1))

    # Three forwards, three backwards, the optimizer.
    assert recorded.step_ms(0) == 95 + 7 * 2
    assert compute_ms(recorded, 0, 0) == 95


@pytest.mark.parametrize(("spans", "data_ms"), [("yes", [1.0, 41.0]), ("no", [])])
def test_a_data_stall_is_a_long_span_or_a_gap(spans: str, data_ms: list[float]) -> None:
    recorded = record(
        exact(f"data-stall:rank=1,ms=40,spans={spans}", dp=2, pp=1, num_steps=1, data_ms=1.0)
    )

    assert (recorded.spans.where(kind="data")["duration_ns"] / MS).tolist() == data_ms
    first = [recorded.spans.where(kind="forward", rank=rank)["start_ns"].min() for rank in (0, 1)]
    assert first[1] - first[0] == 40 * MS


def test_members_of_a_skewed_group_are_late_in_turn_and_increasingly() -> None:
    recorded = record(exact("launch-skew:ms=80,stage=1", dp=4, pp=2, num_steps=16))
    lag = _lags_ms(recorded, stage_ranks=[4, 5, 6, 7])
    calm = _lags_ms(recorded, stage_ranks=[0, 1, 2, 3])

    assert recorded.simulation.labels[0].ranks == (4, 5, 6, 7)
    assert calm.max() == 0
    assert set(lag.argmax(axis=1).tolist()) == {0, 1, 2, 3}
    assert lag[:4].max() < lag[-4:].max() / 2
    difference = np.sign(lag[:, 0] - lag[:, 2])
    assert {-1.0, 1.0} <= set(difference.tolist())
    assert {compute_ms(recorded, rank, 15) for rank in range(8)} == {245.0}


@pytest.mark.parametrize(("spans", "num_spans"), [("yes", 6), ("no", 0)])
def test_a_checkpoint_stops_all_ranks_at_regular_steps(spans: str, num_spans: int) -> None:
    recorded = record(exact(f"checkpoint:every=2,ms=300,spans={spans}", dp=2, pp=1, num_steps=6))

    assert [recorded.step_ms(step) for step in range(6)] == [245, 545, 245, 545, 245, 545]
    assert len(recorded.spans.where(kind="checkpoint")) == num_spans


def test_lengths_slow_a_micro_batch_equally_in_both_directions_on_all_stages() -> None:
    recorded = record(exact("sequence-imbalance:spread=0.3", dp=2, pp=2, num_steps=1))
    spans = recorded.spans
    factor = {
        (kind, rank): spans.where(kind=kind, rank=rank)["duration_ns"] / mean_ns
        for kind, mean_ns in (("forward", 10 * MS), ("backward", 20 * MS))
        for rank in range(4)
    }

    for rank in (0, 1):
        np.testing.assert_allclose(factor["forward", rank], factor["backward", rank], atol=1e-6)
        np.testing.assert_allclose(factor["forward", rank], factor["forward", rank + 2], atol=1e-6)
        squares = recorded.microbatches.where(rank=rank)["sum_squared_lengths"]
        np.testing.assert_allclose(
            factor["forward", rank], 0.5 + 0.5 * squares / (8192**2 / 4), atol=1e-6
        )
    assert np.ptp(factor["forward", 0]) > 0.2
    assert not np.allclose(factor["forward", 0], factor["forward", 1])


def test_a_misconfigured_rank_has_another_environment() -> None:
    simulation = simulate(
        exact("misconfiguration:rank=2,variable=NCCL_DEBUG,value=INFO", dp=4, pp=1)
    )
    environments = [simulation.manifest(rank)["environment"] for rank in range(4)]

    assert environments[0] == environments[1] == environments[3]
    assert environments[2] == environments[0] | {"NCCL_DEBUG": "INFO"}
    assert simulation.labels[0].detail == "NCCL_DEBUG=INFO"


def test_a_manifest_does_not_contain_the_fault() -> None:
    slow = simulate(exact("slow-compute:rank=2,factor=2", dp=4, pp=1)).manifest(0)

    assert slow == simulate(exact(dp=4, pp=1)).manifest(0)


def test_tensor_parallelism_across_hosts_and_few_micro_batches_have_labels() -> None:
    across = simulate(
        exact(dp=4, pp=1, tp=2, ranks_per_host=4, rank_order=RankOrder.DP_FIRST)
    ).labels
    few = simulate(exact(dp=1, pp=4, num_microbatches=4)).labels
    enough = simulate(exact(dp=1, pp=4, num_microbatches=8)).labels

    assert [(one.cause, one.ranks) for one in across] == [("layout", tuple(range(8)))]
    assert [(one.cause, one.factor) for one in few] == [("layout", 1.75)]
    assert enough == ()


def test_effects_of_several_faults_add_up() -> None:
    recorded = record(
        exact(
            "slow-compute:rank=1,factor=1.5",
            "stage-imbalance:stage=0,factor=2",
            dp=2,
            pp=1,
            num_steps=1,
        )
    )

    assert [compute_ms(recorded, rank, 0) for rank in (0, 1)] == [490.0, 735.0]
    assert [one.cause for one in recorded.simulation.labels] == ["slow-compute", "stage-imbalance"]


def _sent_ns(recorded: Recorded) -> NDArray[np.int64]:
    """Return the time at which the message of each receive was sent."""
    sends = recorded.spans.where(kind="pp-send")
    receives = recorded.spans.where(kind="pp-recv")
    names = ("src_rank", "dst_rank", "seq")
    start = {
        tuple(int(sends[name][row]) for name in names): sends["start_ns"][row]
        for row in range(len(sends))
    }
    keys = (tuple(int(receives[name][row]) for name in names) for row in range(len(receives)))
    return np.array([start[key] for key in keys])


def _lags_ms(recorded: Recorded, *, stage_ranks: list[int]) -> NDArray[np.float64]:
    """Return the delay of each member after the first one in the reduction, (steps, members)."""
    rows = recorded.spans.where(name="reduce_scatter_tensor", kind="dp-comm")
    start = np.stack([rows.where(rank=rank)["start_ns"] for rank in stage_ranks], axis=1)
    lag: NDArray[np.float64] = (start - start.min(axis=1, keepdims=True)) / MS
    return lag


def test_with_overlap_a_skewed_rank_launches_late_and_waits_afterwards() -> None:
    recorded = record(exact("launch-skew:ms=40,stage=0", dp=4, pp=1, num_steps=4, overlap=True))
    reductions = recorded.spans.where(name="reduce_scatter_tensor")
    waits = recorded.spans.where(name="wait reduce_scatter_tensor")

    for rank in range(4):
        launch = reductions.where(rank=rank)["launch_ns"]
        assert (waits.where(rank=rank)["start_ns"] >= launch).all()
    launches = [reductions.where(rank=rank)["launch_ns"][-1] for rank in range(4)]
    assert max(launches) - min(launches) > 20 * MS
