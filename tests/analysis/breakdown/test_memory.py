"""Memory of the devices by stage, against published formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rankscope.analysis.breakdown.memory import layer_activations, model_state, summarize_memory
from rankscope.analysis.report.text import format_decimal_bytes
from rankscope.analysis.trace.context import MicrobatchTable, empty_microbatches
from rankscope.analysis.trace.tables import EpochInfo, RankInfo, RankMemory, RunInfo, StepTable
from rankscope.tracer.topology import Coords, Layout
from tests.support.analysis.tables import table_of

if TYPE_CHECKING:
    from collections.abc import Mapping

GIB = 1 << 30
HIDDEN, HEADS, SEQ, LAYERS, VOCABULARY = 1024, 16, 512, 8, 32000
TOKENS = 2 * SEQ
GPT: Mapping[str, Any] = {
    "hidden": HIDDEN,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "num_groups": HEADS,
    "head_size": HIDDEN // HEADS,
    "ffn": 4 * HIDDEN,
    "num_matrices": 2,
    "vocabulary": VOCABULARY,
    "is_plain": True,
    "drops": True,
    "is_fused": False,
    "recomputes": False,
}
"""A GPT with dropout, whose attention stores its matrix, as in arXiv 2205.05198."""

STATE = RankMemory(
    device_bytes=80 * GIB,
    other_bytes=2 * GIB,
    parameter_bytes=3 * GIB,
    gradient_bytes=6 * GIB,
    optimizer_bytes=18 * GIB,
)


def run_of(*, pp: int = 2, shape: Mapping[str, object] = GPT, **known: Any) -> RunInfo:  # noqa: ANN401
    """Return two replicas of ``pp`` stages: rank 2 s + d is stage s of replica d."""
    ranks = tuple(
        RankInfo(
            rank=rank, coords=Coords(pp=rank // 2, dp=rank % 2), dtype="bfloat16", memory=STATE
        )
        for rank in range(2 * pp)
    )
    return RunInfo(
        run_id="r",
        source_format="rankscope",
        layout=Layout(pp=pp, dp=2),
        world_size=2 * pp,
        clock_error_ns=0,
        epochs=(EpochInfo(epoch=0, ranks=ranks, groups=()),),
        shape=shape,
        **known,
    )


def steps_with(peaks: list[int], **known: int) -> StepTable:
    """Return one step of each rank with its peak in GiB."""
    num = len(peaks)
    return table_of(
        StepTable, rank=np.arange(num), peak_memory_bytes=np.array(peaks) * GIB, **known
    )


def microbatches(num: int) -> MicrobatchTable:
    """Return micro-batches of two sequences on both ranks of the first stage."""
    index, rank = (axis.ravel() for axis in np.indices((num, 2)))
    return table_of(
        MicrobatchTable,
        microbatch=index,
        rank=rank,
        num_tokens=TOKENS,
        sum_squared_lengths=TOKENS * SEQ,
    )


def test_175_billion_parameters_take_700_700_and_1400_gb() -> None:
    parts = "700 GB parameters + 700 GB gradients + 1,400 GB optimizer"
    assert model_state(175e9).text(format_decimal_bytes) == parts
    assert model_state(175e9).total_bytes == 16 * 175e9


@pytest.mark.parametrize("tp", [1, 8])
def test_activations_of_a_gpt_are_those_of_the_paper(tp: int) -> None:
    per_token = layer_activations(GPT, tp=tp, width=2, length=SEQ)
    with_sequence = layer_activations(
        {**GPT, "is_sequence_parallel": True}, tp=tp, width=2, length=SEQ
    )

    # equations 2 and 4 of arXiv 2205.05198, per token
    assert per_token == pytest.approx(HIDDEN * (10 + 24 / tp) + 5 * HEADS * SEQ / tp)
    assert with_sequence == pytest.approx((34 * HIDDEN + 5 * HEADS * SEQ) / tp)


def test_a_gate_fewer_keys_and_a_fused_attention_follow_by_the_same_rule() -> None:
    shape = {**GPT, "num_matrices": 3, "num_groups": 4, "is_fused": True, "drops": False}

    # four inputs, queries and the attention's result, keys and values, four of the gated layer
    inputs = 4 * HIDDEN + 2 * HIDDEN + 2 * HIDDEN / 4 + 4 * 4 * HIDDEN
    assert layer_activations(shape, tp=1, width=2, length=SEQ) == 2 * inputs


def test_each_stage_has_its_fullest_rank_with_what_explains_the_peak() -> None:
    steps = steps_with([30, 34, 40, 37], peak_reserved_bytes=70 * GIB, num_alloc_retries=3)

    use = summarize_memory(run_of(), steps, microbatches(4))

    assert use is not None
    first, last = use.stages
    per_layer = TOKENS * (34 * HIDDEN + 5 * HEADS * SEQ)
    # 4 of 8 layers; with 1F1B the first of two stages has two micro-batches in flight
    assert (first.stage, first.rank, first.activation_bytes) == (0, 1, 2 * 4 * per_layer)
    assert (last.stage, last.rank) == (1, 2)
    assert last.activation_bytes == 4 * per_layer + 4 * VOCABULARY * TOKENS
    assert first.capacity_bytes == 78 * GIB
    assert first.full_ratio == pytest.approx(34 / 78)
    assert first.num_alloc_retries == 0
    assert first.rest_bytes == 34 * GIB - 27 * GIB - 2 * 4 * per_layer
    assert use.fullest == last
    assert use.text == (
        "40.0 GiB of 80.0 GiB at the peak of rank 2; 70.0 GiB with the allocator's cache; 3.00 GiB"
        " parameters + 6.00 GiB gradients + 18.0 GiB optimizer; 421 MiB activations by formula"
    )


def test_recomputed_layers_keep_their_input_and_one_layer() -> None:
    shape = {**GPT, "recomputes": True}

    use = summarize_memory(run_of(pp=1, shape=shape), steps_with([30, 34]), microbatches(1))

    assert use is not None
    per_token = 34 * HIDDEN + 5 * HEADS * SEQ
    kept = LAYERS * 2 * HIDDEN + per_token + 4 * VOCABULARY
    assert use.stages[0].activation_bytes == TOKENS * kept


@pytest.mark.parametrize(
    ("shape", "rows", "reason"),
    [
        ({}, microbatches(1), "of this architecture, or of what is recomputed"),
        (
            {**GPT, "is_plain": False},
            microbatches(1),
            "of this architecture, or of what is recomputed",
        ),
        ({**GPT, "num_layers": 7}, microbatches(1), "of stages with several chunks, or with"),
        (GPT, empty_microbatches(), "without the tokens of a micro-batch"),
    ],
)
def test_activations_that_no_formula_gives_are_unknown_with_the_reason(
    shape: Mapping[str, object], rows: MicrobatchTable, reason: str
) -> None:
    use = summarize_memory(run_of(shape=shape), steps_with([30, 34, 40, 37]), rows)

    assert use is not None
    assert {stage.activation_bytes for stage in use.stages} == {None}
    assert {stage.rest_bytes for stage in use.stages} == {None}
    assert use.missing_activations.startswith(reason)


def test_state_is_shown_where_no_peak_is_known() -> None:
    use = summarize_memory(run_of(), steps_with([-1] * 4), empty_microbatches())

    assert use is not None
    assert use.fullest is None
    assert use.text.endswith("of rank 0; its peak is unknown")


def test_a_run_of_which_nothing_is_known_has_no_memory() -> None:
    run = run_of()
    (epoch,) = run.epochs
    ranks = tuple(replace(info, memory=RankMemory()) for info in epoch.ranks)
    unknown = replace(run, epochs=(replace(epoch, ranks=ranks),))

    assert summarize_memory(unknown, steps_with([-1] * 4), empty_microbatches()) is None
    whole = replace(unknown, layout=Layout(dp=2), num_parameters=175_000_000_000)
    use = summarize_memory(whole, steps_with([-1] * 4), empty_microbatches())
    assert use is not None
    assert use.whole == model_state(175e9)
