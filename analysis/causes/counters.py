"""What the samples of hosts and devices say about a slow phase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.sorting import sort_rows
from ..report.text import format_count

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..trace.context import SampleTable

CONGESTION = "congestion"
TROUBLES = (
    ("flapping links", ("link-down", "link_down", "link-flap", "carrier")),
    ("retransmits", ("retrans", "out-of-seq", "out_of_seq", "ack-timeout", "ack_timeout")),
    (CONGESTION, ("pause", "ecn", "cnp", "congest", "transmit-wait", "xmit_wait")),
)
"""What counters whose name holds one of these words tell, the most specific first.
Source: the RoCE counters of Linux's sysfs and their use in arXiv 2402.15627; InfiniBand, whose
ports hold back instead of marking, tells congestion by ``port_xmit_wait`` alone."""

GROWTH_FACTOR = 2.0
"""A counter that grows this much faster inside the phase than outside speaks for it."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """A reading that stands apart in a slow phase."""

    name: str
    inside: float
    usual: float
    explained_ratio: float | None
    """By how much longer compute takes at most at such a clock; None where the reading is no
    clock: power and reasons tell that a device is throttled, not by how much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What the network's counters tell of a phase."""

    word: str
    """"congestion", "retransmits", "flapping links"; "" where they are quiet."""

    hosts: tuple[str, ...]
    """Hosts whose counters grew."""

    is_known: bool
    """Whether there are such counters at all."""

    watched: frozenset[str] = frozenset()
    """Hosts with counters of congestion, of which the network's other troubles are kin."""

    def __str__(self) -> str:
        if not self.is_known:
            return "there are no counters to tell why"
        if not self.word:
            return "the network's counters are quiet"
        return f"counters of {format_count(len(self.hosts), 'host')} tell of {self.word}"


def network_trouble(samples: SampleTable, phase_ns: tuple[int, int]) -> Trouble:
    """Say which counters grew in a phase, and on which hosts.

    Args:
        samples: Readings.
        phase_ns: (begin, end) of the phase, Unix time.
    """
    known, watched = False, set[str]()
    for word, parts in TROUBLES:
        for code, name in enumerate(samples.names):
            if PART_MARK in name or not any(part in name for part in parts):
                continue
            grown = _growth(samples, code, phase_ns)
            known |= bool(grown)
            if word == CONGESTION:
                watched |= {samples.hosts[host] for host, _, _ in grown}
            before = [outside for _, _, outside in grown if outside is not None]
            # A network that is slow everywhere makes all hosts' counters grow alike.
            usual = float(np.median(before or [inside for _, inside, _ in grown] or [0.0]))
            hosts = {
                host
                for host, inside, outside in grown
                if inside > GROWTH_FACTOR * max(outside or 0.0, usual) and inside > 0
            }
            if hosts:
                named = tuple(sorted(samples.hosts[host] for host in hosts))
                return Trouble(word=word, hosts=named, is_known=True)
    return Trouble(word="", hosts=(), is_known=known, watched=frozenset(watched))


def _growth(
    samples: SampleTable, code: int, phase_ns: tuple[int, int]
) -> list[tuple[int, float, float | None]]:
    """Return (host, growth inside a phase, outside it) of each counter of one name, a ns.

    None where nothing was read outside.
    """
    rows = np.flatnonzero(samples.name == code)
    rows = rows[sort_rows(samples.host[rows], samples.device[rows], samples.at_ns[rows])]
    host, device, at = samples.host[rows], samples.device[rows], samples.at_ns[rows]
    same = (host[1:] == host[:-1]) & (device[1:] == device[:-1])
    grown = np.maximum(np.diff(samples.value[rows]), 0.0)
    lasted = np.diff(at)
    within = (at[1:] > phase_ns[0]) & (at[:-1] < phase_ns[1])
    size = len(samples.hosts)
    found: list[tuple[int, float, float | None]] = []
    sums = [
        np.bincount(host[1:][chosen], weights=values[chosen].astype(np.float64), minlength=size)
        for chosen in (same & within, same & ~within)
        for values in (grown, lasted)
    ]
    for each in np.flatnonzero(sums[1] > 0).tolist():
        outside = float(sums[2][each] / sums[3][each]) if sums[3][each] > 0 else None
        found.append((each, float(sums[0][each] / sums[1][each]), outside))
    return found


def clock_drop(
    samples: SampleTable, host: str, device: int, phase_ns: tuple[int, int]
) -> Drop | None:
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


def _is_lower(drop: Drop) -> bool:
    return drop.inside < (1.0 - CLOCK_DROP_RATIO) * drop.usual


def _drops(
    samples: SampleTable,
    words: tuple[str, ...],
    place: tuple[str, int],
    phase_ns: tuple[int, int],
) -> tuple[Drop, ...]:
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
) -> Drop | None:
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
    return Drop(name=name, inside=_median(inside), usual=usual, explained_ratio=explained)


def _median(values: NDArray[np.float64]) -> float:
    return float(np.median(values))
