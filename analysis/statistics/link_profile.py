"""The table of transfers by link and step: the evidence for slow links and slow networks.

A link is compared with alike ones: links that carry operations of one kind and size among equally
many ranks. Links that became slow together have no healthy one among these, so that they are
compared with their own other steps (`Rise`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rankscope.tracer.span import NS_PER_S

from ..arrays.group_stats import (
    MIN_ROWS_OF_KIND,
    fast_quartile,
    group_medians,
    medians_by_kind,
    row_medians,
)
from ..arrays.grouping import factorize
from ..arrays.sorting import find_positions
from .baseline import faster_steps_baseline
from .noise import (
    NORMAL_MEDIAN,
    lower_half_deviation,
    median_change_deviation,
    required_deviations,
)
from .phases import MEDIAN_STANDARD_ERROR, Phase, find_phases, is_significant
from .thresholds import THRESHOLDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from ..replay.model import Link, Transfers
    from ..trace.tables import RankInfo


MAX_PLANNED_RATIO = 3.0
"""Factor by which one of two or three alike links may be slower by plan: uplinks of Ethernet
networks are commonly oversubscribed up to 3:1, so what crosses one may take as much longer. Among
more links, the median is what is planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rise:
    """Steps in which links are slower together than in their own other steps."""

    phase: Phase
    is_slower: NDArray[np.bool_]
    """Shape (links,)."""

    excess: NDArray[np.float64]
    """Shape (steps,): excess of their median, each over its own median step."""

    num_compared: int
    """Links among which they are the majority."""

    stages: tuple[int, int] | None = None
    """The two stages between which all pairs became slow; None: they are of the whole network."""

    @property
    def is_sudden(self) -> bool:
        """Return whether it begins and ends from one step to the next, unlike shared load."""
        before = [column - 1 for column in (self.phase.first, self.phase.last + 1)]
        changes = np.diff(self.excess)
        inside = [column for column in before if 0 <= column < len(changes)]
        return bool((np.abs(changes[inside]) >= self.phase.excess_ratio / 2).all())


class KindOfTransfer(NamedTuple):
    """Alike instances by link and step."""

    links: NDArray[np.int32]
    """Shape (links of this kind,)."""

    median_ns: NDArray[np.float64]
    """Shape (links of this kind, steps): median transfer; NaN if there is none."""

    num: NDArray[np.int64]
    """Shape (links of this kind, steps): number of instances."""


