"""Gradients, losses and norms of mixes of schedules, axes and overlap against one process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

from tests.support.ports import fixed_port
from tests.support.tracer.ranks import run_ranks
from tests.support.trainer import gradients

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = pytest.mark.multiproc

TOTAL_MICROBATCHES = 8
SIZES = "--hidden 32 --heads 4 --ffn 32 --seed 5"
TOLERANCE = 1e-5
"""Of a gradient: norm of the difference over its own norm. Sums in another order differ by 1e-6 at
most; a layer norm that misses a share differs by 0.1 and more."""


def main(rank: int, num_ranks: int, folder: Path, flags: Sequence[str]) -> None:
    """Train on a rank of a mix; the last one trains the same batches alone.

    Args:
        rank: Number of this process.
        num_ranks: Number of ranks of the mix, and one.
        folder: Gets the results, and ``alone`` those of the last rank.
        flags: Flags of the model and, after ``--``, of the mix.
    """
    at = flags.index("--")
    model, mix = flags[:at], flags[at + 1 :]
    if rank < num_ranks - 1:
        gradients.main(rank, num_ranks - 1, folder, [*model, *mix])
    else:
        os.environ["MASTER_PORT"] = "0"  # any
        batch = ("--microbatches", str(TOTAL_MICROBATCHES))
        gradients.main(0, 1, folder / "alone", [*model, *batch])


DEEP = "--layers 8"
"""Layers for four stages of two chunks."""

EXPERTS = "--layers 8 --ep 1"
QUICK = [
    ("", "--pp 2 --dp ddp:2 --schedule zbv", 4),
    ("", "--dp 2 --tp 2 --sp --overlap dp,tp", 4),
    ("--kv-heads 2 --optimizer lamb --ep 1", "--dp hsdp:2 --cp 2 --ep 2", 4),
]
NIGHTLY = [
    (DEEP, "--pp 2 --dp 2 --schedule zbv", 4),
    (DEEP, "--dp ddp:2 --cp 2", 4),
    (DEEP, "--pp 2 --tp 2 --sp --schedule interleaved", 4),
    (DEEP, "--dp hsdp:4", 4),
    (DEEP, "--pp 2 --dp 2 --overlap dp,pp", 4),
    (DEEP, "--pp 4 --schedule dualpipev", 4),
    (DEEP, "--pp 4 --schedule zero-bubble", 4),
    (DEEP, "--pp 2 --schedule zero-bubble --chunks 4", 2),
    (DEEP, "--pp 2 --dp ddp:2 --schedule dualpipev --tp 2", 8),
    (DEEP, "--pp 2 --dp 2 --tp 2 --sp --schedule zbv", 8),
    (DEEP, "--pp 2 --cp 2 --tp 2 --sp --schedule zbv", 8),
    (DEEP, "--dp 2 --cp 2 --tp 2", 8),
    (DEEP, "--pp 2 --tp 2 --scatter-gather", 4),
    (DEEP, "--pp 2 --dp 2 --tp 2 --scatter-gather --schedule zbv", 8),
    (DEEP, "--dp hsdp:2 --cp 4", 8),
    (DEEP, "--dp hsdp:4 --tp 2 --sp", 8),
    (DEEP, "--pp 2 --dp hsdp:4 --schedule interleaved", 8),
    (DEEP, "--dp hsdp:4 --overlap dp", 4),
    (DEEP, "--dp ddp:4 --overlap dp", 4),
    (DEEP, "--pp 2 --dp ddp:2 --tp 2 --schedule interleaved --overlap dp,pp,tp", 8),
    (DEEP, "--pp 2 --dp hsdp:4 --schedule zbv --overlap dp", 8),
    (DEEP, "--pp 2 --tp 4 --overlap pp,tp", 8),
    (DEEP, "--dp 2 --cp 2 --tp 2 --sp --overlap dp,tp", 8),
    (EXPERTS, "--dp 4 --ep 2", 4),
    (EXPERTS, "--dp 2 --ep 2 --tp 2", 4),
    (EXPERTS, "--dp 2 --ep 2 --tp 2 --sp", 4),
    (EXPERTS, "--dp ddp:4 --ep 4", 4),
    (EXPERTS, "--dp hsdp:4 --ep 2", 4),
    (EXPERTS, "--dp 2 --ep 2 --cp 2 --tp 2 --sp", 8),
    (EXPERTS, "--pp 2 --dp 2 --ep 2 --tp 2 --schedule zbv", 8),
    (EXPERTS, "--pp 2 --dp 2 --ep 2 --schedule dualpipev", 4),
    (EXPERTS, "--pp 2 --dp 4 --ep 2 --schedule interleaved", 8),
    (EXPERTS, "--dp ddp:4 --ep 2 --tp 2 --sp --overlap dp,tp", 8),
    (EXPERTS, "--dp 4 --ep 4 --overlap dp", 4),
    (f"{DEEP} --kv-heads 2 --optimizer lamb", "--dp hsdp:4", 4),
    (f"{DEEP} --parallel-block --window 5", "--pp 2 --tp 2 --sp", 4),
    (f"{DEEP} --parallel-block", "--dp 2 --tp 2 --overlap dp", 4),
    (f"{DEEP} --window 9 --kv-heads 2", "--dp 2 --cp 2", 4),
    (f"{DEEP} --kv-heads 2", "--dp 2 --tp 2 --sp --overlap dp,tp", 4),
    (f"{DEEP} --optimizer lamb", "--pp 2 --dp 2 --tp 2 --sp", 8),
    (f"{EXPERTS} --optimizer lamb", "--dp ddp:4 --ep 2 --overlap dp", 4),
    (f"{DEEP} --fused", "--dp 2 --tp 2", 4),
]


def microbatches(flags: str) -> str:
    sizes = flags.split("--dp ")
    dp = int(sizes[1].split()[0].rpartition(":")[2]) if len(sizes) > 1 else 1
    return f"--microbatches {TOTAL_MICROBATCHES // dp}"


@pytest.mark.parametrize(
    ("model", "mix", "num_ranks"),
    [*QUICK, *(pytest.param(*mix, marks=pytest.mark.nightly) for mix in NIGHTLY)],
)
def test_a_mix_trains_like_one_process(
    tmp_path: Path, model: str, mix: str, num_ranks: int
) -> None:
    (tmp_path / "alone").mkdir()
    flags = f"{SIZES} {model} -- {mix} {microbatches(mix)}".split()
    port = str(fixed_port())
    run_ranks(__name__, num_ranks + 1, tmp_path, *flags, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)

    alone = torch.load(tmp_path / "alone" / "0.pt")
    seen = set()
    for rank in range(num_ranks):
        saved = torch.load(tmp_path / f"{rank}.pt")
        for name, gradient in saved["gradients"].items():
            seen.add(name)
            whole = alone["gradients"][name]
            error = (gradient - whole).norm() / whole.norm()
            assert error < TOLERANCE, f"rank {rank} {name}: {error:.2g}"
        # Adam divides by the root of a mean square: what is near 0 differs more after each step.
        torch.testing.assert_close(
            torch.tensor(saved["reports"]), torch.tensor(alone["reports"]), rtol=1e-3, atol=0.0
        )
    assert seen == set(alone["gradients"])
