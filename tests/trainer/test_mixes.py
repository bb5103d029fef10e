"""Gradients, losses and norms of mixes of schedules, axes and overlap against one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from tests.support.ports import fixed_port
from tests.support.tracer.ranks import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.multiproc

TOTAL_MICROBATCHES = 8
MODEL = ("--layers", "8", "--hidden", "32", "--heads", "4", "--ffn", "32", "--seed", "5")
TOLERANCE = 1e-5
"""Of a gradient: norm of the difference over its own norm. Sums in another order differ by 1e-6 at
most; a layer norm that misses a share differs by 0.1 and more."""


@dataclass(frozen=True, slots=True)
class Trained:
    """Gradients, losses and norms that the ranks of a job saved."""

    gradients: list[dict[str, torch.Tensor]]
    """Of each rank, by name."""

    reports: list[list[tuple[float, float]]]
    """Loss and norm of the gradient, of each rank and step."""


def train_mix(folder: Path, *flags: str, num_ranks: int) -> Trained:
    run_ranks(
        "tests.support.trainer.gradients",
        num_ranks,
        folder,
        *(*MODEL, *flags),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(fixed_port()),
    )
    saved = [torch.load(folder / f"{rank}.pt") for rank in range(num_ranks)]
    return Trained([rank["gradients"] for rank in saved], [rank["reports"] for rank in saved])


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    flags = ("--microbatches", str(TOTAL_MICROBATCHES))
    return train_mix(tmp_path_factory.mktemp("dense"), *flags, num_ranks=1)


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    flags = ("--microbatches", str(TOTAL_MICROBATCHES), "--ep", "1")
    return train_mix(tmp_path_factory.mktemp("experts"), *flags, num_ranks=1)


def check_equal(mix: Trained, alone: Trained) -> None:
    (whole,) = alone.gradients
    seen = set()
    for rank, gradients in enumerate(mix.gradients):
        for name, gradient in gradients.items():
            seen.add(name)
            error = (gradient - whole[name]).norm() / whole[name].norm()
            assert error < TOLERANCE, f"rank {rank} {name}: {error:.2g}"
    assert seen == set(whole)
    for reports in mix.reports:
        # Adam divides by the root of a mean square: what is near 0 differs more after each step.
        torch.testing.assert_close(
            torch.tensor(reports), torch.tensor(alone.reports[0]), rtol=1e-3, atol=0.0
        )


QUICK = [
    ("--pp 2 --dp 2 --schedule zbv", 4),
    ("--dp ddp:2 --cp 2", 4),
    ("--dp 2 --tp 2 --sp --overlap dp,tp", 4),
]
NIGHTLY = [
    ("--pp 2 --tp 2 --sp --schedule interleaved", 4),
    ("--dp hsdp:4", 4),
    ("--pp 2 --dp 2 --overlap dp,pp", 4),
    ("--pp 4 --schedule dualpipev", 4),
    ("--pp 4 --schedule zero-bubble", 4),
    ("--pp 2 --schedule zero-bubble --chunks 4", 2),
    ("--pp 2 --dp ddp:2 --schedule dualpipev --tp 2", 8),
    ("--pp 2 --dp 2 --tp 2 --sp --schedule zbv", 8),
    ("--pp 2 --cp 2 --tp 2 --sp --schedule zbv", 8),
    ("--dp 2 --cp 2 --tp 2", 8),
    ("--pp 2 --tp 2 --scatter-gather", 4),
    ("--pp 2 --dp 2 --tp 2 --scatter-gather --schedule zbv", 8),
    ("--dp hsdp:2 --cp 4", 8),
    ("--dp hsdp:4 --tp 2 --sp", 8),
    ("--pp 2 --dp hsdp:4 --schedule interleaved", 8),
    ("--dp hsdp:4 --overlap dp", 4),
    ("--dp ddp:4 --overlap dp", 4),
    ("--pp 2 --dp ddp:2 --tp 2 --schedule interleaved --overlap dp,pp,tp", 8),
    ("--pp 2 --dp hsdp:4 --schedule zbv --overlap dp", 8),
    ("--pp 2 --tp 4 --overlap pp,tp", 8),
    ("--dp 2 --cp 2 --tp 2 --sp --overlap dp,tp", 8),
]
QUICK_EXPERTS = [("--dp 4 --ep 2 --pp 1", 4)]
NIGHTLY_EXPERTS = [
    ("--dp 2 --ep 2 --tp 2", 4),
    ("--dp 2 --ep 2 --tp 2 --sp", 4),
    ("--dp ddp:4 --ep 4", 4),
    ("--dp hsdp:4 --ep 2", 4),
    ("--dp 2 --ep 2 --cp 2 --tp 2 --sp", 8),
    ("--pp 2 --dp 2 --ep 2 --tp 2 --schedule zbv", 8),
    ("--pp 2 --dp 2 --ep 2 --schedule dualpipev", 4),
    ("--pp 2 --dp 4 --ep 2 --schedule interleaved", 8),
    ("--dp ddp:4 --ep 2 --tp 2 --sp --overlap dp,tp", 8),
    ("--dp 4 --ep 4 --overlap dp", 4),
]
MODELS = [
    ("--kv-heads 2 --optimizer lamb", "--dp hsdp:4", 4),
]
NIGHTLY_MODELS = [
    ("--parallel-block --window 5", "--pp 2 --tp 2 --sp", 4),
    ("--parallel-block", "--dp 2 --tp 2 --overlap dp", 4),
    ("--window 9 --kv-heads 2", "--dp 2 --cp 2", 4),
    ("--kv-heads 2", "--dp 2 --tp 2 --sp --overlap dp,tp", 4),
    ("--optimizer lamb", "--pp 2 --dp 2 --tp 2 --sp", 8),
    ("--optimizer lamb --ep 1", "--dp ddp:4 --ep 2 --overlap dp", 4),
    ("--fused", "--dp 2 --tp 2", 4),
]


def microbatches(flags: str) -> str:
    sizes = flags.split("--dp ")
    dp = int(sizes[1].split()[0].rpartition(":")[2]) if len(sizes) > 1 else 1
    return f"--microbatches {TOTAL_MICROBATCHES // dp}"


@pytest.mark.parametrize(
    ("flags", "num_ranks"),
    [*QUICK, *(pytest.param(*mix, marks=pytest.mark.nightly) for mix in NIGHTLY)],
)
def test_a_mix_has_the_gradients_of_one_process(
    dense: Trained, tmp_path: Path, flags: str, num_ranks: int
) -> None:
    mix = train_mix(tmp_path, *flags.split(), *microbatches(flags).split(), num_ranks=num_ranks)

    check_equal(mix, dense)


@pytest.mark.parametrize(
    ("flags", "num_ranks"),
    [*QUICK_EXPERTS, *(pytest.param(*mix, marks=pytest.mark.nightly) for mix in NIGHTLY_EXPERTS)],
)
def test_a_mix_with_experts_has_the_gradients_of_one_process(
    with_experts: Trained, tmp_path: Path, flags: str, num_ranks: int
) -> None:
    mix = train_mix(tmp_path, *flags.split(), *microbatches(flags).split(), num_ranks=num_ranks)

    check_equal(mix, with_experts)


@pytest.mark.parametrize(
    ("model", "mix", "num_ranks"),
    [*MODELS, *(pytest.param(*mix, marks=pytest.mark.nightly) for mix in NIGHTLY_MODELS)],
)
def test_a_mix_trains_other_models_and_optimizers_like_one_process(
    tmp_path: Path, model: str, mix: str, num_ranks: int
) -> None:
    for folder in ("alone", "mix"):
        (tmp_path / folder).mkdir()
    batch = ("--microbatches", str(TOTAL_MICROBATCHES))
    alone = train_mix(tmp_path / "alone", *batch, *model.split(), num_ranks=1)

    trained = train_mix(
        tmp_path / "mix",
        *microbatches(mix).split(),
        *model.split(),
        *mix.split(),
        num_ranks=num_ranks,
    )

    check_equal(trained, alone)
