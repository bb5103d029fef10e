"""Loss curves of AdamW and LAMB at a small batch and at four times its size.

    nice -n 15 python -m benchmarks.optimizers [--steps 160] [--out FILE.md]

Each run trains the toy model of `rankscope.trainer` in one process, on the same number of tokens,
with each of a few learning rates; the one with the lowest loss at the end counts. The loss is that
of random tokens of which each has four possible successors: from ln 128 = 4.85 towards ln 4 = 1.39.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch.distributed as dist

from rankscope.trainer.config import ModelConfig, OptimizerKind, TrainerConfig
from rankscope.trainer.loop import build_rank
from rankscope.trainer.loop import train as train_rank
from rankscope.trainer.parallel import build_meshes, join_job, pick_device

BATCH = 8
"""Sequences of a step."""

NUM_POINTS = 8
"""Parts of a run of which the mean loss is reported."""

RATES = {("adamw", 1): (1e-2, 3e-3), ("adamw", 4): (1e-2, 3e-2), ("lamb", 4): (1e-2, 3e-2, 1e-1)}
"""Learning rates by optimizer and times the small batch."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Mean losses of the parts of a run."""

    optimizer: str
    factor: int
    """Times the small batch."""

    rate: float
    losses: tuple[float, ...]


def train(optimizer: str, factor: int, rate: float, *, num_steps: int) -> Curve:
    """Train once; with a larger batch for fewer steps."""
    config = TrainerConfig(
        world_size=1,
        model=ModelConfig(num_layers=2),
        num_steps=num_steps // factor,
        num_microbatches=1,
        microbatch_size=BATCH * factor,
        optimizer=OptimizerKind(optimizer),
        learning_rate=rate,
    )
    device = pick_device()
    state = build_rank(config, rank=0, meshes=build_meshes(config, device), device=device)
    losses = [report.loss for report in train_rank(state)]
    size = len(losses) // NUM_POINTS
    return Curve(
        optimizer,
        factor,
        rate,
        tuple(mean(losses[size * part : size * (part + 1)]) for part in range(NUM_POINTS)),
    )


def describe(curves: list[Curve], *, num_steps: int) -> str:
    """Return the table: the best rate of each optimizer and batch, then its curve."""
    titles = ("optimizer", "batch", "steps", "rate", *map(str, range(1, NUM_POINTS + 1)))
    lines = [f"| {' | '.join(titles)} |", f"| {' | '.join('---' for _ in titles)} |"]
    for optimizer, factor in sorted({(curve.optimizer, curve.factor) for curve in curves}):
        best = min(
            (curve for curve in curves if (curve.optimizer, curve.factor) == (optimizer, factor)),
            key=lambda curve: curve.losses[-1],
        )
        cells = (
            optimizer,
            str(BATCH * factor),
            str(num_steps // factor),
            f"{best.rate:g}",
            *(f"{loss:.3f}" for loss in best.losses),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Train and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=160, help="of the small batch")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    join_job(pick_device())
    curves = []
    for (optimizer, factor), rates in RATES.items():
        for rate in rates:
            curve = train(optimizer, factor, rate, num_steps=options.steps)
            print(f"{optimizer} x {factor}, rate {rate:g}: {curve.losses[-1]:.3f}", flush=True)
            curves.append(curve)
    dist.destroy_process_group()
    table = describe(curves, num_steps=options.steps)
    print(table)
    if options.out is not None:
        options.out.write_text(
            "# AdamW and LAMB at four times the batch\n\n"
            "Written by `python -m benchmarks.optimizers`. Mean loss, in nats, of each eighth of a"
            " run; all runs have the same number of tokens. Of each optimizer and batch, the"
            " learning rate that ends lowest, of"
            f" {', '.join(f'{name} {rates}' for (name, _), rates in RATES.items())}.\n\n{table}\n"
        )


if __name__ == "__main__":
    main()
