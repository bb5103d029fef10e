"""``torchrun --nproc-per-node N -m rankscope.trainer``: train a small GPT on any layout."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rankscope.tracer.topology import Layout

from .config import ModelConfig, TrainerConfig, default_pace_ms
from .errors import ConfigError
from .faults.spec import ENDING_CAUSES, parse_faults

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from .checkpoint import Checkpoints
    from .loop import RankState

PACE_REPORT_STEPS = 5
"""Steps between two reports of the pace to the tracer."""

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Train with the settings of the command line and return the exit code."""
    args = _parser().parse_args(argv)
    rank = int(os.environ.get("RANK", "0"))
    try:
        config = _config(args, world_size=int(os.environ.get("WORLD_SIZE", "1")))
        # Imported here, so that checking flags and printing --help needs no torch.
        from .parallel import pick_device

        device = pick_device()
        if config.pace_ms is not None and device.type == "cuda":
            raise ConfigError("paced mode works on CPU alone: leave out --paced on CUDA")
    except ValueError as problem:
        if rank == 0:
            print(f"trainer: {problem}", file=sys.stderr)
        return EXIT_USAGE
    try:
        _run(config, device, rank=rank, args=args)
    except KeyboardInterrupt:
        # torchrun forwards the Ctrl-C that the terminal has already sent to this process.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return EXIT_INTERRUPTED
    return 0


def _run(
    config: TrainerConfig, device: torch.device, *, rank: int, args: argparse.Namespace
) -> None:
    import torch.distributed as dist

    from rankscope import tracer

    from .faults.rank_faults import set_environment
    from .loop import build_rank, train, warm_up
    from .parallel import build_mesh, join_job
    from .tracing import report_pace, start_tracing

    set_environment(config.faults, rank=rank)
    if args.hosts:
        os.environ["RANKSCOPE_HOST"] = args.hosts.split(",")[rank]
    join_job(device)
    mesh = build_mesh(config.layout, device)
    state = build_rank(config, rank=rank, mesh=mesh, device=device)
    start_tracing(state, spool=args.trace, run=args.run)
    if rank == 0:
        layout = config.layout
        print(
            f"training pp {layout.pp} dp {layout.dp} tp {layout.tp},"
            f" {config.num_microbatches} micro-batches a step, {config.num_tokens} tokens a step"
        )
        if config.pace_ms is not None:
            print(
                f"paced: each local compute segment is padded by sleep to {config.pace_ms:g} ms"
                f" forward and {2 * config.pace_ms:g} ms backward;"
                " times show this pace, not the CPU"
            )
        for fault in config.faults:
            print(f"fault: {fault}")
        sys.stdout.flush()

    with tracer.span("warm-up"):
        warm_up(state, next(state.batches))
    saver = None
    if args.checkpoint:
        from .checkpoint import Checkpoints  # a second of imports

        saver = Checkpoints(
            Path(args.checkpoint), every=args.checkpoint_every, state=state, mesh=mesh
        )
    first_step = 0 if saver is None else _resume(saver, state)
    gc.collect()
    gc.freeze()
    state.faults.prepare()
    with tracer.span("last barrier before training"):
        dist.barrier()
    tracer.begin_steps(first_step)
    for report in train(state, first_step):
        if rank == 0:
            print(
                f"step {report.step} loss {report.loss:.4f} time_s {report.duration_s:.3f}",
                flush=True,
            )
        if saver is not None:
            saver.after_step(report.step)
        if config.pace_ms is not None and (report.step + 1) % PACE_REPORT_STEPS == 0:
            report_pace(state.timer, config.pace_ms)
    if saver is not None:
        saver.close()
    if config.pace_ms is not None and state.timer.num_segments:
        report_pace(state.timer, config.pace_ms)
        _print_pace(state, device)
    tracer.shutdown()
    dist.destroy_process_group()


def _resume(saver: Checkpoints, state: RankState) -> int:
    """Load the newest checkpoint, and skip the batches before it; return the first step."""
    from rankscope import tracer

    with tracer.span("resume from a checkpoint"):
        first_step = saver.resume()
    if state.rank == 0 and first_step:
        print(f"resumed before step {first_step}", flush=True)
    for _ in range(first_step):
        next(state.batches)
    return first_step


