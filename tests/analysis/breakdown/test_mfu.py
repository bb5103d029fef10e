from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.breakdown.mfu import (
    compute_mfu,
    count_tokens,
    explain_missing_mfu,
    sum_squares,
)
from rankscope.analysis.trace.context import MicrobatchTable, empty_microbatches
from rankscope.analysis.trace.device_peaks import peak_flops_per_s
from rankscope.analysis.trace.tables import EpochInfo, RankInfo, RunInfo, StepTable
from rankscope.tracer.topology import Coords, Layout
from tests.support.analysis.tables import table_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope.analysis.report.report import Mfu

S = 1_000_000_000


def rank_info(rank: int, *, dp: int = 0, tp: int = 0, peak: float | None = 10.0) -> RankInfo:
    return RankInfo(rank=rank, coords=Coords(dp=dp, tp=tp), peak_flops_per_s=peak)


def run_info(*ranks: RankInfo, layout: Layout, flops_per_token: float | None = 2.0) -> RunInfo:
    return RunInfo(
        run_id="r",
        source_format="rankscope",
        layout=layout,
        world_size=layout.world_size,
        epochs=(EpochInfo(epoch=0, ranks=ranks),),
        flops_per_token=flops_per_token,
        flops_convention="6 N per token",
    )


def mfu_of(run: RunInfo, steps: StepTable, lengths: MicrobatchTable | None = None) -> Mfu:
    mfu = compute_mfu(run, steps, empty_microbatches() if lengths is None else lengths)
    assert mfu is not None
    return mfu


def has_mfu(run: RunInfo, steps: StepTable) -> bool:
    return compute_mfu(run, steps, empty_microbatches()) is not None


def step_table(*rows: tuple[int, int, int, int, int], epoch: int = 0) -> StepTable:
    """Return step rows of (step, rank, start_ns, end_ns, num_tokens)."""
    step, rank, start_ns, end_ns, tokens = zip(*rows, strict=True) if rows else ((),) * 5
    return table_of(
        StepTable,
        epoch=[epoch] * len(rows),
        step=step,
        rank=rank,
        start_ns=start_ns,
        end_ns=end_ns,
        num_tokens=tokens,
    )


# Two data positions of two TP ranks each; each position trains on 60 tokens.
LAYOUT = Layout(dp=2, tp=2)
RANKS = (rank_info(0), rank_info(1, tp=1), rank_info(2, dp=1), rank_info(3, dp=1, tp=1))
ONE_STEP = (
    (7, 0, 0, 9 * S, 60),
    (7, 1, 1 * S, 10 * S, 60),
    (7, 2, 2 * S, 12 * S, 60),
    (7, 3, 2 * S, 11 * S, 60),
)


def test_tokens_count_once_per_data_position_and_time_from_first_start_to_last_end() -> None:
    # 2 FLOPs per token x (60 + 60) tokens over 4 ranks x 10 FLOP/s x 12 s.
    mfu = mfu_of(run_info(*RANKS, layout=LAYOUT), step_table(*ONE_STEP))

    assert mfu.by_step == {7: pytest.approx(240 / 480)}
    assert mfu.flops_by_step == {7: 240}
    assert mfu.mean == pytest.approx(0.5)


def test_layers_with_a_window_count_what_it_leaves() -> None:
    run = replace(
        run_info(*RANKS, layout=LAYOUT),
        flops_per_squared_length=0.1,
        flops_per_windowed_length=0.5,
        recomputed_flops_per_token=1.0,
        recomputed_attention_ratio=0.5,
    )
    rows = (0, 7, 0, 0, 100), (0, 7, 2, 0, 200)  # one rank of each data position

    mfu = mfu_of(run, step_table(*ONE_STEP), microbatch_table(*rows, windowed=(20, 40)))

    # 120 tokens: 240 FLOPs, 0.1 x 300 and 0.5 x 60; again 120, and half of the 60 of the attention
    assert mfu.flops_by_step == {7: pytest.approx(300)}
    assert mfu.hfu == pytest.approx(mfu.mean * 450 / 300)
    unknown = microbatch_table(*rows, windowed=(20, -1))
    assert compute_mfu(run, step_table(*ONE_STEP), unknown) is None
    split = replace(run, layout=Layout(cp=2, tp=2))
    assert compute_mfu(split, step_table(*ONE_STEP), microbatch_table(*rows)) is None


