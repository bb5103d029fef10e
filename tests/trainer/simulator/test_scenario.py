from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rankscope.trainer.errors import ScenarioError
from rankscope.trainer.faults.spec import FaultCause, parse_simulated_faults
from rankscope.trainer.simulator.labels import FOUND_AS
from rankscope.trainer.simulator.placement import Axis, make_groups, place
from rankscope.trainer.simulator.presets import PRESETS
from rankscope.trainer.simulator.scenario import Noise, RankOrder, Scenario, TpDetail
from rankscope.trainer.simulator.scenario_file import read_scenario_file
from rankscope.trainer.simulator.simulation import simulate
from tests.support.trainer.recorded import preset_scenario

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"dp": 0}, "Scenario.dp must be at least 1"),
        ({"dp": 2**21}, "at most 1048576: make dp smaller"),
        ({"pp": 3, "vpp": 2, "num_microbatches": 8}, "must be a multiple of pp 3"),
        ({"pp": 2, "num_layers": 3}, "must be a multiple of pp x vpp = 2"),
        ({"forward_ms": 0.0}, "Scenario.forward_ms must be above 0"),
        ({"stage_weights": (1.0,)}, "Scenario.stage_weights must be 2 numbers"),
        ({"noise": Noise(compute_jitter_ratio=0.5)}, "compute_jitter_ratio must be at most 0.2"),
        ({"noise": Noise(end_jitter_ns=-1)}, "Scenario.noise.end_jitter_ns must not be negative"),
    ],
)
def test_an_invalid_scenario_is_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ScenarioError, match=problem):
        Scenario(**settings)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("slow-compute:rank=4,factor=2", "rank 4 does not exist: the scenario has rank 0 to 3"),
        ("slow-compute:host=1,factor=2", "host 1 does not exist"),
        ("stage-imbalance:stage=2,factor=2", "stage 2 does not exist"),
        ("launch-skew:ms=5,tp=1", "tp 1 does not exist"),
        ("slow-compute:rank=0,factor=2,steps=20-30", "begins after the last step 19"),
        ("hang:rank=0,step=20", "begins after the last step 19"),
    ],
)
def test_a_fault_outside_the_scenario_is_refused(spec: str, problem: str) -> None:
    with pytest.raises(ScenarioError, match=problem):
        Scenario(dp=2, pp=2, faults=parse_simulated_faults([spec]))


def test_ranks_fill_hosts_and_racks_in_order() -> None:
    at = place(Scenario(dp=2, pp=2, tp=2, cp=2, ranks_per_host=4, hosts_per_rack=2))

    assert at.rank[1, 0, 1, 0] == 8 + 2
    assert (at.stage[10], at.dp[10], at.cp[10], at.tp[10]) == (1, 0, 1, 0)
    assert at.host.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert at.rack.tolist() == [0] * 8 + [1] * 8
    assert at.local_rank.tolist() == [0, 1, 2, 3] * 4


def test_with_dp_first_data_parallel_neighbours_share_a_host() -> None:
    at = place(Scenario(dp=4, pp=1, tp=2, ranks_per_host=4, rank_order=RankOrder.DP_FIRST))

    assert at.rank[0, :, 0, 0].tolist() == [0, 1, 2, 3]
    assert at.rank[0, 0, 0, :].tolist() == [0, 4]
    assert np.array_equal(np.sort(at.rank.ravel()), np.arange(8))


def test_groups_of_one_member_are_left_out() -> None:
    groups = make_groups(place(Scenario(dp=2, pp=1, tp=2)))

    assert [(group.name, group.members) for group in groups.groups] == [
        ("tp-0-0-0", (0, 1)),
        ("tp-0-1-0", (2, 3)),
        ("dp-0-0", (0, 2)),
        ("dp-0-1", (1, 3)),
        ("world", (0, 1, 2, 3)),
    ]
    assert not groups.ids[Axis.PP].any()


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("settings", [{}, {"dp": 4, "pp": 4, "tp": 8, "num_steps": 6}])
def test_every_preset_fits_any_size_and_is_labelled(name: str, settings: dict[str, Any]) -> None:
    simulation = simulate(preset_scenario(name, **settings))
    causes = {label.cause for label in simulation.labels}

    if name in tuple(FaultCause):
        assert causes == {FOUND_AS.get(FaultCause(name), name)}
    elif name in ("healthy", "noisy", "zero-bubble", "experts"):
        assert not causes
    else:
        assert causes == {"layout"}
    assert next(simulation.tables()).spans.num_rows > 0


