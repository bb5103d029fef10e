"""megatron.core on one gloo rank and on a pipeline of two; see `megatron_job`."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from rankscope.tracer.integrations import megatron
from rankscope.tracer.spool import RecordType
from tests.support.tracer.ranks import run_ranks
from tests.support.tracer.reading import dropped
from tests.tracer.integrations.megatron_job import ARGUMENTS
from tests.tracer.integrations.recorded import Recorded

if TYPE_CHECKING:
    from pathlib import Path

MICROBATCHES = [
    (step, index) for step, num in ((100, 2), (101, 4), (103, 4)) for index in range(num)
]
"""By step: the batch doubles after the first, and iteration 103, counted from 1, is skipped."""


def run_job(folder: Path, num_stages: int, num_chunks: int, outputs: str) -> Path:
    folder.mkdir()
    module = "tests.tracer.integrations.megatron_job"
    run_ranks(module, num_stages, folder, str(num_chunks), outputs, RANKSCOPE_RUN="run")
    return folder


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.nightly), 2])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on a pipeline of so many stages; return the job's folder."""
    num_stages: int = request.param
    return run_job(tmp_path_factory.mktemp("megatron") / str(num_stages), num_stages, 1, "freed")


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=pytest.mark.nightly) for each in ("freed", "kept")],
)
def interleaved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on two ranks of two model chunks each; return the job's folder."""
    outputs: str = request.param
    return run_job(tmp_path_factory.mktemp("interleaved") / outputs, 2, 2, outputs)


def read_ranks(trained: Path) -> range:
    return range(int(trained.name))


@pytest.mark.multiproc
@pytest.mark.slow
def test_training_is_bit_identical_with_the_tracer(trained: Path) -> None:
    last = read_ranks(trained)[-1]
    plain, traced = json.loads((trained / f"losses-{last}.json").read_text())

    assert len(plain) == 10
    assert traced == plain


@pytest.mark.multiproc
@pytest.mark.slow
def test_each_stage_has_its_steps_tokens_and_spans(trained: Path) -> None:
    for rank in read_ranks(trained):
        recorded = Recorded(trained / "spool", rank=rank)
        # micro-batches of 2 sequences of 16 tokens
        assert recorded.steps() == [(100, 64, None), (101, 128, None), (103, 128, None)]
        assert recorded.spans("forward") == MICROBATCHES
        assert recorded.spans("backward") == MICROBATCHES
        assert recorded.spans("optimizer") == [(100, -1), (101, -1), (103, -1)]
        assert recorded.spans("checkpoint") == [(103, -1)]
        assert dropped(recorded.folder) == {}


@pytest.mark.multiproc
@pytest.mark.slow
def test_each_stage_has_megatrons_coordinates(trained: Path) -> None:
    for rank in read_ranks(trained):
        manifest = Recorded(trained / "spool", rank=rank).manifest
        assert (manifest["layout"]["pp"], manifest["coords"]["pp"]) == (
            len(read_ranks(trained)),
            rank,
        )
        # 6 x [2 x 8 x 32 x 2 layers + 4 x 8 x 8 x 2 layers + 8 x 10 + 8 x 2 x 16]
        assert manifest["model"]["flops_per_token"] == 6 * (1024 + 512 + 80 + 256)
        assert manifest["seeds"] == {"seed": 3}


@pytest.mark.multiproc
@pytest.mark.slow
def test_a_pipeline_sends_and_receives_once_per_microbatch(trained: Path) -> None:
    expected = [step for step, _ in MICROBATCHES] if len(read_ranks(trained)) > 1 else []
    for rank in read_ranks(trained):
        recorded = Recorded(trained / "spool", rank=rank)
        assert [step for step, _ in recorded.spans("pp-send")] == expected
        assert [step for step, _ in recorded.spans("pp-recv")] == expected


@pytest.mark.multiproc
@pytest.mark.slow
def test_each_forward_and_backward_has_its_chunk(interleaved: Path) -> None:
    starts = {step: sum(num < step for num, _ in MICROBATCHES) for step, _ in MICROBATCHES}
    for rank in range(2):
        recorded = Recorded(interleaved / "spool", rank=rank)
        spans = [
            row
            for row in recorded.rows
            if row.record == RecordType.SPAN and row.kind in {"forward", "backward"}
        ]
        noted = json.loads((interleaved / f"noted-{rank}.json").read_text())

        assert len(noted) == len(spans) == 2 * 2 * len(MICROBATCHES)
        assert dropped(recorded.folder) == {}
        for kind, number, chunk, at_ns in noted:
            (span,) = (row for row in spans if row.start_ns <= at_ns <= row.end_ns)
            seen = (span.kind, starts[span.step] + span.microbatch, span.chunk)
            assert seen == (kind, number, chunk)


@pytest.mark.multiproc
@pytest.mark.slow
def test_training_of_several_chunks_is_bit_identical_with_the_tracer(interleaved: Path) -> None:
    plain, traced = json.loads((interleaved / "losses-1.json").read_text())
    manifest = Recorded(interleaved / "spool", rank=1).manifest

    assert len(plain) == 10
    assert traced == plain
    assert manifest["layout"]["vpp"] == 2
    assert manifest["model"]["num_parameters"] is None  # a chunk is not the model


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_experts", 8),  # without the arguments that describe them
        ("multi_latent_attention", True),
        ("hybrid_layer_pattern", "M*M-"),
        ("experimental_attention_variant", "gated_delta_net"),
    ],
)
def test_the_flops_of_models_that_are_not_described_are_unknown(name: str, value: object) -> None:
    assert megatron.read_flops(ARGUMENTS) is not None
    assert megatron.read_flops(SimpleNamespace(**{**vars(ARGUMENTS), name: value})) is None


def test_the_tokens_of_a_packed_step_are_unknown() -> None:
    packed = SimpleNamespace(**vars(ARGUMENTS), sequence_packing_scheduler="dp_balanced")

    assert megatron.count_step_tokens(packed) is None
