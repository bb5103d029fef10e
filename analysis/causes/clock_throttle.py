"""How much of a rank's slowness its device's clock explains, and whose the rest may be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..readers.tp_partners import remove_partner_waits
from ..replay.model import COMPUTE_KINDS, has_kind
from ..report.text import format_percent, format_ranks
from ..statistics.phases import MIN_EXCESS_RATIO
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
"""A name with this mark is of one part of a host, a port or a command: the name without it holds
the sum, and the part may be called anything."""

CLOCK_WORDS = ("clock", "frequency", "freq")

POWER_WORDS = ("power",)

THROTTLE_WORDS = ("throttle",)

CLOCK_DROP_RATIO = 0.03
"""A device's clock lies this much below its own or its peers' to explain slow compute: compute
follows the clock, and `phases.PERSISTENT_RATIO` is the least slowness that is reported."""

LOW_QUANTILE = 0.25
"""Of a phase's readings of a clock: so low it is granted to have been throughout."""


CAUSE = Cause(
    name="clock-throttle",
    one="is slow because its clock is throttled",
    several="are slow because their clocks are throttled",
    has_place=True,
    recurs_as="slow-compute",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """What samples tell of the ranks' devices."""

    ranks: Mapping[int, RankInfo]
    samples: SampleTable
    step_ns: Mapping[int, tuple[int, int]]
    """(begin, end) of each step, Unix time."""

    def find_drop(self, rank: int, steps: tuple[int, int]) -> ClockDrop | None:
        """Return how far the clock of a rank's device fell from one step to another, if it did."""
        info = self.ranks[rank]
        phase = (self.step_ns[steps[0]][0], self.step_ns[steps[1]][1])
        return find_clock_drop(self.samples, info.host, info.local_rank, phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockDrop:
    """A reading that stands apart in a slow phase."""

    name: str
    inside: float
    usual: float
    explained_ratio: float | None
    """By how much longer compute takes at most at such a clock; None where the reading is no
    clock: power and reasons tell that a device is throttled, not by how much."""


def max_explained(drop: ClockDrop) -> float:
    """Return by how much longer compute takes at most for a drop; no limit where none is known."""
    return np.inf if drop.explained_ratio is None else drop.explained_ratio


def as_one_worker(partners: tuple[int, ...], evidence: str) -> str:
    """Return a rank's evidence as that of all partners that look just like it."""
    if len(partners) == 1:
        return evidence
    named = format_ranks(partners)
    return f"{named}, one worker, whose inner communication is not traced: {evidence}"


def explain_by_clock(
    found: Sequence[Candidate],
    profile: ComputeProfile,
    model: ReplayModel,
    *,
    workers: Mapping[int, tuple[int, ...]],
    devices: Devices,
) -> tuple[Candidate, ...]:
    """Say what clocks explain of the candidates that samples tell of.

    Compute takes at most as much longer as its clock is lower. Where partners
    look alike and the clock of one of them leaves a rest that would be due by
    itself, the throttle is told with its share, and the slow compute of all
    partners beside it: which of them has the rest, nothing tells.

    Args:
        found: Slow ranks, partners told once.
        profile: Compute of each rank against its peers.
        model: The operations.
        workers: What each rank shares with the partners that look just like it.
        devices: The samples.
    """
    told: list[Candidate] = []
    for each in found:
        if each.sample is None:
            told.append(each)
            continue
        mine = workers[each.ranks[0]]
        partners = tuple(sorted(rank for rank, worker in workers.items() if worker == mine))
        rest = (1.0 + each.excess_ratio) / (1.0 + max_explained(each.sample)) - 1.0
        if rest < max(MIN_EXCESS_RATIO, each.threshold):
            told.append(
                replace(each, cause=CAUSE, evidence=f"{each.evidence}; {_reads(each.sample)}")
            )
        elif len(partners) == 1:
            explains = f"which explains {format_percent(max_explained(each.sample))} of it at most"
            evidence = f"{each.evidence}; {_reads(each.sample)}, {explains}"
            told.append(replace(each, cause=CAUSE, evidence=evidence))
        else:
            slow, throttle = _split_by_clock(each, each.sample, partners)
            told.append(slow)
            # A share that would not be told by itself is none.
            if throttle.excess_ratio >= each.threshold:
                fixed_ns = _without_throttle_ns(each, throttle.excess_ratio, model, workers)
                steps = _steps_with_low_clock(throttle, profile, devices)
                told.append(replace(throttle, fixed_ns=fixed_ns, steps=steps))
    return tuple(told)


def _reads(drop: ClockDrop) -> str:
    return f"{drop.name} reads {drop.inside:.4g} meanwhile against {drop.usual:.4g}"


def _split_by_clock(
    found: Candidate, drop: ClockDrop, partners: tuple[int, ...]
) -> tuple[Candidate, Candidate]:
    """Return the slow compute of all partners, and the throttle with what it explains."""
    share = max_explained(drop)
    whose, others = format_ranks(found.ranks), "nothing tells which of them has the rest"
    slow = replace(
        found,
        ranks=partners,
        sample=None,
        evidence=as_one_worker(
            partners,
            f"{found.evidence}; {_reads(drop)} on {whose}, which explains {format_percent(share)}"
            f" of it at most, and {others}",
        ),
    )
    throttle = replace(
        found,
        cause=CAUSE,
        excess_ratio=share,
        evidence=(
            f"{whose}: {_reads(drop)}, which makes compute {format_percent(share)} longer; its"
            f" worker's is {format_percent(found.excess_ratio)} longer, and {others}"
        ),
    )
    return slow, throttle


def _without_throttle_ns(
    found: Candidate,
    share_ratio: float,
    model: ReplayModel,
    workers: Mapping[int, tuple[int, ...]],
) -> NDArray[np.float64]:
    """Return what a worker's operations take without a throttle that is a share of their excess.

    Shape (ops,), ns: what is usual is 1, recorded is ``1 + excess``, and the
    throttle's own is ``share``. NaN for all but compute, and outside the candidate's steps.
    """
    took = remove_partner_waits(model, workers)
    usual = took * (1.0 - share_ratio / (1.0 + found.excess_ratio))
    computes = model.on_device & has_kind(model, COMPUTE_KINDS)
    return np.where(in_steps(model, found.steps) & computes, usual, np.nan)


def _steps_with_low_clock(
    throttle: Candidate, profile: ComputeProfile, devices: Devices
) -> tuple[int, int]:
    """Return the steps around a throttle's in which clock and compute still show it.

    Where a partner was slower for a while, the throttle itself may have lasted longer.
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
    """Return the clock that a device ran at in a slow phase, where that speaks for its slowness.

    The clock is held against that of the other devices in the phase and, where
    the phase is not the whole run, the device's own outside it. Of several
    clocks the one that fell furthest speaks. Power is asked only where no
    clock was read: a device that waits draws less, and is not throttled.

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
    return drop.inside < (1.0 - CLOCK_DROP_RATIO) * drop.usual


def _drops(
    samples: SampleTable,
    words: tuple[str, ...],
    place: tuple[str, int],
    phase_ns: tuple[int, int],
) -> tuple[ClockDrop, ...]:
    """Return what each reading of a device whose name holds one of these words did."""
    found = [
        _drop(samples, code, place, phase_ns)
        for code, name in enumerate(samples.names)
        if PART_MARK not in name and _word_group(name) is words
    ]
    return tuple(each for each in found if each is not None)


def _word_group(name: str) -> tuple[str, ...] | None:
    """Return the words that a reading's name is known by: the reasons for a lower clock first."""
    for words in (THROTTLE_WORDS, CLOCK_WORDS, POWER_WORDS):
        if any(word in name for word in words):
            return words
    return None


def _drop(
    samples: SampleTable, code: int, place: tuple[str, int], phase_ns: tuple[int, int]
) -> ClockDrop | None:
    host, device = place
    if host not in samples.hosts:
        return None
    rows = samples.name == code
    mine = rows & (samples.host == samples.hosts.index(host)) & (samples.device == device)
    within = (samples.at_ns >= phase_ns[0]) & (samples.at_ns <= phase_ns[1])
    inside = samples.value[mine & within]
    if not len(inside):
        return None
    others = [samples.value[rows & ~mine & within], samples.value[mine & ~within]]
    typical = [_median(values) for values in others if len(values)]
    if not typical:
        return None
    name, usual = samples.names[code], max(typical)
    explained = None
    if _word_group(name) is CLOCK_WORDS:
        # Readings at the borders of a phase may be of the time beside it.
        low = float(np.quantile(inside, LOW_QUANTILE, method="lower"))
        explained = usual / low - 1.0 if low > 0 else np.inf
    return ClockDrop(name=name, inside=_median(inside), usual=usual, explained_ratio=explained)


def _median(values: NDArray[np.float64]) -> float:
    return float(np.median(values))