def test_a_single_rank_sends_nothing() -> None:
    simulation = simulate(Scenario(dp=1, pp=1, num_steps=1, num_microbatches=2))
    spans = next(simulation.tables()).spans.to_pydict()

    assert simulation.groups == ()
    assert spans["kind"] == ["data", *["forward", "backward"] * 2, "optimizer"]
    assert set(spans["group_id"]) == {0}


def test_a_pipeline_without_data_parallelism_has_its_slow_link_between_stages() -> None:
    (label,) = simulate(preset_scenario("slow-link", dp=1, pp=4, tp=1)).labels

    assert label.ranks == (0, 1)


def test_a_scenario_is_read_from_toml_and_from_json_alike(tmp_path: Path) -> None:
    toml, as_json = tmp_path / "s.toml", tmp_path / "s.json"
    toml.write_text(
        'dp = 4\ntp = 2\ntp_detail = "full"\nforward_ms = 12\n'
        'faults = ["slow-compute:rank=1,factor=1.2"]\n'
        "[noise]\ncompute_jitter_ratio = 0.02\n"
    )
    as_json.write_text(
        json.dumps(
            {
                "dp": 4,
                "tp": 2,
                "tp_detail": "full",
                "forward_ms": 12,
                "faults": ["slow-compute:rank=1,factor=1.2"],
                "noise": {"compute_jitter_ratio": 0.02},
            }
        )
    )

    scenario = Scenario(**read_scenario_file(toml))

    assert scenario == Scenario(**read_scenario_file(as_json))
    assert scenario == Scenario(
        dp=4,
        tp=2,
        tp_detail=TpDetail.FULL,
        forward_ms=12,
        faults=parse_simulated_faults(["slow-compute:rank=1,factor=1.2"]),
        noise=Noise(compute_jitter_ratio=0.02),
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("dpp = 2", "scenario: dpp: unknown setting: known are dp, "),
        ("dp = 2.5", "scenario: dp: Input should be a valid integer"),
        ("overlap = 1", "scenario: overlap: Input should be a valid boolean"),
        ('forward_ms = "fast"', "scenario: forward_ms: Input should be a valid number"),
        (
            'tp_detail = "most"',
            "scenario: tp_detail: Input should be 'collapsed', 'coarse', 'full'",
        ),
        ("dp = true", "scenario: dp: Input should be a valid integer"),
        ("forward_ms = nan", "Scenario.forward_ms must be above 0: nan"),
        ("stage_weights = [1, nan]", "Scenario.stage_weights must be 2 numbers above 0"),
        ("noise = 3", "scenario: noise: Input should be an object"),
        ("[noise]\njitter = 3", "scenario: noise.jitter: unknown setting: known are rank_bias"),
        ("faults = [3]", "scenario: faults.0: Input should be a valid string"),
        ('schedule = "\\ud800"', "is not valid .toml"),
        ("dp = ", "is not valid .toml"),
    ],
)
def test_an_invalid_file_is_refused_with_the_problem(
    tmp_path: Path, text: str, problem: str
) -> None:
    path = tmp_path / "s.toml"
    path.write_text(text)

    with pytest.raises(ScenarioError) as caught:
        Scenario(**read_scenario_file(path))

    assert problem in str(caught.value)


def test_the_error_of_a_missing_file_has_its_path(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"cannot read .*gone\.toml \(No such file"):
        read_scenario_file(tmp_path / "gone.toml")


def test_the_simulator_loads_no_torch() -> None:
    program = (
        "import sys, rankscope.trainer.simulator.simulation, rankscope.trainer.simulator.presets,"
        " rankscope.trainer.simulator.scenario_file; sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
