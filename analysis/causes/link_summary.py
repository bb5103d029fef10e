"""Transfers of a run by link, kind, host and switch, for a page."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import NS_PER_S

from ..arrays.group_stats import row_medians
from ..report.network import LinkGroup, LinkMatrix, LinkSummary, LinkTotal, LinkTransfers
from .link_profile import against_own_steps, find_slow_links
from .network_degradation import find_common_slowness

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from ..statistics.phases import Phase
    from ..trace.tables import RankInfo
    from .link_profile import LinkProfile

MAX_LINKS = 500
"""Links of a summary: what a table can show and a person can read."""

MAX_TOTALS = 500
"""Likewise, hosts or switches."""

MAX_ENDS = 96
"""Rows of the matrix: each has at least 5 pixels on a page."""

MAX_MEMBERS = 16
"""Members of a group that are named."""


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums over all steps. Each has shape (links,)."""

    num: NDArray[np.int64]
    actual_ns: NDArray[np.float64]
    expected_ns: NDArray[np.float64]
    num_bytes: NDArray[np.float64]
    """Of the transfers of known size ..."""

    bytes_ns: NDArray[np.float64]
    """... and their time."""

    is_slow: NDArray[np.bool_]


def summarize_links(profile: LinkProfile, ranks: Mapping[int, RankInfo]) -> LinkSummary | None:
    """Return the transfers of a run by link; None if no transfer is known.

    A link is slow if `find_slow_links` finds it among alike ones. Links that became slow together
    with most others are slow too, and are compared with their own other steps instead. These are
    the rules of the causes `slow-link` and `network-degradation`, which may still explain a slow
    link otherwise, as by a slow device at its end.

    Args:
        profile: Transfers by link and step, compared with alike ones.
        ranks: Location of each rank.
    """
    slow = find_slow_links(profile)
    phases: dict[int, tuple[int, int]] = {}
    for each in sorted(slow, key=lambda one: one.phase.num_steps):
        first, last = profile.steps[[each.phase.first, each.phase.last]].tolist()
        phases[each.link] = (first, last)
    hosts = {rank: info.host for rank, info in ranks.items()}
    common = find_common_slowness(profile, hosts)
    profile = against_own_steps(profile, [each.link for each in slow])
    if common is not None:
        first, last = profile.steps[[common[0].first, common[0].last]].tolist()
        phases = dict.fromkeys(np.flatnonzero(common[1]).tolist(), (first, last)) | phases
        profile = replace(profile, expected_ns=_against_other_steps(profile, *common))
    sums = _sum_links(profile, list(phases))
    known = np.flatnonzero((sums.num > 0) & (sums.expected_ns > 0))
    if not len(known):
        return None
    excess = sums.actual_ns[known] / sums.expected_ns[known] - 1.0
    order = known[np.lexsort((-excess, ~sums.is_slow[known]))]
    return LinkSummary(
        num_links=len(known),
        num_slow=int(sums.is_slow[known].sum()),
        links=tuple(
            _transfers(profile, sums, link, phases.get(link), ranks)
            for link in order[:MAX_LINKS].tolist()
        ),
        totals=(
            *_totals(profile, sums, known, LinkGroup.KIND, ranks),
            *_totals(profile, sums, known, LinkGroup.HOST, ranks),
            *_totals(profile, sums, known, LinkGroup.SWITCH, ranks),
        ),
        matrix=_matrix(profile, sums, order, ranks),
    )


