"""Settings of a training run, checked when they are made, and positions of ranks and layers.

Standard library only.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING

from rankscope.tracer.topology import Coords, Layout

from .errors import ConfigError
from .pace import BACKWARD_PACES, FORWARD_PACES, OPTIMIZER_PACES, SEGMENTS_PER_LAYER

if TYPE_CHECKING:
    from .faults.spec import Fault

HEALTHY_STEP_MS = 1500.0
"""Target length of a healthy step for the default pace.

Source: `docs/trainer.md`, "How the pace was chosen".
"""

MIN_PACE_MS = 20.0
"""Shortest default pace: below it, ranks that share a core overrun. Source: as above."""


class PipelineSchedule(StrEnum):
    """Order of the work of a pipeline stage, of `torch.distributed.pipelining`."""

    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    """1F1B with several chunks on each rank (arXiv 2104.04473)."""

    ZERO_BUBBLE = "zero-bubble"
    """ZB-H1: gradients of weights fill the bubble (arXiv 2401.10241); chunks as interleaved."""

    ZBV = "zbv"
    """Zero bubble, two chunks in a V: the first rank has the first and the last stage."""

    DUALPIPEV = "dualpipev"
    """The V of DeepSeek's DualPipe: a forward and a backward of two micro-batches in turn."""

    @property
    def is_v(self) -> bool:
        """Return whether the second chunks are assigned to the ranks in reverse order."""
        return self in (PipelineSchedule.ZBV, PipelineSchedule.DUALPIPEV)

    @property
    def has_chunks(self) -> bool:
        """Return whether a rank may have several chunks."""
        return self is not PipelineSchedule.ONE_F_ONE_B

    @property
    def splits_backward(self) -> bool:
        """Return whether the gradients of weights are computed after those of the input."""
        return self not in (PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.INTERLEAVED)

    @property
    def default_chunks(self) -> int:
        """Return the number of chunks if none is given."""
        return 2 if self.is_v or self is PipelineSchedule.INTERLEAVED else 1


class DataParallel(StrEnum):
    """Form of data parallelism."""

    DDP = "ddp"
    """Each has all weights; gradients are all-reduced."""

    FSDP = "fsdp"
    """Weights, gradients and optimizer are sharded over all."""

    HSDP = "hsdp"
    """Two replicas, each sharded over the half of the ranks."""


class Overlap(StrEnum):
    """Communication that runs behind compute."""

    DP = "dp"
    """Weights are gathered ahead, and gradients reduced behind the last backward."""

    PP = "pp"
    """Receives of 1F1B are posted ahead and not tied to sends, as the other schedules' are."""

    TP = "tp"
    """The products of attention and MLP are computed in chunks, each sent behind the next."""


class OptimizerKind(StrEnum):
    """Optimizer."""

    ADAMW = "adamw"
    LAMB = "lamb"
    """Adam with a step of each weight in proportion to its norm, for large batches."""


class DataSource(StrEnum):
    """Source of the tokens."""

    SYNTHETIC = "synthetic"
    """A loader, with new samples in each step."""

    NONE = "none"
    """No loader: each step has the samples of step 0."""

    ZEROS = "zeros"
    """No loader: all tokens are 0."""