def test_tokens_are_counted_where_the_mfu_is_unknown() -> None:
    run = run_info(*RANKS, layout=LAYOUT, flops_per_token=None)
    repeated = replace(step_table(*ONE_STEP[:3]), num_tokens=np.array([50, 50, -1]))

    assert not has_mfu(run, step_table(*ONE_STEP))
    assert count_tokens(run, step_table(*ONE_STEP)) == {7: 120}
    assert count_tokens(run, repeated) == {}


def microbatch_table(
    *rows: tuple[int, int, int, int, int], windowed: tuple[int, ...] | None = None
) -> MicrobatchTable:
    """Return rows of (epoch, step, rank, micro-batch, squares)."""
    epoch, step, rank, microbatch, squares = np.array(rows).T
    return MicrobatchTable(
        epoch=epoch,
        step=step,
        rank=rank,
        microbatch=microbatch,
        num_tokens=np.full(len(rows), -1),
        sum_squared_lengths=squares,
        sum_windowed_lengths=np.full(len(rows), -1) if windowed is None else np.array(windowed),
        num_elements=np.full(len(rows), -1),
    )


def test_of_squared_lengths_the_rank_with_most_of_them_counts() -> None:
    table = microbatch_table(
        (0, 4, 0, 0, 10), (0, 4, 0, 1, 20), (0, 4, 1, 0, 25),
        (0, 5, 0, 0, 99), (1, 5, 0, 0, 7),  # repeated after a restart
        (0, 6, 0, 0, 10), (0, 6, 1, 0, -1),
    )  # fmt: skip

    assert sum_squares(table) == {4: 30, 5: 7}


SQUARES = ((0, 7, 0, 0, 900), (0, 7, 0, 1, 900), (0, 7, 1, 0, 1800), (0, 7, 2, 0, 600))
"""Of both data positions: 2 x 30 tokens in two micro-batches, and 6 x 10 in one."""


def test_attention_counts_by_the_squared_lengths_of_each_micro_batch() -> None:
    # 2 x (60 + 60) + 0.1 x (1800 + 600) FLOPs over 4 ranks x 10 FLOP/s x 12 s.
    run = replace(run_info(*RANKS, layout=LAYOUT), flops_per_squared_length=0.1)

    mfu = mfu_of(run, step_table(*ONE_STEP), microbatch_table(*SQUARES))

    assert mfu.by_step == {7: pytest.approx(480 / 480)}
    assert mfu.flops_by_step == {7: pytest.approx(480)}


def test_a_sequence_split_over_context_parallel_ranks_has_its_whole_length_squared() -> None:
    # One sequence of 60 tokens on two ranks, 30 each: 0.1 x 60 x 60 FLOPs of attention.
    layout = Layout(cp=2)
    ranks = tuple(RankInfo(rank=cp, coords=Coords(cp=cp), peak_flops_per_s=10.0) for cp in range(2))
    run = replace(run_info(*ranks, layout=layout), flops_per_squared_length=0.1)
    steps = step_table((7, 0, 0, 10 * S, 30), (7, 1, 0, 10 * S, 30))

    mfu = mfu_of(run, steps, microbatch_table((0, 7, 0, 0, 900), (0, 7, 1, 0, 900)))

    assert mfu.flops_by_step == {7: pytest.approx(2 * 60 + 360)}