def _against_other_steps(
    profile: LinkProfile, phase: Phase, is_slower: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return the expected times, with those of links that are slow together from other steps."""
    outside = profile.total_ns[is_slower].copy()
    outside[:, phase.first : phase.last + 1] = np.nan
    own = row_medians(outside) if outside.size else np.zeros(0)
    expected = profile.expected_ns.copy()
    known = np.where(np.isnan(expected[is_slower]), np.nan, own[:, None])
    expected[is_slower] = np.where(np.isnan(own)[:, None], expected[is_slower], known)
    return expected


def _sum_links(profile: LinkProfile, slow: Sequence[int]) -> _Sums:
    transfers = profile.transfers
    num_links = len(transfers.links)
    sized = transfers.num_bytes > 0
    link = transfers.link[sized]
    is_slow = np.zeros(num_links, dtype=np.bool_)
    is_slow[list(slow)] = True
    # A step without alike transfers counts on neither side.
    is_known = ~np.isnan(profile.expected_ns)
    return _Sums(
        num=np.where(is_known, profile.num_instances, 0).sum(axis=1).astype(np.int64),
        actual_ns=np.where(is_known, profile.total_ns, 0.0).sum(axis=1),
        expected_ns=np.where(is_known, profile.expected_ns, 0.0).sum(axis=1),
        num_bytes=_sums(link, transfers.num_bytes[sized], num_links),
        bytes_ns=_sums(link, transfers.transfer_ns[sized], num_links),
        is_slow=is_slow,
    )


def _sums(index: NDArray[np.int32], value: NDArray[np.int64], num: int) -> NDArray[np.float64]:
    return np.bincount(index, weights=value, minlength=num).astype(np.float64)


def _transfers(
    profile: LinkProfile,
    sums: _Sums,
    number: int,
    slow_steps: tuple[int, int] | None,
    ranks: Mapping[int, RankInfo],
) -> LinkTransfers:
    link, num = profile.transfers.links[number], int(sums.num[number])
    members = link.members[:MAX_MEMBERS]
    names = dict.fromkeys(ranks[rank].host for rank in members)
    num_steps = int((~np.isnan(profile.expected_ns[number])).sum())
    lost_ns = float(sums.actual_ns[number] - sums.expected_ns[number])
    return LinkTransfers(
        members=members,
        num_members=len(link.members),
        kind=link.kind,
        is_pair=link.is_pair,
        hosts=() if "" in names else tuple(names),
        num_transfers=num,
        transfer_ns=float(sums.actual_ns[number]) / num,
        expected_ns=float(sums.expected_ns[number]) / num,
        bytes_per_s=_rate(sums, [number]),
        lost_ns_per_step=lost_ns / num_steps,
        slow_steps=slow_steps,
    )


def _rate(sums: _Sums, links: Sequence[int]) -> float | None:
    """Return the bytes per second of some links; None if no size is known."""
    time_ns = float(sums.bytes_ns[links].sum())
    return float(sums.num_bytes[links].sum()) * NS_PER_S / time_ns if time_ns > 0 else None


def _totals(
    profile: LinkProfile,
    sums: _Sums,
    known: NDArray[np.int64],
    group: LinkGroup,
    ranks: Mapping[int, RankInfo],
) -> tuple[LinkTotal, ...]:
    """Return the totals of one group, the largest excess first."""
    links = profile.transfers.links
    names_of: dict[LinkGroup, Callable[[int], set[str]]] = {
        LinkGroup.KIND: lambda link: {links[link].kind},
        LinkGroup.HOST: lambda link: {ranks[rank].host for rank in links[link].members},
        LinkGroup.SWITCH: lambda link: {ranks[rank].switch for rank in links[link].members},
    }
    mine: dict[str, list[int]] = defaultdict(list)
    for link in known.tolist():
        for name in names_of[group](link):
            mine[name].append(link)
    mine.pop("", None)
    found = [
        LinkTotal(
            group=group,
            name=name,
            num_links=len(chosen),
            num_slow=int(sums.is_slow[chosen].sum()),
            num_transfers=int(sums.num[chosen].sum()),
            excess_ratio=float(sums.actual_ns[chosen].sum() / sums.expected_ns[chosen].sum()) - 1.0,
            bytes_per_s=_rate(sums, chosen),
        )
        for name, chosen in mine.items()
    ]
    return tuple(sorted(found, key=lambda one: (-one.excess_ratio, one.name))[:MAX_TOTALS])


def _matrix(
    profile: LinkProfile,
    sums: _Sums,
    order: NDArray[np.int64],
    ranks: Mapping[int, RankInfo],
) -> LinkMatrix | None:
    """Return the matrix of the pairs: by host if several hosts are known, else by rank.

    Args:
        profile: Transfers by link and step.
        sums: Their sums.
        order: Links, the slowest first: their ends have a row.
        ranks: Location of each rank.
    """
    links = profile.transfers.links
    pairs = [link for link in order.tolist() if links[link].is_pair]
    if not pairs:
        return None
    hosts = {ranks[rank].host for link in pairs for rank in links[link].members}
    of_hosts = "" not in hosts and len(hosts) > 1

    def end(rank: int) -> str:
        return ranks[rank].host if of_hosts else str(rank)

    ends = list(dict.fromkeys(end(rank) for link in pairs for rank in links[link].members))
    shown = sorted(ends[:MAX_ENDS], key=_natural_key)
    place = {name: row for row, name in enumerate(shown)}
    shape = (len(shown), len(shown))
    actual, expected, num_bytes, time_ns = (np.zeros(shape) for _ in range(4))
    for link in pairs:
        source, target = (place.get(end(rank)) for rank in links[link].members)
        if source is None or target is None:
            continue
        actual[source, target] += sums.actual_ns[link]
        expected[source, target] += sums.expected_ns[link]
        num_bytes[source, target] += sums.num_bytes[link]
        time_ns[source, target] += sums.bytes_ns[link]
    actual[expected == 0], num_bytes[time_ns == 0] = np.nan, np.nan
    return LinkMatrix(
        ends=tuple(shown),
        of_hosts=of_hosts,
        num_left_out=len(ends) - len(shown),
        excess_ratio=actual / np.where(expected > 0, expected, 1.0) - 1.0,
        bytes_per_s=num_bytes * NS_PER_S / np.where(time_ns > 0, time_ns, 1.0),
    )


def _natural_key(name: str) -> tuple[str, int]:
    """Return a key that sorts "node9" before "node10"."""
    word = name.rstrip("0123456789")
    digits = name[len(word) :]
    return word, int(digits or 0)
