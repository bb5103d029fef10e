"""The parallel layout of a job, and a rank's coordinates in it.

Standard library only.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the parallel axes. The product of dp, tp, pp, cp and dsp is the world size."""

    dp: int = 1
    """Data parallel, replicated or sharded (DDP, FSDP, ZeRO)."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    """Expert parallel. It overlays dp, so it is not a factor of the world size."""

    dsp: int = 1
    """A further data or sequence parallel factor of some imported traces; it has no coordinate."""

    vpp: int = 1
    """Model chunks per pipeline stage."""

    def __post_init__(self) -> None:
        for axis, size in asdict(self).items():
            if size < 1:
                raise ValueError(f"Layout.{axis} must be at least 1, got {size}")

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self.dp * self.tp * self.pp * self.cp * self.dsp

    def to_dict(self) -> dict[str, int]:
        """Return the sizes by axis name, as in manifests and JSON documents."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coords:
    """Position of one rank on each axis, each ``0 <= position < size``."""

    dp: int = 0
    tp: int = 0
    pp: int = 0
    cp: int = 0
    ep: int = 0

    def to_dict(self) -> dict[str, int]:
        """Return the positions by axis name."""
        return asdict(self)


GROUP_KINDS: dict[str, str] = {
    "tp": "tp-comm",
    "cp": "cp-comm",
    "ep": "ep-comm",
    "dp": "dp-comm",
    "fsdp": "dp-comm",
    "ddp": "dp-comm",
    "dp_shard": "dp-comm",
    "dp_replicate": "dp-comm",
    "dp_shard_cp": "dp-comm",
    "dp_cp": "dp-comm",
    "hsdp": "dp-comm",
    "edp": "dp-comm",
    "efsdp": "dp-comm",
    "dp_mod_ep": "dp-comm",
    "dp_shard_mod_ep": "dp-comm",
    "dp_shard_in_ep": "dp-comm",
    "etp": "tp-comm",
}
"""Span kind of a collective by the mesh axis of its group; any other axis is ``other``."""
