from __future__ import annotations

from typing import Any

import pytest

from rankscope.tracer.topology import Coords, Layout
from rankscope.trainer.__main__ import main
from rankscope.trainer.config import (
    DataParallel,
    ModelConfig,
    PipelineSchedule,
    TrainerConfig,
    context_positions,
    coords_of,
    default_pace_ms,
    layers_of_stage,
    ranks_of_stage,
)
from rankscope.trainer.errors import ConfigError
from rankscope.trainer.faults.spec import parse_faults

CUBE = Layout(pp=2, dp=2, tp=2)


def make_config(**changes: Any) -> TrainerConfig:  # noqa: ANN401 - any field
    settings: dict[str, Any] = {"layout": CUBE, "world_size": 8, "num_microbatches": 4}
    return TrainerConfig(**(settings | changes))


def test_a_step_has_the_tokens_of_all_data_positions() -> None:
    config = make_config(microbatch_size=2, model=ModelConfig(seq_length=32))

    assert config.num_tokens_per_position == 4 * 2 * 32
    assert config.num_tokens == 2 * 4 * 2 * 32


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"world_size": 4},
            "= 8 ranks, but 4 were started: run torchrun --nproc-per-node 8, or change --pp",
        ),
        (
            {"layout": Layout(pp=8), "num_microbatches": 8},
            "ModelConfig.num_layers 4 is less than the 8 pipeline stages",
        ),
        (
            {"layout": Layout(dp=4, cp=2), "model": ModelConfig(seq_length=30)},
            "ModelConfig.seq_length 30 is not divisible by 2 x cp 2",
        ),
        (
            {"layout": Layout(dp=8, ep=2)},
            "TrainerConfig.layout.ep needs experts: pass --experts",
        ),
        (
            {"layout": Layout(dp=2, tp=4, ep=4), "model": ModelConfig(num_experts=8)},
            "TrainerConfig.layout.ep 4 must divide dp 2 and the 8 experts",
        ),
        (
            {"layout": Layout(dp=8), "sequence_parallel": True},
            "TrainerConfig.sequence_parallel divides tokens over a tp group: pass --tp 2",
        ),
        (
            {"layout": Layout(tp=8), "sequence_parallel": True, "model": ModelConfig(seq_length=6)},
            "a micro-batch of 12 tokens is not divisible by tp 8",
        ),
        (
            {"layout": Layout(dp=4, tp=2), "scatter_gather": True},
            "TrainerConfig.scatter_gather divides the sends of a pipeline over a tp group: pass",
        ),
        (
            {"layout": Layout(dp=2, tp=4), "data_parallel": DataParallel.HSDP},
            "dp 2 x cp 1 must be 4 or more, and dp even",
        ),
        (
            {"layout": Layout(dp=8), "schedule": PipelineSchedule.INTERLEAVED},
            "TrainerConfig.schedule interleaved needs a pipeline: pass --pp 2 or more",
        ),
        (
            {"layout": Layout(pp=2, dp=4, vpp=2)},
            "TrainerConfig.layout.vpp 2 needs --schedule interleaved",
        ),
        (
            {"layout": Layout(pp=2, dp=4), "schedule": PipelineSchedule.ZBV},
            "TrainerConfig.layout.vpp must be 2 with --schedule zbv, got 1: leave out --chunks",
        ),
        (
            {
                "layout": Layout(pp=2, dp=4, vpp=2),
                "schedule": PipelineSchedule.DUALPIPEV,
                "num_microbatches": 3,
            },
            "TrainerConfig.num_microbatches 3 is less than the 4 pipeline stages: dualpipev needs",
        ),
        (
            {
                "layout": Layout(pp=2, dp=4, vpp=2),
                "schedule": PipelineSchedule.INTERLEAVED,
                "num_microbatches": 5,
            },
            "does not divide into 2 equal rounds: pass --microbatches 4",
        ),
        (
            {"layout": Layout(tp=3), "world_size": 3},
            "ModelConfig.num_heads 8 is not divisible by tp 3",
        ),
        (
            {"layout": Layout(tp=8), "model": ModelConfig(ffn_size=100)},
            "ModelConfig.ffn_size 100 is not divisible by tp 8",
        ),
        ({"num_microbatches": 1}, "TrainerConfig.num_microbatches 1 is less than the 2 pipeline"),
        ({"num_steps": 0}, "TrainerConfig.num_steps must be at least 1, got 0"),
        ({"microbatch_size": 0}, "TrainerConfig.microbatch_size must be at least 1, got 0"),
        ({"learning_rate": 0.0}, "TrainerConfig.learning_rate must be above 0 and finite"),
        ({"max_gradient_norm": float("inf")}, "TrainerConfig.max_gradient_norm must be above 0"),
        ({"pace_ms": 0.0}, "TrainerConfig.pace_ms must be above 0 and finite, got 0.0"),
        ({"pace_ms": float("nan")}, "TrainerConfig.pace_ms must be above 0 and finite, got nan"),
        (
            {"faults": parse_faults(["slow-compute:rank=8,factor=2"])},
            "rank 8 does not exist: the layout has ranks 0 to 7",
        ),
        (
            {"faults": parse_faults(["slow-compute:rank=1,factor=2,steps=30-40"])},
            "rank=1,factor=2,steps=30-40 begins after the last step 29",
        ),
    ],
)
def test_invalid_settings_are_refused_by_field(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(**changes)

    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ({"num_layers": 0}, "ModelConfig.num_layers must be at least 1, got 0"),
        ({"hidden_size": 72}, "ModelConfig.hidden_size 72 must be an even multiple of"),
    ],
)
def test_an_invalid_model_is_refused(sizes: dict[str, int], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig(**sizes)

    assert problem in str(caught.value)


def test_the_first_stages_get_the_remaining_layers() -> None:
    stages = [layers_of_stage(stage, num_layers=7, num_stages=3) for stage in range(3)]

    assert stages == [range(3), range(3, 5), range(5, 7)]


def test_the_default_pace_makes_a_healthy_step_last_a_second_and_a_half() -> None:
    # 4 micro-batches + 1, of 1 layer x 2 segments x (1 + 2) paces, + 1: 31 paces in 1500 ms.
    assert default_pace_ms(ModelConfig(num_layers=2), CUBE, num_microbatches=4) == 48.0
    # 61 paces.
    assert default_pace_ms(ModelConfig(num_layers=4), CUBE, num_microbatches=4) == 25.0
    # 3 x 16 x 6 + 1 = 289 paces would be 5 ms each.
    assert default_pace_ms(ModelConfig(num_layers=16), Layout(), num_microbatches=3) == 20.0


def test_the_manifest_gets_plain_values_and_no_hint_of_a_fault() -> None:
    config = make_config(faults=parse_faults(["slow-compute:rank=5,factor=1.8"]), pace_ms=20.0)

    plain = config.to_dict()

    assert "faults" not in plain
    assert "slow-compute" not in repr(plain)
    assert plain["pace_ms"] == 20.0
    assert isinstance(plain["layout"], dict)
    assert plain["layout"]["pp"] == 2
    assert isinstance(plain["model"], dict)
    assert plain["model"]["num_layers"] == 4


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--dp", "zero3"], "trainer: --dp 'zero3' is neither a number nor ddp, fsdp, hsdp"),
        (["--ep", "0"], "trainer: Layout.ep must be at least 1, got 0"),
        (["--pp", "2"], "trainer: TrainerConfig.layout is pp 2 x dp 1 x tp 1 = 2 ranks"),
        (["--tp", "0"], "trainer: Layout.tp must be at least 1, got 0"),
        (["--fault", "slow-compute:rank=9,factor=2"], "trainer: fault 'slow-compute:rank=9"),
        (["--paced", "--pace-ms", "0"], "trainer: TrainerConfig.pace_ms must be above 0"),
    ],
)
def test_invalid_flags_print_one_line_and_exit_with_2(
    argv: list[str],
    problem: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)

    status = main(argv)

    printed = capsys.readouterr()
    assert status == 2
    assert printed.out == ""
    assert printed.err.startswith(problem)
    assert printed.err.count("\n") == 1


