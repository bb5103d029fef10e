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

from .config import (
    DataParallel,
    DataSource,
    ModelConfig,
    OptimizerKind,
    Overlap,
    PipelineSchedule,
    TrainerConfig,
    default_pace_ms,
)
from .errors import ConfigError
from .faults.spec import ENDING_CAUSES, parse_faults

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from .checkpoint import Checkpoints
    from .loop import RankState

NUM_EXPERTS = 8
"""Experts of each layer with ``--ep``, on every layout: so it trains the same model."""

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
        from .model import check_compiler
        from .parallel import pick_device

        device = pick_device()
        if config.pace_ms is not None and device.type == "cuda":
            raise ConfigError("paced mode works on CPU alone: leave out --paced on CUDA")
        if config.fused:
            check_compiler()
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
    from .parallel import build_meshes, join_job
    from .tracing import report_memory, report_pace, start_tracing

    set_environment(config.faults, rank=rank)
    if args.hosts:
        os.environ["RANKSCOPE_HOST"] = args.hosts.split(",")[rank]
    join_job(device)
    state = build_rank(config, rank=rank, meshes=build_meshes(config, device), device=device)
    start_tracing(state, spool=args.trace, run=args.run)
    if rank == 0:
        print(f"training {_describe(config)}")
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
        warm_up(state, state.loader.next_batch())
    state.loader.position = 0
    saver = None
    if args.checkpoint:
        from .checkpoint import Checkpoints  # a second of imports

        with tracer.span("open checkpoints"):
            saver = Checkpoints(Path(args.checkpoint), every=args.checkpoint_every, state=state)
    first_step = _find_position(state, saver, replayed=args.replay_step)
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
        if saver is not None and args.replay_step is None:
            saver.after_step(report.step)
        if config.pace_ms is not None and (report.step + 1) % PACE_REPORT_STEPS == 0:
            report_pace(state.timer, config.pace_ms)
    if saver is not None:
        saver.close()
    if config.pace_ms is not None and state.timer.num_segments:
        report_pace(state.timer, config.pace_ms)
        _print_pace(state, device)
    report_memory(state)
    tracer.shutdown()
    dist.destroy_process_group()


def _find_position(state: RankState, saver: Checkpoints | None, *, replayed: int | None) -> int:
    """Load the newest checkpoint, record the position of the loader, and return the first step.

    No checkpoint after a replayed step is loaded.
    """
    from rankscope import tracer

    from .tracing import report_position

    first_step = 0
    if saver is not None:
        with tracer.span("resume from a checkpoint"):
            first_step = saver.resume(most=replayed)
        if state.rank == 0 and first_step:
            print(f"resumed before step {first_step}", flush=True)
    if replayed is not None:
        state.loader.position += (replayed - first_step) * state.config.num_samples
        first_step = replayed
    samples = report_position(state, first_step)
    if state.rank == 0 and replayed is not None:
        print(f"replaying step {replayed} on samples {samples[0]} to {samples[-1]}", flush=True)
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


def _describe(config: TrainerConfig) -> str:
    layout, model = config.layout, config.model
    parts = [f"pp {layout.pp} dp {layout.dp} tp {layout.tp}"]
    if config.schedule is not PipelineSchedule.ONE_F_ONE_B:
        parts.append(f"{config.schedule} with {layout.vpp} chunks")
    if config.data_parallel is not DataParallel.FSDP:
        parts.append(str(config.data_parallel))
    if config.sequence_parallel:
        parts.append("sequence parallel")
    if config.scatter_gather:
        parts.append("divided sends")
    if config.overlap:
        parts.append(f"overlap of {', '.join(config.overlap)}")
    if layout.cp > 1:
        parts.append(f"cp {layout.cp}")
    if model.num_kv_heads < model.num_heads:
        parts.append(f"{model.num_kv_heads} heads of keys")
    if model.window:
        parts.append(f"window {model.window}")
    if model.parallel_block:
        parts.append("parallel blocks")
    if config.optimizer is not OptimizerKind.ADAMW:
        parts.append(str(config.optimizer))
    if config.fused:
        parts.append("fused")
    if model.num_experts:
        parts.append(f"ep {layout.ep} with {model.num_experts} experts")
    parts.append(f"{config.num_microbatches} micro-batches a step")
    parts.append(f"{config.num_tokens} tokens a step")
    return ", ".join(parts)


