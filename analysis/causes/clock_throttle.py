"""Slow compute that a lower clock of the device explains, in whole or in part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..readers.workers import remove_partner_waits
from ..replay.model import COMPUTE_KINDS, has_kind
from ..report.text import format_percent, format_ranks
from ..statistics.thresholds import THRESHOLDS
from .candidate import in_steps
from .detector import Cause

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from ..replay.model import ReplayModel
    from ..statistics.peers import ComputeProfile
    from ..trace.context import SampleTable
    from ..trace.tables import RankInfo
    from .candidate import Candidate

PART_MARK = ":"
"""Separates the name of a sum from that of a part of it (a port, a process). A part may have any
name, so only sums are searched for words."""

CLOCK_WORDS = ("clock", "frequency", "freq")
POWER_WORDS = ("power",)
THROTTLE_WORDS = ("throttle",)


PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
UNITS = {"hz": "Hz", "w": "W"}
"""Units by the last part of a reading's name."""

CAUSE = Cause(
    name="clock-throttle",
    one="is slow because its clock is throttled",
    several="are slow because their clocks are throttled",
    has_place=True,
    recurs_as="slow-compute",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockDrop:
    """A reading of a device that differs in a slow phase."""

    name: str
    """Of the reading: ``gpu-clock-hz``."""

    inside: float
    """Median in the phase."""

    usual: float
    """Median of the peers in the phase, or of the device in its other steps: the larger."""

    is_of_peers: bool
    """Whether ``usual`` is that of the peers."""

    explained_ratio: float | None
    """By how much longer compute takes at most; None if the reading is not a clock: power and
    throttle reasons show that a device is throttled, not by how much."""

    def __str__(self) -> str:
        """Write both readings: "GPU clock 1.35 GHz, peers 1.76 GHz"."""
        name, _, unit = self.name.replace("_", "-").rpartition("-")
        if unit not in UNITS:
            name, unit = f"{name}-{unit}", ""
        name = name.strip("-").replace("-", " ").replace("gpu", "GPU")
        against = "peers" if self.is_of_peers else "in other steps"
        inside, usual = _format_reading(self.inside, unit), _format_reading(self.usual, unit)
        return f"{name} {inside}, {against} {usual}"


def _format_reading(value: float, unit: str) -> str:
    """Return a reading with three digits: "1.35 GHz"."""
    if unit not in UNITS:
        return f"{value:.4g}"
    scale, prefix = next((each for each in PREFIXES if abs(value) >= each[0]), PREFIXES[-1])
    return f"{value / scale:.3g} {prefix}{UNITS[unit]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The ranks' devices and their samples."""

    ranks: Mapping[int, RankInfo]
    samples: SampleTable
    step_ns: Mapping[int, tuple[int, int]]
    """(begin, end) of each step, Unix time."""

    def find_drop(self, rank: int, steps: tuple[int, int]) -> ClockDrop | None:
        """Return the drop of a device's clock in the steps from one to another, if there is one."""
        info = self.ranks[rank]
        phase = (self.step_ns[steps[0]][0], self.step_ns[steps[1]][1])
        return find_clock_drop(self.samples, info.host, info.local_rank, phase)


def max_explained(drop: ClockDrop) -> float:
    """Return by how much longer compute takes at most because of a drop; infinite if unknown."""
    return np.inf if drop.explained_ratio is None else drop.explained_ratio


def name_worker(partners: tuple[int, ...], evidence: str) -> str:
    """Return a rank's evidence, with the partners that look the same if it has any."""
    if len(partners) == 1:
        return evidence
    named = format_ranks(partners)
    return f"{named} are one worker whose inner communication is not traced; {evidence}"


def explain_by_clock(
    found: Sequence[Candidate],
    profile: ComputeProfile,
    model: ReplayModel,
    *,
    workers: Mapping[int, tuple[int, ...]],
    devices: Devices,
) -> tuple[Candidate, ...]:
    """Return slow compute with the part that a lower clock explains as `clock-throttle`.

    Compute takes at most as much longer as the clock is lower. If the drop leaves a rest that would
    be reported by itself, and the rank has partners that look the same, the throttle is a candidate
    with its own share, and the rest is slow compute of all partners.

    Args:
        found: Slow ranks; partners are merged.
        profile: Compute of each rank against its peers.
        model: The operations.
        workers: Identity of each rank, equal for partners whose compute looks the same.
        devices: The samples.
    """
    explained: list[Candidate] = []
    for each in found:
        drop = each.clock_drop
        if drop is None:
            explained.append(each)
            continue
        worker = workers[each.ranks[0]]
        partners = tuple(sorted(rank for rank, other in workers.items() if other == worker))
        rest = (1.0 + each.excess_ratio) / (1.0 + max_explained(drop)) - 1.0
        if rest < max(THRESHOLDS.min_excess_ratio, each.threshold):
            explained.append(replace(each, cause=CAUSE, evidence=f"{each.evidence}; {drop}"))
        elif len(partners) == 1:
            share = format_percent(max_explained(drop))
            evidence = f"{each.evidence}; {drop}, which explains at most {share}"
            explained.append(replace(each, cause=CAUSE, evidence=evidence))
        else:
            slow, throttle = _split(each, drop, partners)
            explained.append(slow)
            # A share that would not be reported by itself is no candidate.
            if throttle.excess_ratio >= each.threshold:
                fixed_ns = _without_throttle_ns(each, throttle.excess_ratio, model, workers)
                steps = _steps_with_low_clock(throttle, profile, devices)
                explained.append(replace(throttle, fixed_ns=fixed_ns, steps=steps))
    return tuple(explained)


def _split(
    found: Candidate, drop: ClockDrop, partners: tuple[int, ...]
) -> tuple[Candidate, Candidate]:
    """Return the slow compute of all partners, and the throttle with its share."""
    share = format_percent(max_explained(drop))
    throttled, unknown = format_ranks(found.ranks), "which of its ranks causes the rest is unknown"
    slow = replace(
        found,
        ranks=partners,
        clock_drop=None,
        evidence=name_worker(
            partners,
            f"{found.evidence}; {throttled}: {drop}, which explains at most {share}; {unknown}",
        ),
    )
    throttle = replace(
        found,
        cause=CAUSE,
        excess_ratio=max_explained(drop),
        evidence=(
            f"{throttled}: {drop}, which makes compute {share} longer; the worker's is"
            f" {format_percent(found.excess_ratio)} longer, and {unknown}"
        ),
    )
    return slow, throttle


def _without_throttle_ns(
    found: Candidate,
    share_ratio: float,
    model: ReplayModel,
    workers: Mapping[int, tuple[int, ...]],
) -> NDArray[np.float64]:
    """Return what a worker's compute takes without a throttle that is a share of its excess.

    The recorded duration is ``1 + excess`` times the usual one, and the throttle's share of it is
    ``share``.

    Returns:
        Shape (ops,), ns; NaN for all but compute in the candidate's steps.
    """
    took = remove_partner_waits(model, workers)
    fixed = took * (1.0 - share_ratio / (1.0 + found.excess_ratio))
    computes = model.on_device & has_kind(model, COMPUTE_KINDS)
    return np.where(in_steps(model, found.steps) & computes, fixed, np.nan)


def _steps_with_low_clock(
    throttle: Candidate, profile: ComputeProfile, devices: Devices
) -> tuple[int, int]:
    """Return the steps around a throttle's in which both clock and compute show it.

    It may last longer than the slow phase of the worker, if a partner was slower for a while.
    """
    excess = profile.excess_ratio[np.isin(profile.ranks, throttle.ranks)]
    steps = profile.steps.tolist()
    shows = [
        bool((excess[:, column] > throttle.excess_ratio / 2).any())
        and any(devices.find_drop(rank, (step, step)) is not None for rank in throttle.ranks)
        for column, step in enumerate(steps)
    ]
    first, last = steps.index(throttle.steps[0]), steps.index(throttle.steps[1])
    while first > 0 and shows[first - 1]:
        first -= 1
    while last + 1 < len(steps) and shows[last + 1]:
        last += 1
    return steps[first], steps[last]


def find_clock_drop(
    samples: SampleTable, host: str, device: int, phase_ns: tuple[int, int]
) -> ClockDrop | None:
    """Return the drop of a device's clock in a slow phase; None if there is none.

    The clock is compared with the other devices in the phase and with the device's own other
    steps. Of several clocks, the one that dropped furthest counts. Power counts only if no clock
    was read: a device that waits draws less power and is not throttled.

    Args:
        samples: Readings.
        host: The device's host.
        device: Its local rank.
        phase_ns: (begin, end) of the phase, Unix time.
    """
    place = (host, device)
    clocks = _drops(samples, CLOCK_WORDS, place, phase_ns)
    lower = [each for each in clocks if _is_lower(each)]
    if lower:
        return min(lower, key=lambda each: each.inside / each.usual)
    for each in _drops(samples, THROTTLE_WORDS, place, phase_ns):
        if each.inside > each.usual:
            return each
    power = () if clocks else _drops(samples, POWER_WORDS, place, phase_ns)
    return next((each for each in power if _is_lower(each)), None)


def _is_lower(drop: ClockDrop) -> bool:
    return drop.inside < (1.0 - THRESHOLDS.min_clock_drop_ratio) * drop.usual


def _drops(
    samples: SampleTable,
    words: tuple[str, ...],
    place: tuple[str, int],
    phase_ns: tuple[int, int],
) -> tuple[ClockDrop, ...]:
    """Return what each reading of a device did whose name has one of some words."""
    found = [
        _drop(samples, code, place, phase_ns)
        for code, name in enumerate(samples.names)
        if PART_MARK not in name and _word_group(name) is words
    ]
    return tuple(each for each in found if each is not None)


def _word_group(name: str) -> tuple[str, ...] | None:
    """Return the group of words that a reading's name belongs to; throttle reasons come first."""
    for words in (THROTTLE_WORDS, CLOCK_WORDS, POWER_WORDS):
        if any(word in name for word in words):
            return words
    return None


def _drop(
    samples: SampleTable, code: int, place: tuple[str, int], phase_ns: tuple[int, int]
) -> ClockDrop | None:
    """Return what one reading of a device did; None if there is nothing to compare it with."""
    host, device = place
    if host not in samples.hosts:
        return None
    rows = samples.name == code
    mine = rows & (samples.host == samples.hosts.index(host)) & (samples.device == device)
    within = (samples.at_ns >= phase_ns[0]) & (samples.at_ns <= phase_ns[1])
    inside = samples.value[mine & within]
    peers, own = samples.value[rows & ~mine & within], samples.value[mine & ~within]
    if not len(inside) or not (len(peers) or len(own)):
        return None
    of_peers, of_own = _median(peers), _median(own)
    name, usual = samples.names[code], max(of_peers, of_own)
    explained = None
    if _word_group(name) is CLOCK_WORDS:
        low = float(np.quantile(inside, THRESHOLDS.low_clock_quantile, method="lower"))
        explained = usual / low - 1.0 if low > 0 else np.inf
    return ClockDrop(
        name=name,
        inside=_median(inside),
        usual=usual,
        is_of_peers=of_peers >= of_own,
        explained_ratio=explained,
    )


def _median(values: NDArray[np.float64]) -> float:
    return float(np.median(values)) if len(values) else -np.inf