def _print_pace(state: RankState, device: torch.device) -> None:
    """Print the overruns of all ranks and of the worst rank.

    It uses collectives: all ranks must call it, after the last step.
    """
    import torch
    import torch.distributed as dist

    timer = state.timer
    counts = torch.tensor([timer.num_segments, timer.num_overruns], device=device)
    worst = torch.tensor(timer.num_overruns / timer.num_segments, device=device)
    dist.all_reduce(counts)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    num_segments, num_overruns = counts.tolist()
    if state.rank == 0:
        print(
            f"pace num_segments {num_segments} num_overruns {num_overruns}"
            f" overrun_ratio {num_overruns / num_segments:.4f} worst_rank_ratio {worst.item():.4f}",
            flush=True,
        )


def _config(args: argparse.Namespace, *, world_size: int) -> TrainerConfig:
    layout = Layout(pp=args.pp, dp=args.dp, tp=args.tp)
    model = ModelConfig(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_heads=args.heads,
        ffn_size=args.ffn,
        vocab_size=args.vocab,
        seq_length=args.seq,
    )
    num_microbatches = 2 * layout.pp if args.microbatches is None else args.microbatches
    if args.checkpoint_every < 1:
        raise ConfigError(f"--checkpoint-every must be at least 1, got {args.checkpoint_every}")
    if args.hosts and args.hosts.count(",") + 1 != world_size:
        raise ConfigError(f"--hosts must have a name for each of the {world_size} ranks")
    faults = parse_faults(args.fault)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        # The restart of a job that one of them has ended.
        faults = tuple(fault for fault in faults if fault.cause not in ENDING_CAUSES)
    pace_ms: float | None = None
    if args.paced:
        default_ms = default_pace_ms(model, layout, num_microbatches=num_microbatches)
        pace_ms = default_ms if args.pace_ms is None else args.pace_ms
    return TrainerConfig(
        layout=layout,
        world_size=world_size,
        model=model,
        num_steps=args.steps,
        num_microbatches=num_microbatches,
        microbatch_size=args.microbatch_size,
        learning_rate=args.lr,
        seed=args.seed,
        pace_ms=pace_ms,
        faults=faults,
    )


def _parser() -> argparse.ArgumentParser:
    model, run = ModelConfig(), TrainerConfig(world_size=1, num_microbatches=1)
    parser = argparse.ArgumentParser(prog="trainer", description=__doc__)
    add = parser.add_argument
    add("--pp", type=int, default=1, help="pipeline stages")
    add("--dp", type=int, default=1, help="data-parallel positions (FSDP2)")
    add("--tp", type=int, default=1, help="tensor-parallel positions (DTensor)")
    add("--steps", type=int, default=run.num_steps)
    add("--microbatches", type=int, help="per step and data position; default 2 x pp")
    add("--microbatch-size", type=int, default=run.microbatch_size, help="sequences")
    add("--layers", type=int, default=model.num_layers)
    add("--hidden", type=int, default=model.hidden_size)
    add("--heads", type=int, default=model.num_heads)
    add("--ffn", type=int, default=model.ffn_size)
    add("--vocab", type=int, default=model.vocab_size)
    add("--seq", type=int, default=model.seq_length, help="tokens in a sequence")
    add("--lr", type=float, default=run.learning_rate)
    add("--seed", type=int, default=run.seed, help="of weights and tokens")
    add("--paced", action="store_true", help="pad local compute to a set time (docs/trainer.md)")
    add("--pace-ms", type=float, help="forward time of a segment; default: by layout")
    add(
        "--fault",
        action="append",
        default=[],
        metavar="SPEC",
        help="cause:key=value,..., as slow-compute:rank=5,factor=1.8,steps=10-29 or"
        " crash:rank=3,step=7 (docs/trainer.md has all) | none; may be repeated",
    )
    add("--checkpoint", metavar="DIR", help="save into DIR, and resume from its newest checkpoint")
    add("--checkpoint-every", type=int, default=10, metavar="STEPS")
    add(
        "--hosts",
        metavar="NAMES",
        help="names that the ranks give as their hosts, one each, separated by commas",
    )
    add("--trace", metavar="DIR", help="record spans into DIR; default RANKSCOPE_TRACE, else off")
    # torchrun would take --run for an abbreviation of its own --run-path.
    add("--run-name", "--run", dest="run", help="default RANKSCOPE_RUN, else the launcher's id")
    return parser


if __name__ == "__main__":
    sys.exit(main())