@dataclass(frozen=True, kw_only=True)
class LinkProfile:
    """Transfers by link and step, and what they are compared with."""

    transfers: Transfers
    """One row per instance; ``transfers.links`` are the rows of the matrices."""

    ranks: Mapping[int, RankInfo]
    """Location of each rank."""

    steps: NDArray[np.int32]
    """Ascending, the columns."""

    kinds: tuple[KindOfTransfer, ...]
    """Of which the matrices are sums."""

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

    min_lost_ns: float = 0.0
    """Time a step, over all steps of its phase, that a link which is slow at times must lose: on
    busy hosts, some steps of any link have a transfer that waits for a core."""

    @property
    def links(self) -> tuple[Link, ...]:
        """Return the links, the rows."""
        return self.transfers.links

    @cached_property
    def is_pair(self) -> NDArray[np.bool_]:
        """Return which links are pairs. Shape (links,)."""
        return np.array([link.is_pair for link in self.links], dtype=np.bool_)

    @cached_property
    def is_between_hosts(self) -> NDArray[np.bool_]:
        """Return which links are between hosts. Shape (links,)."""
        return links_between_hosts(self.transfers, self.ranks)

    @cached_property
    def stages(self) -> NDArray[np.int64]:
        """Return the stages of each link's first and last member. Shape (links, 2)."""
        return _stages_of(self.transfers, self.ranks)

    @cached_property
    def over_fastest(self) -> NDArray[np.float64]:
        """Return the transfers over the fastest quarter of alike ones in the same step.

        Shape (links, steps); NaN if there are none.
        """
        total, fastest = np.zeros((2, *self.total_ns.shape))
        for links, value, count in self.kinds:
            has_any = count > 0
            total[links] += np.where(has_any, value * count, 0.0)
            fastest[links] += np.where(has_any, fast_quartile(value.T).T[0] * count, 0.0)
        ratio: NDArray[np.float64] = np.where(fastest > 0, total / np.maximum(fastest, 1.0), np.nan)
        return ratio

    def against_others(self, mine: NDArray[np.int64]) -> LinkProfile:
        """Return the table with my links compared with alike ones between other hosts.

        Args:
            mine: Links of one host to others.
        """
        others = np.setdiff1d(np.flatnonzero(self.is_between_hosts), mine)
        expected = np.zeros_like(self.expected_ns)
        for links, value, count in self.kinds:
            usual = value[np.isin(links, others)]
            against = row_medians(usual.T) if len(usual) else np.full(len(self.steps), np.nan)
            expected[links] += np.where(count > 0, against * count, 0.0)
        is_mine = np.isin(np.arange(len(expected)), mine)[:, None] & ~np.isnan(self.total_ns)
        return replace(self, expected_ns=np.where(is_mine, expected, self.expected_ns))

    @cached_property
    def slow_links(self) -> tuple[Phase, ...]:
        """Return the rows that are significantly slower than alike ones, with their steps."""
        excess = self.total_ns / self.expected_ns - 1.0
        kinds = np.array([f"{link.kind} {link.is_pair}" for link in self.links])
        candidates: list[Phase] = []
        for kind in np.unique(kinds).tolist():
            rows = np.flatnonzero(kinds == kind)
            # The parts of one reduction follow each other on one ring, so they are not independent.
            num = float(np.nanmedian(self.num_instances[rows]))
            often = self.is_pair[rows[0]] and num >= THRESHOLDS.min_alike_transfers
            phases = find_phases(
                excess[rows],
                has_few_peers=self.has_few_alike[rows],
                min_steps=1 if often else THRESHOLDS.min_lasting_steps,
                # With one traced member, a transfer has the waits for the others in it.
                may_recur=all(len(self.links[row].members) > 1 for row in rows.tolist()),
            )
            candidates += [replace(phase, row=int(rows[phase.row])) for phase in phases]
        return tuple(
            slow
            for slow in candidates
            if self.num_instances[slow.row].sum() >= THRESHOLDS.min_alike_transfers
            and _differs_from_other_steps(self, slow)
            and (not slow.recurs or self._lost_ns(slow) >= self.min_lost_ns)
            and (
                slow.num_steps >= THRESHOLDS.min_lasting_steps
                or slow.margin >= THRESHOLDS.peer_peak_factor
            )
        )

    def _lost_ns(self, slow: Phase) -> float:
        """Return the mean time a step, from the first to the last of a phase, that it lost."""
        lost_ns = (self.total_ns - self.expected_ns)[slow.row, slow.shown]
        return float(np.nansum(lost_ns)) / slow.num_steps

    @cached_property
    def rise(self) -> Rise | None:
        """Return the steps in which links are slower together; None if there are none."""
        return find_rise(self)

    @cached_property
    def usual_ns(self) -> NDArray[np.float64]:
        """Return the expected times as a page shows them. Shape (links, steps); NaN if unknown.

        Links that became slow together, and those that have few alike ones and are not slow, have
        the median of their own other steps: the search compares the latter with the fastest of
        their alike ones, beside which they would be shown as slow.
        """
        is_usual = np.ones(self.total_ns.shape, dtype=np.bool_)
        is_own = self.has_few_alike.copy()
        is_own[[slow.row for slow in self.slow_links]] = False
        if self.rise is not None:
            is_own |= self.rise.is_slower
            is_usual[self.rise.is_slower, self.rise.phase.inside] = False
        num = self.num_instances[is_own]
        with np.errstate(invalid="ignore"):
            one_ns = row_medians(np.where(is_usual[is_own], self.total_ns[is_own] / num, np.nan))
        usual, own_ns = self.expected_ns.copy(), one_ns[:, None] * num
        usual[is_own] = np.where((num == 0) | np.isnan(own_ns), usual[is_own], own_ns)
        return usual

    def times_within(
        self, link: int, inside: list[int], *, usual_ns: NDArray[np.float64]
    ) -> LinkTimes:
        """Return what a transfer of a link takes in some steps, and what was expected.

        Args:
            usual_ns: Shape (links, steps): what it is compared with.
        """
        num, steps = self.num_instances[link, inside], self.steps[inside]
        took_ns, expected_ns = (
            float(np.nanmedian(sums_ns[link, inside] / num))
            for sums_ns in (self.total_ns, usual_ns)
        )
        mine = (self.transfers.link == link) & np.isin(self.transfers.step, steps)
        num_bytes, all_ns = self.transfers.num_bytes[mine], self.transfers.transfer_ns[mine].sum()
        is_sized = all_ns > 0 and num_bytes.any() and (num_bytes >= 0).all()
        return LinkTimes(
            transfer_ns=took_ns,
            expected_ns=expected_ns,
            lost_ns_per_step=float(np.nanmean((self.total_ns - usual_ns)[link, inside])),
            bytes_per_s=float(num_bytes.sum() / all_ns) * NS_PER_S if is_sized else None,
        )

    def operations_of(self, links: list[int]) -> NDArray[np.int64]:
        """Return the operations that some links carry, ascending."""
        return np.flatnonzero(np.isin(self.transfers.link_of_operation, links))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """Transfers of one link in the steps in which it is slow; medians of the steps."""

    transfer_ns: float
    expected_ns: float
    lost_ns_per_step: float
    """Mean of the steps."""

    bytes_per_s: float | None
    """None if a size is unknown."""