@pytest.mark.parametrize(
    "rows", [SQUARES[:3], (*SQUARES, (0, 7, 2, 1, -1)), ((0, 8, 0, 0, 1),)], ids=str
)
def test_a_step_of_unknown_lengths_has_no_mfu_if_the_flops_depend_on_them(
    rows: tuple[tuple[int, int, int, int, int], ...],
) -> None:
    run = replace(run_info(*RANKS, layout=LAYOUT), flops_per_squared_length=0.1)

    assert compute_mfu(run, step_table(*ONE_STEP), microbatch_table(*rows)) is None
    assert explain_missing_mfu(run, step_table(*ONE_STEP)) == (
        "no step has an end and tokens of all ranks, and squared lengths (`tracer.microbatch`)"
    )


def test_tokens_reported_by_one_rank_of_a_data_position_are_enough() -> None:
    rows = [(step, rank, a, b, n if rank in {1, 2} else -1) for step, rank, a, b, n in ONE_STEP]

    mfu = mfu_of(run_info(*RANKS, layout=LAYOUT), step_table(*rows))

    assert mfu.by_step == {7: pytest.approx(0.5)}


def test_a_step_that_one_rank_has_not_ended_is_left_out() -> None:
    begun = [(8, rank, 12 * S, 20 * S, 60) for rank in range(3)]
    unended = (9, 3, 12 * S, -1, 60)

    mfu = mfu_of(run_info(*RANKS, layout=LAYOUT), step_table(*ONE_STEP, *begun, unended))

    assert list(mfu.by_step) == [7]


RUN = run_info(*RANKS, layout=LAYOUT)


@pytest.mark.parametrize(
    ("run", "rows"),
    [
        (replace(RUN, flops_per_token=None), ONE_STEP),
        (
            run_info(*RANKS[:3], replace(RANKS[3], peak_flops_per_s=None), layout=LAYOUT),
            ONE_STEP,
        ),
        (RUN, ()),
        (run_info(layout=LAYOUT), ONE_STEP),
        (replace(RUN, layout=Layout(dp=2, tp=2, dsp=2)), ONE_STEP),
        # A job restarted with fewer replicas: some of its earlier ranks are outside the layout.
        (run_info(*RANKS, layout=replace(LAYOUT, dp=1)), ONE_STEP),
        (replace(RUN, layout=Layout()), ONE_STEP),
        (RUN, [(*row[:4], row[4] if row[1] < 2 else -1) for row in ONE_STEP]),
    ],
    ids=[
        "no FLOPs", "a rank without peak", "no steps", "no ranks", "a data axis that no rank shows",
        "ranks outside the layout", "unknown layout", "a data position without tokens",
    ],
)  # fmt: skip
def test_what_is_unknown_gives_no_mfu(
    run: RunInfo, rows: Sequence[tuple[int, int, int, int, int]]
) -> None:
    assert not has_mfu(run, step_table(*rows))


def test_the_peaks_of_different_devices_are_summed() -> None:
    # 10 + 10 + 30 + 30 FLOP/s instead of 4 x 10.
    fast = tuple(replace(rank, peak_flops_per_s=30.0) for rank in RANKS[2:])

    mfu = mfu_of(run_info(*RANKS[:2], *fast, layout=LAYOUT), step_table(*ONE_STEP))

    assert mfu.by_step == {7: pytest.approx(240 / (80 * 12))}


def test_untraced_ranks_have_the_peak_of_the_traced_ones_if_these_are_equal() -> None:
    # Only TP position 0 was traced: 2 of 4 ranks of 10 FLOP/s.
    traced = (RANKS[0], RANKS[2])
    steps = step_table(ONE_STEP[0], ONE_STEP[2])
    mixed = (RANKS[0], replace(RANKS[2], peak_flops_per_s=30.0))

    mfu = mfu_of(run_info(*traced, layout=LAYOUT), steps)

    assert mfu.by_step == {7: pytest.approx(240 / 480)}
    assert not has_mfu(run_info(*mixed, layout=LAYOUT), steps)