NUM_REPLICAS = 2
"""Replicas of HSDP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of the Llama-like GPT. Small by default: the trainer is about time, not about text."""

    num_layers: int = 4
    hidden_size: int = 64
    num_heads: int = 8
    ffn_size: int = 128
    vocab_size: int = 128
    seq_length: int = 32

    num_experts: int = 0
    """Experts of each layer, each an MLP; 0 for one dense MLP."""

    experts_per_token: int = 2

    num_kv_heads: int = 0
    """Heads of keys and values, each for as many of queries (GQA, arXiv 2305.13245); 0: all."""

    window: int = 0
    """Tokens to which a token attends at most, itself included; 0: all before it."""

    parallel_block: bool = False
    """Whether attention and MLP have the same input, in place of one after the other."""

    def __post_init__(self) -> None:
        for name, size in asdict(self).items():
            least = int(name not in ("num_experts", "num_kv_heads", "window", "parallel_block"))
            if size < least:
                raise ConfigError(f"ModelConfig.{name} must be at least {least}, got {size}")
        if not self.num_kv_heads:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"ModelConfig.num_kv_heads {self.num_kv_heads} must divide the"
                f" {self.num_heads} heads: choose another --kv-heads"
            )
        if 0 < self.num_experts < self.experts_per_token:
            raise ConfigError(
                f"ModelConfig.experts_per_token {self.experts_per_token} is more than the"
                f" {self.num_experts} experts: pass a smaller --top-k"
            )
        if self.hidden_size % (2 * self.num_heads):
            raise ConfigError(
                f"ModelConfig.hidden_size {self.hidden_size} must be an even multiple of"
                f" ModelConfig.num_heads {self.num_heads}: rotary embedding rotates pairs"
            )

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """One training run: model, layout, batch, optimizer, pace and faults."""

    layout: Layout = field(default_factory=Layout)

    world_size: int
    """Number of ranks that were started; must match the layout."""

    model: ModelConfig = field(default_factory=ModelConfig)

    num_steps: int = 30

    num_microbatches: int
    """Micro-batches per data-parallel position and step, at least ``layout.pp``."""

    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    """Schedule of the pipeline; ``layout.vpp`` is its number of chunks on each rank."""

    data_parallel: DataParallel = DataParallel.FSDP

    sequence_parallel: bool = False
    """Whether the ranks of a tp group divide the tokens outside attention and MLP."""

    scatter_gather: bool = False
    """Whether they divide what they all would send to the next stage, and its ranks gather it."""

    overlap: tuple[Overlap, ...] = ()

    microbatch_size: int = 2
    """Sequences in one micro-batch."""

    optimizer: OptimizerKind = OptimizerKind.ADAMW
    learning_rate: float = 1e-2
    max_gradient_norm: float = 1.0

    fused: bool = False
    """Whether norms, rotations and activations are compiled to one kernel each."""

    seed: int = 0
    """Seed of weights and tokens: equal seeds give equal losses on every layout."""

    data: DataSource = DataSource.SYNTHETIC
    data_ms: float = 0.0
    """Additional time to preprocess a batch."""

    prefetch: bool = True
    """Whether the next batch is preprocessed behind the reduction of the gradients."""

    pace_ms: float | None = None
    """Forward time of one local segment; None if the run is not paced."""

    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        self._check_layout()
        self._check_schedule()
        self._check_tokens()
        self._check_experts_and_data()
        self._check_overlap()
        self._check_numbers()
        for fault in self.faults:
            fault.culprits(self.layout)
            if fault.first_step >= self.num_steps:
                raise ConfigError(
                    f"TrainerConfig.faults: {fault} begins after the last step"
                    f" {self.num_steps - 1}: give earlier steps, or more --steps"
                )

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline, over all chunks."""
        return self.layout.pp * self.layout.vpp

    @property
    def num_samples(self) -> int:
        """Sequences of one step on all data-parallel positions."""
        return self.num_microbatches * self.microbatch_size * self.layout.dp

    @property
    def rows_per_microbatch(self) -> int:
        """Tokens of one micro-batch on one data and context position."""
        return self.microbatch_size * self.model.seq_length // self.layout.cp

    @property
    def num_tokens_per_position(self) -> int:
        """Tokens of one step on one data and context position."""
        return self.num_microbatches * self.rows_per_microbatch

    @property
    def num_tokens(self) -> int:
        """Tokens of one step on all positions."""
        return self.num_tokens_per_position * self.layout.dp * self.layout.cp

    def stages_of(self, pp: int) -> tuple[int, ...]:
        """Return the stages of a pipeline position, one for each chunk."""
        size, chunks = self.layout.pp, range(self.layout.vpp)
        if self.schedule.is_v:
            return tuple(chunk * size + (size - 1 - pp if chunk % 2 else pp) for chunk in chunks)
        return tuple(chunk * size + pp for chunk in chunks)

    def layers_of_position(self, pp: int) -> tuple[int, ...]:
        """Return the layers of all chunks of a pipeline position."""
        return tuple(
            layer
            for stage in self.stages_of(pp)
            for layer in layers_of_stage(
                stage, num_layers=self.model.num_layers, num_stages=self.num_stages
            )
        )

    def to_dict(self) -> dict[str, object]:
        """Return the settings as plain values, as in the manifest.

        The faults are left out: the diagnosis, which should find them, reads the manifest.
        """
        plain = {
            item.name: getattr(self, item.name) for item in fields(self) if item.name != "faults"
        }
        return plain | {"layout": self.layout.to_dict(), "model": asdict(self.model)}

    def _check_layout(self) -> None:
        layout, model = self.layout, self.model
        if layout.dsp != 1:
            raise ConfigError("TrainerConfig.layout.dsp must be 1: this trainer has no such axis")
        if layout.world_size != self.world_size:
            cp = f" x cp {layout.cp}" if layout.cp > 1 else ""
            raise ConfigError(
                f"TrainerConfig.layout is pp {layout.pp} x dp {layout.dp}{cp} x tp {layout.tp} ="
                f" {layout.world_size} ranks, but {self.world_size} were started: run torchrun"
                f" --nproc-per-node {layout.world_size}, or change --pp, --dp, --cp, --tp"
            )
        if model.num_layers < self.num_stages:
            raise ConfigError(
                f"ModelConfig.num_layers {model.num_layers} is less than the {self.num_stages}"
                f" pipeline stages: pass --layers {self.num_stages} or more, or a smaller --pp"
            )
        if layout.tp > 1 and model.parallel_block and model.num_experts:
            raise ConfigError(
                "ModelConfig.parallel_block with tp adds up attention and one dense MLP: leave out"
                " --parallel-block, --experts and --ep, or --tp"
            )
        for name in ("num_heads", "num_kv_heads", "ffn_size"):
            if getattr(model, name) % layout.tp:
                raise ConfigError(
                    f"ModelConfig.{name} {getattr(model, name)} is not divisible by"
                    f" tp {layout.tp}: choose a --tp that divides it"
                )

    def _check_schedule(self) -> None:
        layout, schedule, num = self.layout, self.schedule, self.num_microbatches
        if schedule is not PipelineSchedule.ONE_F_ONE_B and layout.pp == 1:
            raise ConfigError(
                f"TrainerConfig.schedule {schedule} needs a pipeline: pass --pp 2 or more"
            )
        if layout.vpp != 1 and not schedule.has_chunks:
            raise ConfigError(
                f"TrainerConfig.layout.vpp {layout.vpp} needs --schedule interleaved:"
                " 1f1b has one chunk on each rank"
            )
        if schedule.is_v and layout.vpp != schedule.default_chunks:
            raise ConfigError(
                f"TrainerConfig.layout.vpp must be 2 with --schedule {schedule}, got {layout.vpp}:"
                " leave out --chunks"
            )
        least = 2 * layout.pp if schedule is PipelineSchedule.DUALPIPEV else layout.pp
        if num < least:
            raise ConfigError(
                f"TrainerConfig.num_microbatches {num} is less than the {least} pipeline stages:"
                f" {schedule} needs one per stage, pass --microbatches {least} or more"
            )
        num_rounds = num // layout.pp
        if (
            schedule in (PipelineSchedule.INTERLEAVED, PipelineSchedule.ZERO_BUBBLE)
            and num % num_rounds
        ):
            raise ConfigError(
                f"TrainerConfig.num_microbatches {num} does not divide into {num_rounds} equal"
                f" rounds: pass --microbatches {num_rounds * layout.pp}"
            )

    def _check_tokens(self) -> None:
        layout, length = self.layout, self.model.seq_length
        if layout.cp > 1 and length % (2 * layout.cp):
            raise ConfigError(
                f"ModelConfig.seq_length {length} is not divisible by 2 x cp {layout.cp}: each"
                " rank has two pieces of a sequence, choose another --seq"
            )
        if self.sequence_parallel and layout.tp == 1:
            raise ConfigError(
                "TrainerConfig.sequence_parallel divides tokens over a tp group:"
                " pass --tp 2 or more, or leave out --sp"
            )
        if self.scatter_gather and (self.sequence_parallel or 1 in (layout.tp, layout.pp)):
            raise ConfigError(
                "TrainerConfig.scatter_gather divides the sends of a pipeline over a tp group: pass"
                " --pp and --tp of 2 or more, and leave out --sp, which divides them already"
            )
        is_divided = self.sequence_parallel or self.scatter_gather or self.model.num_experts
        if is_divided and self.rows_per_microbatch % layout.tp:
            raise ConfigError(
                f"a micro-batch of {self.rows_per_microbatch} tokens is not divisible by"
                f" tp {layout.tp}: choose another --seq or --microbatch-size"
            )

    def _check_experts_and_data(self) -> None:
        layout, num_experts = self.layout, self.model.num_experts
        if layout.ep > 1 and not num_experts:
            raise ConfigError("TrainerConfig.layout.ep needs experts: pass --experts")
        if layout.dp % layout.ep or num_experts % layout.ep:
            raise ConfigError(
                f"TrainerConfig.layout.ep {layout.ep} must divide dp {layout.dp} and the"
                f" {num_experts} experts: choose another --ep, --dp or --experts"
            )
        if self.data_parallel is not DataParallel.HSDP:
            return
        if layout.dp % NUM_REPLICAS or layout.dp * layout.cp < 2 * NUM_REPLICAS:
            raise ConfigError(
                f"TrainerConfig.data_parallel hsdp has {NUM_REPLICAS} replicas, each sharded over"
                f" 2 ranks or more: dp {layout.dp} x cp {layout.cp} must be 4 or more, and dp even"
            )

    def _check_overlap(self) -> None:
        layout = self.layout
        sizes = {Overlap.DP: layout.dp * layout.cp, Overlap.PP: layout.pp, Overlap.TP: layout.tp}
        for overlap in self.overlap:
            if sizes[overlap] == 1:
                raise ConfigError(
                    f"TrainerConfig.overlap {overlap} has nothing to overlap on one rank: pass"
                    f" --{overlap} 2 or more, or leave {overlap} out of --overlap"
                )
        if Overlap.TP not in self.overlap:
            return
        if self.model.parallel_block:
            raise ConfigError(
                "TrainerConfig.overlap tp divides attention and MLP each into chunks: leave out"
                " --parallel-block, or tp of --overlap"
            )
        if self.schedule.splits_backward:
            raise ConfigError(
                f"TrainerConfig.overlap tp needs whole backwards, which {self.schedule} splits:"
                " pass --schedule 1f1b or interleaved, or leave tp out of --overlap"
            )

    def _check_numbers(self) -> None:
        for name in ("num_steps", "microbatch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"TrainerConfig.{name} must be at least 1, got {getattr(self, name)}"
                )
        for name in ("learning_rate", "max_gradient_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(
                    f"TrainerConfig.{name} must be above 0 and finite, got {getattr(self, name)}"
                )
        if not 0 <= self.data_ms < math.inf:
            raise ConfigError(
                f"TrainerConfig.data_ms must be 0 or more and finite, got {self.data_ms}"
            )
        stalls = self.data_ms or any(fault.cause == "data-stall" for fault in self.faults)
        if stalls and self.data is not DataSource.SYNTHETIC:
            raise ConfigError(
                f"TrainerConfig.data {self.data} has no loader that could be late: leave out"
                " --data, or --data-ms and data-stall"
            )
        if self.pace_ms is not None and not 0 < self.pace_ms < math.inf:
            raise ConfigError(
                f"TrainerConfig.pace_ms must be above 0 and finite, got {self.pace_ms}:"
                " leave out --paced to train unpaced"
            )


def default_pace_ms(model: ModelConfig, layout: Layout, *, num_microbatches: int) -> float:
    """Return the pace at which a healthy step takes about `HEALTHY_STEP_MS`, rounded to ms.

    The critical path of a 1F1B step has ``num_microbatches + (pp - 1) / vpp`` forwards and
    backwards of one rank, and the optimizer::

        paces = (num_microbatches + (pp - 1) / vpp) * segments of a rank * 3 + 1
    """
    layers = layers_of_stage(0, num_layers=model.num_layers, num_stages=layout.pp)
    paces_of_rank = len(layers) * SEGMENTS_PER_LAYER * (FORWARD_PACES + BACKWARD_PACES)
    num_passes = num_microbatches + (layout.pp - 1) / layout.vpp
    num_paces = num_passes * paces_of_rank + OPTIMIZER_PACES
    return max(MIN_PACE_MS, float(round(HEALTHY_STEP_MS / num_paces)))


def layers_of_stage(stage: int, *, num_layers: int, num_stages: int) -> range:
    """Return the layers of one pipeline stage; the first stages get the remainder, one each."""
    size, rest = divmod(num_layers, num_stages)
    begin = stage * size + min(stage, rest)
    return range(begin, begin + size + (stage < rest))


def coords_of(rank: int, layout: Layout) -> Coords:
    """Return the position of a global rank.

    ``rank = ((pp * dp_size + dp) * cp_size + cp) * tp_size + tp``; neighbours on dp share experts.

    Raises:
        ValueError: The rank is not in ``[0, layout.world_size)``.
    """
    if not 0 <= rank < layout.world_size:
        raise ValueError(f"rank must be in [0, {layout.world_size}), got {rank}")
    rest, tp = divmod(rank, layout.tp)
    rest, cp = divmod(rest, layout.cp)
    pp, dp = divmod(rest, layout.dp)
    return Coords(pp=pp, dp=dp, cp=cp, tp=tp, ep=dp % layout.ep)


def ranks_of_stage(stage: int, layout: Layout) -> tuple[int, ...]:
    """Return the global ranks of one pipeline position, ascending."""
    return tuple(rank for rank in range(layout.world_size) if coords_of(rank, layout).pp == stage)


def context_positions(cp: int, *, num_ranks: int, seq_length: int) -> tuple[int, ...]:
    """Return the positions in a sequence of the tokens of one context-parallel rank.

    A sequence has ``2 * num_ranks`` pieces, and a rank the piece ``cp`` from its begin and from its
    end: so causal attention is equal work on all ranks.
    """
    if num_ranks == 1:
        return tuple(range(seq_length))
    size = seq_length // (2 * num_ranks)
    pieces = (cp, 2 * num_ranks - 1 - cp)
    return tuple(piece * size + index for piece in pieces for index in range(size))