def profile_links(
    transfers: Transfers,
    steps: tuple[int, ...],
    ranks: Mapping[int, RankInfo],
    *,
    min_lost_ns: float = 0.0,
) -> LinkProfile:
    """Compare each link with alike ones, step by step.

    Those between the same stages come first: the network between other stages may carry more
    traffic.

    Args:
        min_lost_ns: See `LinkProfile.min_lost_ns`.
    """
    numbers = np.array(steps, dtype=np.int32)
    shape = (len(transfers.links), len(numbers))
    total, expected, num = (np.zeros(shape) for _ in range(3))
    few, has_own = (np.zeros(shape[0], dtype=np.bool_) for _ in range(2))
    stages = _stages_of(transfers, ranks)
    kinds = _kinds_of(transfers, numbers)
    for links, value, count in kinds:
        against, is_few = _expected(value, stages[links])
        total[links] += np.where(count > 0, np.nan_to_num(value) * count, 0.0)
        expected[links] += np.where(count > 0, against * count, 0.0)
        num[links] += count
        few[links] |= is_few
        has_own[links] |= is_few & (len(links) < MIN_ROWS_OF_KIND)
    total[num == 0] = expected[num == 0] = np.nan
    return LinkProfile(
        transfers=transfers,
        ranks=ranks,
        steps=numbers,
        kinds=tuple(kinds),
        total_ns=total,
        expected_ns=expected,
        num_instances=num,
        has_few_alike=few,
        has_own_baseline=has_own,
        min_lost_ns=min_lost_ns,
    )


def _kinds_of(transfers: Transfers, steps: NDArray[np.int32]) -> list[KindOfTransfer]:
    column, kinds = find_positions(transfers.step, steps), []
    for kind in np.unique(transfers.alike).tolist():
        rows = np.flatnonzero(transfers.alike == kind)
        links, row = np.unique(transfers.link[rows], return_inverse=True)
        cell, shape = row * len(steps) + column[rows], (len(links), len(steps))
        medians, counts = group_medians(transfers.transfer_ns[rows], cell, len(links) * len(steps))
        kinds.append(KindOfTransfer(links, medians.reshape(shape), counts.reshape(shape)))
    return kinds


def _stages_of(transfers: Transfers, ranks: Mapping[int, RankInfo]) -> NDArray[np.int64]:
    ends = ((link.members[0], link.members[-1]) for link in transfers.links)
    stages = [(ranks[first].coords.pp, ranks[last].coords.pp) for first, last in ends]
    return np.array(stages, dtype=np.int64).reshape(-1, 2)


def links_between_hosts(transfers: Transfers, ranks: Mapping[int, RankInfo]) -> NDArray[np.bool_]:
    """Return which links are between hosts. Shape (links,). None is, if hosts are unknown."""
    on_hosts = ({ranks[rank].host for rank in link.members} for link in transfers.links)
    return np.array([len(names) > 1 for names in on_hosts], dtype=np.bool_)


def find_lone_links(transfers: Transfers, ranks: Mapping[int, RankInfo]) -> NDArray[np.int64]:
    """Return the links between hosts, if none of them has an alike one to be compared with."""
    is_between = links_between_hosts(transfers, ranks)
    rows = np.flatnonzero(is_between[transfers.link])
    pair, num_pairs = factorize(transfers.alike[rows], transfers.link[rows])
    of_pair = np.zeros(num_pairs, dtype=np.int64)
    of_pair[pair] = rows
    is_lone = np.bincount(transfers.alike[of_pair]).max(initial=0) == 1
    return np.flatnonzero(is_between) if is_lone else np.zeros(0, dtype=np.int64)