def test_a_repeated_step_has_the_mfu_of_the_later_epoch() -> None:
    run = run_info(*RANKS, layout=LAYOUT)
    both = replace(run, epochs=(*run.epochs, EpochInfo(epoch=1, ranks=RANKS)))
    first = step_table(*ONE_STEP)
    again = step_table(*((7, rank, 50 * S, 74 * S, 60) for rank in range(4)), epoch=1)
    names = StepTable.__dataclass_fields__
    columns = {name: np.concatenate([getattr(first, name), getattr(again, name)]) for name in names}

    mfu = mfu_of(both, StepTable(**columns))

    assert mfu.by_step == {7: pytest.approx(240 / (40 * 24))}


def test_the_convention_says_how_flops_and_peak_were_found() -> None:
    run = run_info(*RANKS, layout=LAYOUT)
    device = "NVIDIA H100 80GB HBM3"
    looked_up = tuple(
        replace(rank, peak_flops_per_s=None, device_name=device, dtype="torch.bfloat16")
        for rank in RANKS
    )

    paced = mfu_of(replace(run, paced=True), step_table(*ONE_STEP))
    named = mfu_of(run_info(*looked_up, layout=LAYOUT), step_table(*ONE_STEP))

    assert paced.convention == (
        "6 N per token; peak 1e-11 TFLOP/s per rank, declared by the job (paced CPU)"
    )
    assert named.convention == (
        "6 N per token; peak 989.4 TFLOP/s per rank, dense bfloat16 of NVIDIA H100 80GB HBM3"
    )


@given(shift=st.integers(-(10**12), 10**12), order=st.permutations(range(4)))
def test_shifting_the_clock_or_renaming_ranks_changes_nothing(shift: int, order: list[int]) -> None:
    ranks = sorted(
        (replace(info, rank=order[info.rank]) for info in RANKS), key=lambda info: info.rank
    )
    rows = sorted((step, order[rank], a + shift, b + shift, n) for step, rank, a, b, n in ONE_STEP)

    mfu = mfu_of(run_info(*ranks, layout=LAYOUT), step_table(*rows))

    assert mfu.by_step == {7: pytest.approx(0.5)}


MEGASCALE = [
    # sequences, GPUs, seconds per step, MFU in percent as printed
    *((768, *row) for row in ((256, 40.0, 53.0), (512, 21.2, 49.9))),
    *((768, *row) for row in ((768, 15.2, 46.7), (1024, 11.9, 44.7))),
    *((6144, *row) for row in ((3072, 29.02, 48.7), (6144, 14.78, 47.8))),
    *((6144, *row) for row in ((8192, 12.24, 43.3), (12288, 8.57, 41.2))),
]


def gpt_flops_per_step(
    *, hidden: int, num_layers: int, seq: int, vocabulary: int, num_sequences: int
) -> float:
    """Return the model FLOPs of a step of a GPT: no recomputation, attention without a mask.

    Source:
        arXiv 2104.04473 (its formula with recomputation, less the second forward).
    """
    attention = seq / (6 * hidden)
    head = vocabulary / (12 * num_layers * hidden)
    return 72 * num_sequences * seq * num_layers * hidden**2 * (1 + attention + head)


@pytest.mark.parametrize(("num_sequences", "num_gpus", "step_s", "percent"), MEGASCALE)
def test_the_formula_gives_the_megatron_rows_of_megascales_table_2(
    num_sequences: int, num_gpus: int, step_s: float, percent: float
) -> None:
    # 175B model on A100s of 312 TFLOP/s, arXiv 2402.15627; steps are printed to three digits.
    flops = gpt_flops_per_step(
        hidden=12288, num_layers=96, seq=2048, vocabulary=64000, num_sequences=num_sequences
    )
    a100 = peak_flops_per_s("NVIDIA A100-SXM4-80GB", "bfloat16")
    # One data position represents the whole job.
    run = run_info(
        RankInfo(rank=0, coords=Coords(), peak_flops_per_s=a100),
        layout=Layout(tp=num_gpus),
        flops_per_token=flops / (num_sequences * 2048),
    )
    row = (0, 0, 0, round(step_s * S), num_sequences * 2048)

    mfu = mfu_of(run, step_table(row))

    tolerance = 0.174 if num_sequences == 768 else 0.061
    assert 100 * mfu.mean == pytest.approx(percent, abs=tolerance)


