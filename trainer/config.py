"""Settings of a training run, checked when they are made, and positions of ranks and layers.

Standard library only.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of the Llama-like GPT. Small by default: the trainer is about time, not about text."""

    num_layers: int = 4
    hidden_size: int = 64
    num_heads: int = 8
    ffn_size: int = 128
    vocab_size: int = 128
    seq_length: int = 32

    def __post_init__(self) -> None:
        for name, size in asdict(self).items():
            if size < 1:
                raise ConfigError(f"ModelConfig.{name} must be at least 1, got {size}")
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

    microbatch_size: int = 2
    """Sequences in one micro-batch."""

    learning_rate: float = 1e-2
    max_gradient_norm: float = 1.0

    seed: int = 0
    """Seed of weights and tokens: equal seeds give equal losses on every layout."""

    pace_ms: float | None = None
    """Forward time of one local segment; None if the run is not paced."""

    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        self._check_layout()
        self._check_numbers()
        for fault in self.faults:
            fault.culprits(self.layout)
            if fault.first_step >= self.num_steps:
                raise ConfigError(
                    f"TrainerConfig.faults: {fault} begins after the last step"
                    f" {self.num_steps - 1}: give earlier steps, or more --steps"
                )

    @property
    def num_tokens_per_position(self) -> int:
        """Tokens of one step on one data-parallel position."""
        return self.num_microbatches * self.microbatch_size * self.model.seq_length

    @property
    def num_tokens(self) -> int:
        """Tokens of one step on all data-parallel positions."""
        return self.num_tokens_per_position * self.layout.dp

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
        for axis in ("cp", "ep", "dsp", "vpp"):
            if layout.to_dict()[axis] != 1:
                raise ConfigError(
                    f"TrainerConfig.layout.{axis} must be 1: this trainer has only pp, dp and tp"
                )
        if layout.world_size != self.world_size:
            raise ConfigError(
                f"TrainerConfig.layout is pp {layout.pp} x dp {layout.dp} x tp {layout.tp} ="
                f" {layout.world_size} ranks, but {self.world_size} were started:"
                f" run torchrun --nproc-per-node {layout.world_size}, or change --pp, --dp, --tp"
            )
        if model.num_layers < layout.pp:
            raise ConfigError(
                f"ModelConfig.num_layers {model.num_layers} is less than the {layout.pp} pipeline"
                f" stages: pass --layers {layout.pp} or more, or a smaller --pp"
            )
        for name in ("num_heads", "ffn_size"):
            if getattr(model, name) % layout.tp:
                raise ConfigError(
                    f"ModelConfig.{name} {getattr(model, name)} is not divisible by"
                    f" tp {layout.tp}: choose a --tp that divides it"
                )

    def _check_numbers(self) -> None:
        for name in ("num_steps", "microbatch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"TrainerConfig.{name} must be at least 1, got {getattr(self, name)}"
                )
        if self.num_microbatches < self.layout.pp:
            raise ConfigError(
                f"TrainerConfig.num_microbatches {self.num_microbatches} is less than the"
                f" {self.layout.pp} pipeline stages: 1F1B needs one per stage, pass"
                f" --microbatches {self.layout.pp} or more"
            )
        for name in ("learning_rate", "max_gradient_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(
                    f"TrainerConfig.{name} must be above 0 and finite, got {getattr(self, name)}"
                )
        if self.pace_ms is not None and not 0 < self.pace_ms < math.inf:
            raise ConfigError(
                f"TrainerConfig.pace_ms must be above 0 and finite, got {self.pace_ms}:"
                " leave out --paced to train unpaced"
            )


def default_pace_ms(model: ModelConfig, layout: Layout, *, num_microbatches: int) -> float:
    """Return the pace at which a healthy step takes about `HEALTHY_STEP_MS`, rounded to ms.

    The critical path of a 1F1B step has ``num_microbatches + pp - 1`` forwards and backwards of
    one stage, and the optimizer::

        paces = (num_microbatches + pp - 1) * segments of a stage * 3 + 1
    """
    layers = layers_of_stage(0, num_layers=model.num_layers, num_stages=layout.pp)
    paces_of_stage = len(layers) * SEGMENTS_PER_LAYER * (FORWARD_PACES + BACKWARD_PACES)
    num_paces = (num_microbatches + layout.pp - 1) * paces_of_stage + OPTIMIZER_PACES
    return max(MIN_PACE_MS, float(round(HEALTHY_STEP_MS / num_paces)))


def layers_of_stage(stage: int, *, num_layers: int, num_stages: int) -> range:
    """Return the layers of one pipeline stage; the first stages get the remainder, one each."""
    size, rest = divmod(num_layers, num_stages)
    begin = stage * size + min(stage, rest)
    return range(begin, begin + size + (stage < rest))


def coords_of(rank: int, layout: Layout) -> Coords:
    """Return the position of a global rank: ``rank = (pp * dp_size + dp) * tp_size + tp``.

    Raises:
        ValueError: The rank is not in ``[0, layout.world_size)``.
    """
    if not 0 <= rank < layout.world_size:
        raise ValueError(f"rank must be in [0, {layout.world_size}), got {rank}")
    rest, tp = divmod(rank, layout.tp)
    pp, dp = divmod(rest, layout.dp)
    return Coords(pp=pp, dp=dp, tp=tp)


def ranks_of_stage(stage: int, layout: Layout) -> tuple[int, ...]:
    """Return the global ranks of one pipeline stage, ascending."""
    return tuple(rank for rank in range(layout.world_size) if coords_of(rank, layout).pp == stage)
