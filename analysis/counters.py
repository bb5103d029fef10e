"""What the samples of hosts and devices say about a slow phase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from analysis.context import SampleTable

TROUBLES = (
    ("flapping links", ("link-down", "link_down", "link-flap", "carrier")),
    ("retransmits", ("retrans", "out-of-seq", "out_of_seq", "ack-timeout", "ack_timeout")),
    ("congestion", ("pause", "ecn", "cnp", "congest")),
)
"""What counters whose name holds one of these words tell, the most specific first.
Source: the RoCE counters of Linux's sysfs and their use in arXiv 2402.15627."""

GROWTH_FACTOR = 2.0
"""A counter that grows this much faster inside the phase than outside speaks for it."""

CLOCK_WORDS = ("clock", "frequency", "freq")
POWER_WORDS = ("power",)
THROTTLE_WORDS = ("throttle",)

CLOCK_DROP_RATIO = 0.03
"""A device's clock lies this much below its own or its peers' to explain slow compute: compute
follows the clock, and `analysis.phases.PERSISTENT_RATIO` is the least slowness that is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """A reading that stands apart in a slow phase."""

    name: str
    inside: float
    usual: float


def network_trouble(samples: SampleTable, phase_ns: tuple[int, int]) -> str:
    """Say in words which counters grew in a phase: congestion, retransmits or flapping links."""
    known = False
    for word, parts in TROUBLES:
        growth = [
            _growth(samples, code, phase_ns)
            for code, name in enumerate(samples.names)
            if any(part in name for part in parts)
        ]
        told = [(inside, outside) for inside, outside in growth if inside is not None]
        known |= bool(told)
        for inside, outside in told:
            if inside > 0 and (outside is None or inside > GROWTH_FACTOR * outside):
                return f"counters tell of {word} ({inside:.3g} a second against {outside or 0:.3g})"
    return "counters are quiet" if known else "there are no counters to tell why"


def _growth(
    samples: SampleTable, code: int, phase_ns: tuple[int, int]
) -> tuple[float | None, float | None]:
    """Return a counter's growth a second, all hosts, inside and outside a phase."""
    rows = samples.name == code
    inside, outside = 0.0, 0.0
    time_in, time_out = 0, 0
    keys = np.stack((samples.host[rows], samples.device[rows]))
    for host, device in np.unique(keys, axis=1).T.tolist():
        one = rows & (samples.host == host) & (samples.device == device)
        at, value = samples.at_ns[one], samples.value[one]
        if len(at) < 2:  # noqa: PLR2004
            continue
        grown, lasted = np.maximum(np.diff(value), 0.0), np.diff(at)
        within = (at[1:] > phase_ns[0]) & (at[:-1] < phase_ns[1])
        inside += float(grown[within].sum())
        outside += float(grown[~within].sum())
        time_in += int(lasted[within].sum())
        time_out += int(lasted[~within].sum())
    return (
        inside / (time_in / 1e9) if time_in else None,
        outside / (time_out / 1e9) if time_out else None,
    )


def clock_drop(
    samples: SampleTable, host: str, device: int, phase_ns: tuple[int, int]
) -> Drop | None:
    """Return the clock that a device ran at in a slow phase, where that explains its slowness.

    The clock is held against that of the other devices in the phase and, where
    the phase is not the whole run, the device's own outside it.

    Args:
        samples: Readings.
        host: The device's host.
        device: Its local rank.
        phase_ns: (begin, end) of the phase, Unix time.
    """
    for code, name in enumerate(samples.names):
        throttle = any(word in name for word in THROTTLE_WORDS)
        if not throttle and not any(word in name for word in (*CLOCK_WORDS, *POWER_WORDS)):
            continue
        drop = _drop(samples, code, (host, device), phase_ns)
        if drop is None:
            continue
        lower = drop.inside < (1.0 - CLOCK_DROP_RATIO) * drop.usual
        if (throttle and drop.inside > drop.usual) or (not throttle and lower):
            return drop
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
    usual = [_median(values) for values in others if len(values)]
    if not usual:
        return None
    return Drop(name=samples.names[code], inside=_median(inside), usual=max(usual))


def _median(values: NDArray[np.float64]) -> float:
    return float(np.median(values))