def _config(args: argparse.Namespace, *, world_size: int) -> TrainerConfig:
    schedule = PipelineSchedule(args.schedule)
    chunks = schedule.default_chunks if args.chunks is None else args.chunks
    data_parallel, dp = _read_dp(args.dp, args, world_size=world_size)
    layout = Layout(
        pp=args.pp, dp=dp, tp=args.tp, cp=args.cp, ep=1 if args.ep is None else args.ep, vpp=chunks
    )
    experts = (0 if args.ep is None else NUM_EXPERTS) if args.experts is None else args.experts
    least_layers = args.pp * chunks
    model = ModelConfig(
        num_layers=max(ModelConfig().num_layers, least_layers)
        if args.layers is None
        else args.layers,
        hidden_size=args.hidden,
        num_heads=args.heads,
        ffn_size=args.ffn,
        vocab_size=args.vocab,
        seq_length=args.seq,
        num_experts=experts,
        experts_per_token=args.top_k,
        num_kv_heads=args.kv_heads,
        window=args.window,
        parallel_block=args.parallel_block,
    )
    num_microbatches = 2 * layout.pp if args.microbatches is None else args.microbatches
    if args.checkpoint_every < 1:
        raise ConfigError(f"--checkpoint-every must be at least 1, got {args.checkpoint_every}")
    num_steps = args.steps if args.replay_step is None else args.replay_step + 1
    if args.replay_step is not None and args.replay_step < 0:
        raise ConfigError(f"--replay-step must be 0 or more, got {args.replay_step}")
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
        num_steps=num_steps,
        num_microbatches=num_microbatches,
        microbatch_size=args.microbatch_size,
        schedule=schedule,
        data_parallel=data_parallel,
        sequence_parallel=args.sp,
        scatter_gather=args.scatter_gather,
        overlap=_read_overlap(args.overlap),
        optimizer=OptimizerKind(args.optimizer),
        learning_rate=args.lr,
        fused=args.fused,
        seed=args.seed,
        data=DataSource(args.data),
        data_ms=args.data_ms,
        prefetch=args.prefetch,
        pace_ms=pace_ms,
        faults=faults,
    )


def _read_dp(text: str, args: argparse.Namespace, *, world_size: int) -> tuple[DataParallel, int]:
    """Return kind and size of ``4``, ``hsdp`` or ``hsdp:4``; without a size, of all ranks left."""
    kind, _, size = text.rpartition(":") if ":" in text or text.isdecimal() else (text, "", "")
    if (kind and kind not in {*DataParallel}) or (size and not size.isdecimal()):
        raise ConfigError(
            f"--dp {text!r} is neither a number nor {', '.join(DataParallel)}: write --dp 4,"
            " --dp hsdp or --dp hsdp:4"
        )
    data_parallel = DataParallel(kind) if kind else DataParallel.FSDP
    others = max(args.pp * args.cp * args.tp, 1)
    return data_parallel, int(size) if size else max(world_size // others, 1)


def _read_overlap(text: str) -> tuple[Overlap, ...]:
    """Return the parts of ``dp,tp``, in their order of `Overlap`."""
    names = set(filter(None, text.split(",")))
    if names - {*Overlap}:
        raise ConfigError(
            f"--overlap {text!r} has other parts than {', '.join(Overlap)}: write --overlap dp,tp"
        )
    return tuple(overlap for overlap in Overlap if overlap in names)


def _parser() -> argparse.ArgumentParser:
    model, run = ModelConfig(), TrainerConfig(world_size=1, num_microbatches=1)
    parser = argparse.ArgumentParser(prog="trainer", description=__doc__)
    add = parser.add_argument
    add("--pp", type=int, default=1, help="pipeline stages")
    add(
        "--dp",
        default="1",
        metavar="[KIND:]N",
        help="data-parallel positions; KIND is ddp, fsdp (default) or hsdp, KIND alone takes all"
        " ranks that the other axes leave",
    )
    add("--tp", type=int, default=1, help="tensor-parallel positions (DTensor)")
    add("--sp", action="store_true", help="sequence parallel inside of tp")
    add(
        "--scatter-gather",
        action="store_true",
        help="send 1/tp of an activation from each tp rank to the next stage, and gather there",
    )
    add("--cp", type=int, default=1, help="context-parallel positions")
    add("--ep", type=int, help="expert-parallel positions, which divide dp; turns experts on")
    add("--experts", type=int, help=f"of each layer; default {NUM_EXPERTS} with --ep, else none")
    add("--top-k", type=int, default=model.experts_per_token, help="experts of a token")
    add("--schedule", choices=[*map(str, PipelineSchedule)], default="1f1b", help="of the pipeline")
    add("--chunks", type=int, help="stages on each rank; default 2, for zero-bubble 1")
    add("--steps", type=int, default=run.num_steps)
    add("--microbatches", type=int, help="per step and data position; default 2 x pp")
    add("--microbatch-size", type=int, default=run.microbatch_size, help="sequences")
    add(
        "--layers", type=int, help=f"default {model.num_layers}, or one per stage if these are more"
    )
    add("--hidden", type=int, default=model.hidden_size)
    add("--heads", type=int, default=model.num_heads)
    add("--ffn", type=int, default=model.ffn_size)
    add("--vocab", type=int, default=model.vocab_size)
    add("--seq", type=int, default=model.seq_length, help="tokens in a sequence")
    add("--overlap", default="", metavar="dp,pp,tp", help="communication behind compute")
    add("--kv-heads", type=int, default=0, help="of keys and values (GQA); default: all heads")
    add("--window", type=int, default=0, help="tokens to which a token attends; default: all")
    add("--parallel-block", action="store_true", help="attention and MLP with the same input")
    add("--optimizer", choices=[*map(str, OptimizerKind)], default=str(run.optimizer))
    add("--fused", action="store_true", help="compile norms, rotations and activations")
    add(
        "--data",
        choices=[*map(str, DataSource)],
        default=str(run.data),
        help="synthetic; without a loader: the samples of step 0 in each (none), or all tokens 0",
    )
    add("--data-ms", type=float, default=run.data_ms, help="additional time to read a batch")
    add(
        "--prefetch",
        action=argparse.BooleanOptionalAction,
        default=run.prefetch,
        help="read the next batch while the gradients are reduced",
    )
    add(
        "--replay-step",
        type=int,
        metavar="STEP",
        help="train this step alone, on its samples, from the newest checkpoint not after it",
    )
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