@pytest.mark.parametrize(
    ("device", "dtype", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312.0),
        ("A100-SXM4-40GB", "torch.float16", 312.0),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "float8_e4m3fn", 1513.0),
        ("NVIDIA B200", "bfloat16", 2250.0),
        ("NVIDIA B300 SXM6 AC", "bfloat16", 2250.0),
        ("NVIDIA GB200", "bfloat16", 2500.0),
        ("NVIDIA GB300", "float8_e4m3fn", 5000.0),
        ("NVIDIA H20", "bfloat16", 148.0),
        ("NVIDIA L40S", "bfloat16", 362.05),
        ("AMD Instinct MI300X", "bfloat16", 1307.4),
        ("AMD Instinct MI325X", "float8", 2614.9),
        ("AMD Instinct MI350X", "bfloat16", 2306.9),
        ("AMD Instinct MI355X", "bfloat16", 2516.6),
    ],
)
def test_a_listed_device_has_its_dense_peak(device: str, dtype: str, tera: float) -> None:
    assert peak_flops_per_s(device, dtype) == tera * 1e12


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16"),  # a slice of one
        ("NVIDIA A100", "bfloat16"),  # no driver says so
        ("Tesla V100-SXM2-16GB", "float16"),
        ("cpu", "float32"),
        ("", ""),
        ("NVIDIA H100 80GB HBM3", "float32"),  # TF32 or not is a setting, not a type
        ("NVIDIA A100-SXM4-80GB", "float8"),  # it has none
    ],
)
def test_anything_else_has_no_peak(device: str, dtype: str) -> None:
    assert peak_flops_per_s(device, dtype) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"source_format": "bytedance", "flops_per_token": None}, "the trace format has no FLOPs"),
        ({"layout": Layout(), "world_size": 4}, "parallel layout unknown: pass `layout`"),
        (
            {"flops_per_token": None},
            "FLOPs per token unknown: set RANKSCOPE_FLOPS_PER_TOKEN, or pass `flops_per_token`",
        ),
    ],
    ids=["format", "layout", "flops"],
)
def test_a_missing_mfu_names_what_is_unknown(change: dict[str, Any], reason: str) -> None:
    run = replace(run_info(*RANKS, layout=LAYOUT), **change)

    assert not has_mfu(run, step_table(*ONE_STEP))
    assert explain_missing_mfu(run, step_table(*ONE_STEP)).startswith(reason)


def test_a_missing_mfu_names_the_device_without_a_peak_and_the_variable() -> None:
    rank = replace(rank_info(0, peak=None), device_name="NPU 7", dtype="torch.bfloat16")
    run = run_info(rank, *RANKS[1:], layout=LAYOUT)

    assert explain_missing_mfu(run, step_table(*ONE_STEP)) == (
        "peak of NPU 7 at bfloat16 unknown: set RANKSCOPE_PEAK_FLOPS to its FLOP/s, or pass"
        " `peak_flops_per_s` to `tracer.install`"
    )


def test_a_missing_mfu_names_missing_tokens_and_missing_ranks() -> None:
    run = run_info(*RANKS, layout=LAYOUT)
    without_tokens = step_table(*((*row[:4], -1) for row in ONE_STEP))

    assert explain_missing_mfu(run, without_tokens).startswith("tokens unknown")
    assert not has_mfu(run, step_table(*ONE_STEP[:3]))
    assert explain_missing_mfu(run, step_table(*ONE_STEP[:3])) == (
        "no step has an end and tokens of all ranks"
    )
