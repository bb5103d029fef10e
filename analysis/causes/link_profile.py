"""Transfer times of links against those of alike links: the evidence for slow links and networks.

Alike are links that carry operations of one kind and size among equally many ranks. If all links
between two stages became slow together, none of them has a healthy one to be compared with; their
own other steps, and the links between other stages, give their baseline.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import MIN_ROWS_OF_KIND, group_medians, medians_by_kind, row_medians
from ..arrays.grouping import factorize
from ..arrays.sorting import find_positions
from ..statistics.baseline import faster_steps_baseline
from ..statistics.noise import step_deviation
from ..statistics.phases import find_phases
from ..statistics.significance import is_significant
from ..statistics.thresholds import THRESHOLDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from rankscope.tracer.topology import Coords

    from ..replay.model import Transfers
    from ..statistics.phases import Phase


MAX_PLANNED_RATIO = 3.0
"""Factor by which one of two or three alike links may be slower by plan: uplinks of Ethernet
networks are commonly oversubscribed up to 3:1, so what crosses one may take as much longer. Among
more links, the median is what is planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProfile:
    """Transfer times by link and step, with their baselines."""

    transfers: Transfers
    steps: NDArray[np.int32]
    """Ascending, the columns."""

    total_ns: NDArray[np.float64]
    """Shape (links, steps): median instance of each kind times their number; NaN if none."""

    expected_ns: NDArray[np.float64]
    """Shape (links, steps): the same of alike links in that step; NaN if none."""

    num_instances: NDArray[np.float64]
    """Shape (links, steps): number of instances."""

    has_few_alike: NDArray[np.bool_]
    """Shape (links,): links with so few alike ones that only a large excess counts."""

    has_own_baseline: NDArray[np.bool_]
    """Shape (links,): those of them whose baseline is their own faster steps."""

    rose_together: NDArray[np.bool_]
    """Shape (links,): links that became slow together with all others between their stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink:
    """A link, with the steps in which it is slow."""

    link: int
    """Index into the transfers' links."""

    phase: Phase
    expected_ns: float
    """Expected time of one transfer in the phase, median."""

    transfer_ns: float


def profile_links(
    transfers: Transfers, steps: tuple[int, ...], coords: Mapping[int, Coords]
) -> LinkProfile:
    """Compare each link with alike ones, step by step.

    Those between the same stages come first: the network between other stages may carry more
    traffic.

    Args:
        transfers: One row per instance.
        steps: Step numbers, ascending.
        coords: Position of each rank.
    """
    numbers = np.array(steps, dtype=np.int32)
    shape = (len(transfers.links), len(numbers))
    total, expected, num = (np.zeros(shape) for _ in range(3))
    few, own, risen = (np.zeros(shape[0], dtype=np.bool_) for _ in range(3))
    place = np.array(
        [_stages_of(link.members, coords) for link in transfers.links], dtype=np.int64
    ).reshape(-1, 2)
    column = find_positions(transfers.step, numbers)
    for kind in range(int(transfers.alike.max(initial=-1)) + 1):
        rows = np.flatnonzero(transfers.alike == kind)
        links, row = np.unique(transfers.link[rows], return_inverse=True)
        cell, cells = row * shape[1] + column[rows], (len(links), shape[1])
        medians, counts = group_medians(transfers.transfer_ns[rows], cell, len(links) * shape[1])
        value, count = medians.reshape(cells), counts.reshape(cells)
        against, is_few = _expected(value, place[links])
        usual = baseline_of_risen_links(value, place[links])
        against = np.where(np.isnan(usual), against, usual)
        total[links] += np.where(count > 0, np.nan_to_num(value) * count, 0.0)
        expected[links] += np.where(count > 0, against * count, 0.0)
        num[links] += count
        few[links] |= is_few
        own[links] |= is_few & (len(links) < MIN_ROWS_OF_KIND)
        risen[links] |= ~np.isnan(usual).all(axis=1)
    absent = num == 0
    for matrix in (total, expected):
        matrix[absent] = np.nan
    return LinkProfile(
        transfers=transfers,
        steps=numbers,
        total_ns=total,
        expected_ns=expected,
        num_instances=num,
        has_few_alike=few,
        has_own_baseline=own,
        rose_together=risen,
    )