def test_tp_changes_fastest_and_pp_slowest() -> None:
    layout = Layout(pp=2, dp=3, tp=2)

    assert coords_of(0, layout) == Coords(pp=0, dp=0, tp=0)
    assert coords_of(1, layout) == Coords(pp=0, dp=0, tp=1)
    assert coords_of(5, layout) == Coords(pp=0, dp=2, tp=1)
    assert coords_of(6, layout) == Coords(pp=1, dp=0, tp=0)
    assert coords_of(11, layout) == Coords(pp=1, dp=2, tp=1)


def test_positions_on_cp_and_ep_are_parts_of_a_data_position() -> None:
    layout = Layout(dp=4, cp=2, tp=2, ep=2)

    assert coords_of(1, layout) == Coords(tp=1)
    assert coords_of(2, layout) == Coords(cp=1)
    assert coords_of(4, layout) == Coords(dp=1, ep=1)
    assert coords_of(11, layout) == Coords(dp=2, cp=1, tp=1)


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [
        (PipelineSchedule.INTERLEAVED, [(0, 3), (1, 4), (2, 5)]),
        (PipelineSchedule.ZBV, [(0, 5), (1, 4), (2, 3)]),
    ],
)
def test_chunks_are_assigned_in_rounds_or_in_a_v(
    schedule: PipelineSchedule, stages: list[tuple[int, ...]]
) -> None:
    config = make_config(
        layout=Layout(pp=3, vpp=2),
        world_size=3,
        schedule=schedule,
        num_microbatches=6,
        model=ModelConfig(num_layers=6),
    )

    assert [config.stages_of(pp) for pp in range(3)] == stages
    assert config.layers_of_position(1) == stages[1]


def test_context_parallel_ranks_have_a_piece_of_both_halves() -> None:
    positions = [context_positions(cp, num_ranks=2, seq_length=8) for cp in range(2)]

    assert positions == [(0, 1, 6, 7), (2, 3, 4, 5)]


def test_a_stage_is_a_range_of_ranks() -> None:
    assert ranks_of_stage(1, Layout(pp=3, dp=2, tp=2)) == (4, 5, 6, 7)


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_job_has_no_position(rank: int) -> None:
    with pytest.raises(ValueError, match=rf"rank must be in \[0, 8\), got {rank}"):
        coords_of(rank, Layout(pp=2, dp=2, tp=2))
