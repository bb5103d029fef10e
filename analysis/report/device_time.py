"""Device time of the steps of a profile: its parts, and the kernels."""

from __future__ import annotations

from dataclasses import dataclass

from .fields import FloatArray
from .text import format_flops_rate, format_percent, format_rate, format_seconds

KERNEL_COLUMNS = ("kernel", "phase", "launches", "per step", "reached")
CHANGE_COLUMNS = ("kernel", "phase", "change", "launches", "time per step", "difference")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTime:
    """Parts of the mean step of each rank on its device, which sum to it."""

    parts: tuple[str, ...]
    """``compute``, ``exposed dp-comm``, ``copies``, ``idle, launch``, ...: docs/reading.md."""

    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    by_rank_s: FloatArray
    """Shape (ranks, parts): mean seconds per step."""

    file_by_rank_s: FloatArray | None = None
    """Shape (ranks, parts): seconds of the whole files, which have other steps as well, and what is
    outside of all; None if an older version imported them."""

    @property
    def file_ratio(self) -> dict[str, float] | None:
        """Share of each part in the files of all ranks."""
        if self.file_by_rank_s is None:
            return None
        total_s = self.file_by_rank_s.sum(axis=0)
        return dict(zip(self.parts, (total_s / total_s.sum()).tolist(), strict=True))

    @property
    def mean_s(self) -> dict[str, float]:
        """Mean of the ranks by part."""
        means = self.by_rank_s.mean(axis=0).tolist()
        return dict(zip(self.parts, means, strict=True))

    def of_rank(self, rank: int) -> dict[str, float]:
        """Return the parts of one rank, seconds per step; empty if it is unknown."""
        if rank not in self.ranks:
            return {}
        own = self.by_rank_s[self.ranks.index(rank)].tolist()
        return dict(zip(self.parts, own, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Launches of one kernel in one phase of the mean step of a rank."""

    phase: str
    """forward, backward or optimizer."""

    stream: str
    """compute, communication or copy."""

    name: str
    num: float
    """Launches per step of a rank."""

    seconds: float
    """Sum of their durations, per step of a rank."""

    longest_s: float
    num_names: int = 1
    """Names that are summed: more than one of ``other``."""

    flops_per_s: float | None = None
    bytes_per_s: float | None = None
    """Between device and memory."""

    flops_ratio: float | None = None
    """Of the dense peak of the device for the type of the numbers."""

    bytes_ratio: float | None = None
    """Of the device's memory bandwidth."""

    @property
    def cells(self) -> tuple[str, ...]:
        """Texts of `KERNEL_COLUMNS`, "" for an unknown rate."""
        return (
            name_kernel(self),
            self.phase,
            format_launches(self.num),
            format_seconds(self.seconds),
            self.reached,
        )

    @property
    def reached(self) -> str:
        """The rates of computation and memory, each with its share of the device's peak.

        The one with the larger share limits the kernel, and is the first: a roofline in words.
        """
        rates = [
            (ratio or 0.0, text if ratio is None else f"{text} ({format_percent(ratio)})")
            for rate, ratio, text in (
                (self.flops_per_s, self.flops_ratio, format_flops_rate(self.flops_per_s)),
                (self.bytes_per_s, self.bytes_ratio, format_rate(self.bytes_per_s)),
            )
            if rate is not None
        ]
        return ", ".join(text for _, text in sorted(rates, key=lambda each: -each[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChange:
    """A kernel that differs between two runs, by phase and name."""

    change: str
    """new, gone, more launches, fewer launches, more time, less time."""

    kernel: Kernel
    """Of the second run; of the first if it is gone."""

    first: Kernel | None
    second: Kernel | None

    @property
    def difference_s(self) -> float:
        """Seconds per step of a rank, second less first."""
        both = self.first, self.second
        first_s, second_s = (0.0 if one is None else one.seconds for one in both)
        return second_s - first_s

    @property
    def cells(self) -> tuple[str, ...]:
        """Texts of `CHANGE_COLUMNS`."""
        both = self.first, self.second
        launches = (format_launches(0.0 if one is None else one.num) for one in both)
        times = (format_seconds(0.0 if one is None else one.seconds) for one in both)
        more_s = self.difference_s
        return (
            name_kernel(self.kernel),
            self.kernel.phase,
            self.change,
            " -> ".join(launches),
            " -> ".join(times),
            f"{'+' if more_s > 0 else ''}{format_seconds(more_s)}",
        )


def name_kernel(kernel: Kernel) -> str:
    """Return the name of a kernel, and how many names it sums."""
    more = f" ({kernel.num_names:,} names)" if kernel.num_names > 1 else ""
    return f"{kernel.name}{more}"


def format_launches(num: float) -> str:
    """Return the launches of a mean step: "180", "0.25"."""
    return f"{num:,.0f}" if num == round(num) else f"{num:,.2f}"