def _expected(
    value: NDArray[np.float64], stages: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the baseline of each link of one kind, and which links have few alike ones.

    A link with few alike ones between the same stages is compared with the links between all.
    """
    _, position = np.unique(stages, axis=0, return_inverse=True)
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


def _differs_from_other_steps(profile: LinkProfile, slow: Phase) -> bool:
    """Return whether a link with few alike ones is slower than in its other steps.

    If it is slow in nearly all steps, the alike links decide alone; without any it is not slow.
    """
    if not profile.has_few_alike[slow.row]:
        return True
    if len(profile.steps) - slow.num_steps < THRESHOLDS.min_several:
        return not profile.has_own_baseline[slow.row]
    num_series = int(profile.has_few_alike.sum())
    return is_significant(profile.total_ns[slow.row], slow, num_series=num_series)


def find_rise(profile: LinkProfile, *, may_be_brief: bool = False) -> Rise | None:
    """Find steps in which links are slower together than in their own other steps.

    These are most links between hosts, or else all pairs between two stages, which share an uplink.

    Args:
        profile: The table. If no link is between hosts, all links count.
        may_be_brief: Whether a single step counts, because counters must confirm the result.
    """
    between = profile.is_between_hosts | (not profile.is_between_hosts.any())
    rise = _rise_of(profile, np.flatnonzero(between), may_be_brief=may_be_brief)
    if rise is not None or may_be_brief:
        return rise
    crosses = profile.is_pair & (profile.stages[:, 0] != profile.stages[:, 1])
    stages = np.sort(profile.stages, axis=1)
    for both in np.unique(stages[crosses], axis=0):
        rows = np.flatnonzero(crosses & (stages == both).all(axis=1))
        rise = _rise_of(profile, rows) if len(rows) >= MIN_ROWS_OF_KIND else None
        if (
            rise is not None
            and rise.is_sudden
            and rise.is_slower.sum() >= THRESHOLDS.whole_share * len(rows)
        ):
            return replace(rise, stages=(int(both[0]), int(both[1])))
    return None


def _rise_of(
    profile: LinkProfile, rows: NDArray[np.int64], *, may_be_brief: bool = False
) -> Rise | None:
    """Return the steps in which most of some links are slower than in their other steps."""
    rows = rows[~np.isnan(profile.total_ns[rows]).all(axis=1)]
    if not len(rows):
        return None
    total = profile.total_ns[rows]
    ratio = total / row_medians(total)[:, None]
    # The level of all links together: the faster steps of a single link may be chance.
    level = row_medians(ratio.T)
    excess = level / faster_steps_baseline(level[None])[0] - 1.0
    deviation = _deviation_of_level(excess, ratio / level, may_be_brief=may_be_brief)
    phases = find_phases(
        excess[None],
        has_few_peers=True,
        min_steps=THRESHOLDS.min_lasting_steps,
        deviation=deviation,
    )
    if phases and is_significant(level, phases[0], num_series=1):
        phase = phases[0]
    else:
        least = 1 if may_be_brief else THRESHOLDS.min_lasting_steps
        single = _find_single_steps(excess, deviation, least)
        if single is None:
            return None
        phase = single
    # A flapping network is slow in some steps of its phase only.
    within = excess >= phase.excess_ratio / 2
    within[: phase.first] = within[phase.last + 1 :] = False
    outside = ratio[:, ~within]
    before = row_medians(outside) if outside.shape[1] else faster_steps_baseline(ratio)[:, 0]
    slower = np.nan_to_num(row_medians(ratio[:, within]) / before - 1.0) >= phase.excess_ratio / 2
    if slower.sum() < THRESHOLDS.majority_share * len(rows):
        return None
    is_slower = np.zeros(len(profile.links), dtype=np.bool_)
    is_slower[rows[slower]] = True
    return Rise(phase=phase, is_slower=is_slower, excess=excess, num_compared=len(rows))


def _deviation_of_level(
    excess: NDArray[np.float64], relative: NDArray[np.float64], *, may_be_brief: bool
) -> float:
    """Return the noise of the level of several links, from its changes between steps.

    By luck a few levels can differ less from step to step than each of them is uncertain, from how
    much its links differ: it is at least that standard error.

    Args:
        excess: Shape (steps,): excess of the level.
        relative: Shape (links, steps): the links over the level.
        may_be_brief: Whether single steps are searched. They make most of the changes in a short
            run, so that the noise of the lower half of the steps is taken if it is less.
    """
    # The median of few changes is itself uncertain: two of its standard errors are added.
    num = max(len(excess) - 1, 1)
    changes = median_change_deviation(excess) * (1.0 + 2.0 / np.sqrt(2.0 * num))
    if may_be_brief:
        lower = lower_half_deviation(excess) * (1.0 + 2.0 / np.sqrt(max(num - 1, 1)))
        changes = min(changes, lower)
    spread = np.nanmedian(np.abs(relative - 1.0)) / NORMAL_MEDIAN
    return float(max(changes, MEDIAN_STANDARD_ERROR * spread / np.sqrt(len(relative))))


def _find_single_steps(
    excess: NDArray[np.float64], deviation: float, min_steps: int
) -> Phase | None:
    """Return the phase from the first to the last significant step; None if they are too few."""
    threshold = max(THRESHOLDS.min_excess_ratio, required_deviations(len(excess)) * deviation)
    slow = np.flatnonzero(excess >= threshold)
    if len(slow) < min_steps:
        return None
    return Phase(
        row=0,
        first=int(slow[0]),
        last=int(slow[-1]),
        excess_ratio=float(np.median(excess[slow])),
        deviation=deviation,
        threshold=threshold,
    )
