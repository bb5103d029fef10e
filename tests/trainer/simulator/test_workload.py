from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rankscope.trainer.errors import ScenarioError
from rankscope.trainer.simulator.scenario import Network, Noise, Scenario, TpDetail
from rankscope.trainer.simulator.scenario_file import scenario_settings
from rankscope.trainer.simulator.schedule import Schedule
from rankscope.trainer.simulator.simulation import simulate
from rankscope.trainer.simulator.workload import draw_loads
from tests.support.trainer.recorded import MS, exact, record


def test_experts_with_more_tokens_compute_longer_between_their_all_to_alls() -> None:
    recorded = record(
        exact(pp=1, dp=4, ep=2, num_microbatches=1, num_steps=1, expert_weights=(3.0, 1.0))
    )

    # Forward 10 ms: 5 ms until the tokens are sent, then 5 ms x 1.5 or x 0.5 in the experts.
    experts = recorded.spans.where(kind="ep-comm")
    forward = recorded.spans.where(kind="forward")
    begin = forward["start_ns"].min()
    left = {rank: (experts.where(rank=rank)["start_ns"][:2] - begin) / MS for rank in range(4)}
    assert {rank: times.tolist() for rank, times in left.items()} == {
        0: [5.0, 12.5], 1: [5.0, 7.5], 2: [5.0, 12.5], 3: [5.0, 7.5],
    }  # fmt: skip
    assert (forward["duration_ns"] / MS).tolist() == [12.5] * 4
    assert set(recorded.spans.where(kind="forward")["chunk"].tolist()) == {0}


def test_experts_groups_are_neighbours_on_the_dp_axis() -> None:
    simulation = simulate(Scenario(dp=4, pp=2, tp=2, ep=2, tp_detail=TpDetail.COARSE))

    members = [group.members for group in simulation.groups if group.kind == "ep-comm"]

    # The tp position changes first with the rank, then dp, then pp.
    assert members == [
        (0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15),
    ]  # fmt: skip
    assert [row["ep"] for row in simulation.rank_rows()] == [0, 0, 1, 1] * 4


def test_an_all_to_all_takes_the_sum_of_its_slowest_member_s_parts() -> None:
    network = Network(host_bytes_per_s=1e9, rack_bytes_per_s=1e9, host_latency_ns=0,
                      rack_latency_ns=0, spine_latency_ns=0)  # fmt: skip
    recorded = record(
        exact(
            "slow-link:src=0,dst=1,factor=3", pp=1, dp=4, ep=4, num_microbatches=1, num_steps=1,
            num_layers=1, ep_bytes=4 * MS, network=network,
        )
    )  # fmt: skip

    # 1 MB to each of three others: 1 ms each, 3 ms over the slow link.
    assert set((recorded.spans.where(kind="ep-comm")["duration_ns"] / MS).tolist()) == {5.0}


def test_steps_with_more_tokens_compute_as_much_longer() -> None:
    noise = replace(exact().noise, token_spread=0.3, token_period_steps=2)
    recorded = record(exact(pp=1, dp=2, num_microbatches=1, num_steps=4, noise=noise))

    tokens = recorded.steps.where(rank=0)["num_tokens"]
    forward = recorded.spans.where(kind="forward", rank=0)["duration_ns"]
    assert (tokens[0], tokens[2]) == (tokens[1], tokens[3])
    assert tokens[0] != tokens[2]
    assert np.allclose(forward / (10 * MS), tokens / 8_192, atol=1e-3)


def test_loads_of_a_group_have_mean_one_and_vary() -> None:
    scenario = Scenario(dp=8, pp=2, ep=4, noise=Noise(expert_spread=0.3))

    first, second = draw_loads(scenario, 0), draw_loads(scenario, 1)

    assert first is not None
    assert second is not None
    assert first.shape == (2, 1, 8, 8)
    np.testing.assert_allclose(first.reshape(2, 1, 8, 2, 4).mean(axis=-1), 1.0)
    assert 0.2 < float(np.std(np.log(first))) < 0.35
    assert not np.allclose(first, second)
    assert draw_loads(Scenario(), 0) is None


def test_experts_that_do_not_divide_the_dp_axis_are_refused() -> None:
    with pytest.raises(ScenarioError, match="ep 3 must divide dp 4"):
        Scenario(dp=4, ep=3)
    with pytest.raises(ScenarioError, match="expert_weights must be 2 numbers"):
        Scenario(dp=4, ep=2, expert_weights=(1.0,))
    with pytest.raises(ScenarioError, match="tp_detail must not be collapsed"):
        Scenario(dp=4, ep=2, tp=2)


def test_a_scenario_file_may_hold_experts_and_a_schedule() -> None:
    settings = scenario_settings(
        {"dp": 4, "ep": 2, "pp": 2, "schedule": "zero-bubble", "expert_weights": [2.0, 1.0]}
    )

    scenario = Scenario(**settings)

    assert scenario.schedule is Schedule.ZERO_BUBBLE
    assert scenario.expert_weights == (2.0, 1.0)
