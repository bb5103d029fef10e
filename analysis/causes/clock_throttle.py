"""Slow compute that a lower clock of the device explains, in whole or in part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import BASELINE_QUANTILE
from ..readers.workers import remove_partner_waits
from ..replay.model import COMPUTE_KINDS, has_kind
from ..report.text import format_percent, format_ranks
from ..statistics.thresholds import THRESHOLDS
from .candidate import in_shown_steps
from .detector import Cause, ProofForm, ShownIn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from ..replay.model import ReplayModel
    from ..trace.context import SampleTable
    from .candidate import Candidate
    from .detector import Case

PART_MARK = ":"
"""Separates the name of a sum from that of a part of it (a port, a process). A part may have any
name, so only sums are searched for words."""

CLOCK_WORDS = ("clock", "frequency", "freq")
POWER_WORDS = ("power",)
THROTTLE_WORDS = ("throttle",)
WORD_GROUPS = (THROTTLE_WORDS, CLOCK_WORDS, POWER_WORDS)
"""Words in the names of readings. A name belongs to the first group that has one of its words."""

PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
UNITS = {"hz": "Hz", "w": "W"}
"""Units by the last part of a reading's name."""

CAUSE = Cause(
    name="clock-throttle",
    one="is slow because its clock is throttled",
    several="are slow because their clocks are throttled",
    shown_in=ShownIn.COMPUTE,
    has_place=True,
    recurs_as="slow-compute",
    proof_form=ProofForm.DEVICES,
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

    explained_ratio: float
    """By how much longer compute takes at most; infinite if the reading is not a clock: power and
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
    if unit not in UNITS:
        return f"{value:.4g}"
    scale, prefix = next((prefix for prefix in PREFIXES if abs(value) >= prefix[0]), PREFIXES[-1])
    return f"{value / scale:.3g} {prefix}{UNITS[unit]}"


def name_worker(partners: tuple[int, ...], evidence: str) -> str:
    """Return a rank's evidence, with the partners that look the same if it has any."""
    if len(partners) == 1:
        return evidence
    named = format_ranks(partners)
    return f"{named} are one worker whose inner communication is not traced; {evidence}"


def explain_by_clock(
    slow: Candidate,
    throttled: tuple[int, ...],
    drop: ClockDrop,
    model: ReplayModel,
    workers: Mapping[int, tuple[int, ...]],
) -> tuple[Candidate, ...]:
    """Return slow compute with the part that a lower clock explains as `clock-throttle`.

    Compute takes at most as much longer as the clock is lower. If the drop leaves a rest that would
    be reported by itself, and the rank has partners that look the same, the throttle is a candidate
    with its own share, and the rest is slow compute of all partners.

    Args:
        workers: Identity of each rank, equal for partners whose compute looks the same.
    """
    most, share = drop.explained_ratio, format_percent(drop.explained_ratio)
    rest_ratio = (1.0 + slow.excess_ratio) / (1.0 + most) - 1.0
    is_rest_due = rest_ratio >= max(THRESHOLDS.min_excess_ratio, slow.threshold)
    if not is_rest_due or len(slow.ranks) == 1:
        note = f", which explains at most {share}" if is_rest_due else ""
        evidence = f"{slow.evidence}; {drop}{note}"
        return (replace(slow, cause=CAUSE, ranks=throttled, evidence=evidence),)
    text = f"{format_ranks(throttled)}: {drop}"
    unknown = "which of its ranks causes the rest is unknown"
    evidence = f"{slow.evidence}; {text}, which explains at most {share}; {unknown}"
    rest = replace(slow, evidence=name_worker(slow.ranks, evidence))
    # A share that would not be reported by itself is no candidate.
    if most < slow.threshold:
        return (rest,)
    computes = in_shown_steps(model, slow) & model.on_device & has_kind(model, COMPUTE_KINDS)
    took_ns = np.where(computes, remove_partner_waits(model, workers), np.nan)
    throttle = replace(
        slow,
        cause=CAUSE,
        ranks=throttled,
        excess_ratio=most,
        # Its share of what was recorded, which is 1 + excess times the usual duration.
        fixed_ns=took_ns * (1.0 - most / (1.0 + slow.excess_ratio)),
        evidence=(
            f"{text}, which makes compute {share} longer; the worker's is"
            f" {format_percent(slow.excess_ratio)} longer, and {unknown}"
        ),
    )
    return rest, throttle


def find_drop(case: Case, rank: int, steps: tuple[int, int]) -> ClockDrop | None:
    """Return the drop of a device's clock in the steps from one to another, if there is one."""
    info = case.ranks[rank]
    phase = (case.step_ns[steps[0]][0], case.step_ns[steps[1]][1])
    return find_clock_drop(case.context.samples, info.host, info.local_rank, phase)


def find_clock_drop(
    samples: SampleTable, host: str, device: int, phase_ns: tuple[int, int]
) -> ClockDrop | None:
    """Return the drop of a device's clock in a slow phase; None if there is none.

    The clock is compared with the other devices in the phase and with the device's own other
    steps. Of several clocks, the one that dropped furthest counts. Power counts only if no clock
    was read: a device that waits draws less power and is not throttled.

    Args:
        phase_ns: (begin, end) of the phase, Unix time.
    """
    if host not in samples.hosts:
        return None
    is_mine = (samples.host == samples.hosts.index(host)) & (samples.device == device)
    drops: dict[tuple[str, ...], list[ClockDrop]] = {words: [] for words in WORD_GROUPS}
    for code, name in enumerate(samples.names):
        words = next((group for group in WORD_GROUPS if any(word in name for word in group)), None)
        if words is not None and PART_MARK not in name:
            drop = _drop(samples, code, is_mine, phase_ns, is_clock=words is CLOCK_WORDS)
            drops[words] += () if drop is None else (drop,)
    clocks = drops[CLOCK_WORDS]
    lower = [clock for clock in clocks if _is_lower(clock)]
    if lower:
        return min(lower, key=lambda clock: clock.inside / clock.usual)
    raised = (sign for sign in drops[THROTTLE_WORDS] if sign.inside > sign.usual)
    weak = (power for power in drops[POWER_WORDS] if not clocks and _is_lower(power))
    return next(raised, None) or next(weak, None)


def _is_lower(drop: ClockDrop) -> bool:
    """Return whether a reading is lower by half of the least slowness that is reported."""
    return drop.inside < (1.0 - THRESHOLDS.persistent_ratio / 2) * drop.usual


def _drop(
    samples: SampleTable,
    code: int,
    is_mine: NDArray[np.bool_],
    phase_ns: tuple[int, int],
    *,
    is_clock: bool,
) -> ClockDrop | None:
    """Return what one reading of a device did; None if there is nothing to compare it with."""
    rows = samples.name == code
    within = (samples.at_ns >= phase_ns[0]) & (samples.at_ns <= phase_ns[1])
    inside = samples.value[rows & is_mine & within]
    of_peers, of_own = (
        float(np.median(values)) if len(values) else -np.inf
        for values in (
            samples.value[rows & ~is_mine & within],
            samples.value[rows & is_mine & ~within],
        )
    )
    usual = max(of_peers, of_own)
    if not len(inside) or usual == -np.inf:
        return None
    explained = np.inf
    if is_clock:
        low = float(np.quantile(inside, BASELINE_QUANTILE, method="lower"))
        explained = usual / low - 1.0 if low > 0 else np.inf
    return ClockDrop(
        name=samples.names[code],
        inside=float(np.median(inside)),
        usual=usual,
        is_of_peers=of_peers >= of_own,
        explained_ratio=explained,
    )
