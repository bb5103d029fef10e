from __future__ import annotations

from dataclasses import replace

import pytest

from rankscope.tracer.topology import Layout
from rankscope.trainer.config import ModelConfig, TrainerConfig
from rankscope.trainer.tracing import (
    flops_per_token,
    matmul_parameters,
    paced_compute_s,
    paced_peak_flops_per_s,
)

MODEL = ModelConfig(
    num_layers=3, hidden_size=8, num_heads=2, ffn_size=16, vocab_size=10, seq_length=5
)


def test_flops_of_a_token_are_those_of_the_formula() -> None:
    # A layer: 4 x 8 x 8 = 256 for q, k, v, o; 3 x 8 x 16 = 384 for the MLP. Head: 8 x 10.
    assert matmul_parameters(MODEL) == 3 * (256 + 384) + 80
    # 6 x 2000, and 6 x 3 layers x 2 heads x (4 + 4) x 5.
    assert flops_per_token(MODEL) == 12_000 + 1_440


def test_flops_follow_the_heads_of_keys_and_the_window() -> None:
    model = replace(MODEL, num_kv_heads=1, window=2)

    # Keys and values have 8 x 4 weights each: 64 fewer in each of 3 layers. 2 tokens, not 5.
    assert matmul_parameters(model) == matmul_parameters(MODEL) - 3 * 64
    assert flops_per_token(model) == 6 * matmul_parameters(model) + 6 * 3 * 2 * (4 + 4) * 2
    assert flops_per_token(replace(MODEL, window=9)) == flops_per_token(MODEL)


def test_the_paced_peak_makes_mfu_the_share_of_paced_compute() -> None:
    config = TrainerConfig(
        layout=Layout(pp=2, dp=2, tp=1),
        world_size=4,
        model=MODEL,
        num_microbatches=4,
        pace_ms=10.0,
    )
    # Stage 0 has 2 layers, stage 1 has 1: 4 x 2 x 2 x 3 = 48 and 24 paces of 10 ms.
    assert paced_compute_s(config, stage=0) == pytest.approx(0.48)
    assert paced_compute_s(config, stage=1) == pytest.approx(0.24)

    peak = paced_peak_flops_per_s(config)

    # In a step of 0.72 s the ranks compute 0.36 s on average: MFU 1/2.
    model_flops = flops_per_token(MODEL) * config.num_tokens
    assert model_flops / (config.world_size * peak * 0.72) == pytest.approx(0.5)


def test_an_unpaced_run_has_no_paced_peak() -> None:
    config = TrainerConfig(world_size=1, num_microbatches=1)

    with pytest.raises(ValueError, match="the run is not paced"):
        paced_peak_flops_per_s(config)
