"""Memory of the devices and its contents, by pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .text import format_bytes, format_decimal_bytes

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """Bytes of a model's state."""

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float

    @property
    def total_bytes(self) -> float:
        """Return their sum."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    def text(self, format_size: Callable[[int], str] = format_bytes) -> str:
        """Return it in words: "700 GB parameters + 700 GB gradients + 1,400 GB optimizer"."""
        named = (
            (self.parameter_bytes, "parameters"),
            (self.gradient_bytes, "gradients"),
            (self.optimizer_bytes, "optimizer"),
        )
        return " + ".join(f"{format_size(round(size))} {name}" for size, name in named)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """The rank of a stage whose allocator had the highest peak; None is unknown."""

    stage: int
    rank: int
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    """With what the allocator caches."""

    capacity_bytes: int | None
    """Memory of the device without what is used outside of the allocator."""

    device_bytes: int | None
    num_alloc_retries: int | None
    """Times in these steps that the memory was full until the allocator freed its cache."""

    state: ModelState | None
    """Of this rank, by the shapes of its tensors."""

    activation_bytes: float | None
    """By formula."""

    @property
    def full_ratio(self) -> float | None:
        """Return the peak over what the allocator can have."""
        if self.peak_allocated_bytes is None or not self.capacity_bytes:
            return None
        return self.peak_allocated_bytes / self.capacity_bytes

    @property
    def rest_bytes(self) -> float | None:
        """Return what of the peak neither the state nor the activations explain."""
        parts = self.peak_allocated_bytes, self.state, self.activation_bytes
        peak, state, activations = parts
        if peak is None or state is None or activations is None:
            return None
        return peak - state.total_bytes - activations


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """The memory of a run's devices."""

    stages: tuple[StageMemory, ...]
    whole: ModelState | None
    """Of the whole model with Adam in float32, by its number of parameters; None if unknown."""

    missing_activations: str
    """Why those are unknown; "" if they are known."""

    @property
    def whole_text(self) -> str:
        """Return the state of the whole model in words; "" if unknown."""
        if self.whole is None:
            return ""
        parts = self.whole.text(format_decimal_bytes)
        return f"the model with Adam in float32 takes {parts}, over all shards"

    @property
    def fullest(self) -> StageMemory | None:
        """Return the stage with the least room; None if no peak is known."""
        known = [stage for stage in self.stages if stage.peak_allocated_bytes is not None]
        return max(
            known,
            key=lambda each: (each.full_ratio or 0.0, each.peak_allocated_bytes or 0),
            default=None,
        )

    @property
    def text(self) -> str:
        """Return it in one clause: "71.2 GiB of 80.0 GiB at the peak of rank 3; ..."."""
        stage = self.fullest
        if stage is None or stage.peak_allocated_bytes is None:
            if not self.stages:
                return self.whole_text
            state = self.stages[0].state
            of_rank = f"rank {self.stages[0].rank}; its peak is unknown"
            return "" if state is None else f"{state.text()} of {of_rank}"
        size = "" if stage.device_bytes is None else f" of {format_bytes(stage.device_bytes)}"
        parts = [
            f"{format_bytes(stage.peak_allocated_bytes)}{size} at the peak of rank {stage.rank}"
        ]
        if stage.peak_reserved_bytes is not None:
            parts.append(f"{format_bytes(stage.peak_reserved_bytes)} with the allocator's cache")
        if stage.state is not None:
            parts.append(stage.state.text())
        if stage.activation_bytes is not None:
            parts.append(f"{format_bytes(round(stage.activation_bytes))} activations by formula")
        return "; ".join(parts)