def links_between_hosts(transfers: Transfers, hosts: Mapping[int, str]) -> NDArray[np.bool_]:
    """Return which links are between hosts. Shape (links,). None is, if hosts are unknown."""
    on_hosts = ({hosts.get(rank, "") for rank in link.members} for link in transfers.links)
    return np.array([len(names) > 1 for names in on_hosts], dtype=np.bool_)


def find_lone_links(transfers: Transfers, hosts: Mapping[int, str]) -> NDArray[np.int64]:
    """Return the links between hosts, if none of them has an alike one to be compared with."""
    is_between = links_between_hosts(transfers, hosts)
    rows = np.flatnonzero(is_between[transfers.link])
    pair, num_pairs = factorize(transfers.alike[rows], transfers.link[rows])
    of_pair = np.zeros(num_pairs, dtype=np.int64)
    of_pair[pair] = rows
    is_lone = np.bincount(transfers.alike[of_pair]).max(initial=0) == 1
    return np.flatnonzero(is_between) if is_lone else np.zeros(0, dtype=np.int64)


def _stages_of(members: tuple[int, ...], coords: Mapping[int, Coords]) -> tuple[int, int]:
    return coords[members[0]].pp, coords[members[-1]].pp


def _expected(
    value: NDArray[np.float64], place: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the baseline of each link of one kind, and which links have few alike ones.

    A link with few alike ones between the same stages is compared with the links between all.

    Args:
        value: Shape (links, steps): median transfer; NaN if unknown.
        place: Shape (links, 2): stages of the first and the last member.

    Returns:
        Shapes (links, steps) and (links,).
    """
    _, position = np.unique(place, axis=0, return_inverse=True)
    medians, enough = medians_by_kind(value, position.reshape(-1))
    if enough.all() or len(value) < MIN_ROWS_OF_KIND:
        # Links without enough alike ones are compared with their own other steps. But a fault only
        # adds time, so the fastest of two or three shows what such a link carries.
        few = ~enough
        medians[few] = faster_steps_baseline(value[few])
        usual = medians[few, 0]
        is_slow = usual > MAX_PLANNED_RATIO * np.fmin.reduce(usual, initial=np.inf)
        medians[np.flatnonzero(few)[is_slow]] = np.fmin.reduce(usual, initial=np.inf)
        few[few] = ~is_slow
        return medians, few
    everywhere = np.broadcast_to(row_medians(value.T), value.shape)
    return np.where(enough[:, None], medians, everywhere), ~enough


def find_slow_links(profile: LinkProfile) -> tuple[SlowLink, ...]:
    """Find links that are significantly slower than alike ones."""
    excess = profile.total_ns / profile.expected_ns - 1.0
    found = []
    links = profile.transfers.links
    kinds = np.array([f"{link.kind} {link.is_pair}" for link in links])
    for kind in np.unique(kinds).tolist():
        rows = np.flatnonzero(kinds == kind)
        # The parts of one reduction follow each other on one ring, so they are not independent.
        often = links[rows[0]].is_pair
        often &= float(np.nanmedian(profile.num_instances[rows])) >= THRESHOLDS.min_alike_transfers
        calm, risen = rows[~profile.rose_together[rows]], rows[profile.rose_together[rows]]
        # Links that rose together may be most of all links: their change must not count as noise.
        noise = step_deviation(excess[calm]) if len(calm) else None
        # Links without alike ones may all become slow, and fast again, in the same steps.
        alone = len(calm) > 0 and profile.has_own_baseline[calm].all()
        own = step_deviation(excess[calm], num_levels=2) if alone else None
        for mine, deviation in ((calm, own), (risen, noise)):
            if not len(mine):
                continue
            phases = find_phases(
                excess[mine],
                has_few_peers=profile.has_few_alike[mine],
                min_steps=1 if often else THRESHOLDS.min_lasting_steps,
                deviation=deviation,
            )
            found += [(int(mine[phase.row]), phase) for phase in phases]
    return tuple(
        slow
        for slow in (_slow_link(profile, link, phase) for link, phase in found)
        if profile.num_instances[slow.link].sum() >= THRESHOLDS.min_alike_transfers
        and _differs_from_other_steps(profile, slow)
        and (
            slow.phase.num_steps >= THRESHOLDS.min_lasting_steps
            or slow.phase.margin >= THRESHOLDS.peer_peak_factor
        )
    )


def against_own_steps(profile: LinkProfile, slow: Iterable[int]) -> LinkProfile:
    """Compare each link that has few alike ones, and is not slow, with its own median step.

    For the search it must be slower than each of them. One of them may be the slow link, beside
    which it would be shown as far too fast.

    Args:
        profile: Transfers by link and step.
        slow: Numbers of the links that are slow.
    """
    usual = profile.has_few_alike.copy()
    usual[list(slow)] = False
    num = profile.num_instances[usual]
    with np.errstate(invalid="ignore"):
        own = row_medians(profile.total_ns[usual] / num) if usual.any() else np.zeros(0)
    expected = profile.expected_ns.copy()
    expected[usual] = np.where(num > 0, own[:, None] * num, np.nan)
    return replace(profile, expected_ns=expected)


def _differs_from_other_steps(profile: LinkProfile, slow: SlowLink) -> bool:
    """Return whether a link with few alike ones is slower than in its other steps.

    If it is slow in nearly all steps, the alike links decide alone; without any it is not slow.
    """
    phase = slow.phase
    if not profile.has_few_alike[slow.link]:
        return True
    if len(profile.steps) - phase.num_steps < THRESHOLDS.min_several:
        return not profile.has_own_baseline[slow.link]
    num_series = int(profile.has_few_alike.sum())
    return is_significant(profile.total_ns[slow.link], phase, num_series=num_series)


def _slow_link(profile: LinkProfile, link: int, phase: Phase) -> SlowLink:
    columns = slice(phase.first, phase.last + 1)
    num = profile.num_instances[link, columns]
    return SlowLink(
        link=link,
        phase=phase,
        expected_ns=float(np.nanmedian(profile.expected_ns[link, columns] / num)),
        transfer_ns=float(np.nanmedian(profile.total_ns[link, columns] / num)),
    )


def baseline_of_risen_links(
    value: NDArray[np.float64], place: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the baseline of links in steps in which all links between two stages became slow.

    It is the median of the links between these stages (one way) in their own faster steps, times
    the change of the links between other stages. If those changed as much, or became faster
    instead, these links did not change. Under the load of a shared network they become slower
    gradually, which is no fault of theirs. So links that are slow from the first step on have no
    such baseline, nor do those of a job with one pair of stages.

    Args:
        value: Shape (links, steps): median transfer of one kind; NaN if unknown.
        place: Shape (links, 2): stages of the first and the last member.

    Returns:
        Same shape; NaN for all other links and steps.
    """
    usual = np.full_like(value, np.nan)
    if value.shape[1] < THRESHOLDS.min_lasting_steps + THRESHOLDS.min_several:
        return usual
    stages = np.sort(place, axis=1)
    ways = np.unique(place, axis=0)
    for way in ways:
        rows = np.flatnonzero((place == way).all(axis=1))
        others = np.flatnonzero((stages != np.sort(way)).any(axis=1))
        if min(len(rows), len(others)) < MIN_ROWS_OF_KIND:
            continue
        relative = value[others] / row_medians(value[others])[:, None]
        common = row_medians(relative.T)
        level = row_medians(value[rows].T)[None]
        expected = faster_steps_baseline(level / common) * common
        excess = np.minimum(level / expected, level / faster_steps_baseline(level)) - 1.0
        phases = find_phases(
            excess,
            has_few_peers=True,
            min_steps=THRESHOLDS.min_lasting_steps,
            deviation=step_deviation(relative / common - 1.0),
        )
        if (
            phases
            and is_significant(excess[0], phases[0], num_series=len(ways))
            and _change_at_once(value[rows] / common, phases[0])
        ):
            usual[rows, phases[0].inside] = expected[0, phases[0].inside]
    return usual


def _change_at_once(value: NDArray[np.float64], phase: Phase) -> bool:
    """Return whether nearly all links become slow, and fast again, from one step to the next."""
    relative = value / faster_steps_baseline(value)
    borders = [each for each in (phase.first, phase.last + 1) if 0 < each < value.shape[1]]
    changes = np.abs(relative[:, borders] - relative[:, [each - 1 for each in borders]])
    at_once = ~(changes < phase.excess_ratio / 2)  # unknown counts as well
    return bool((at_once.mean(axis=0) >= THRESHOLDS.whole_share).all())
