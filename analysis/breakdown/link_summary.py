"""Transfers of a run by link, kind, host and switch, for a page."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import NS_PER_S

from ..report.network import LinkGroup, LinkMatrix, LinkSummary, LinkTotal, LinkTransfers
from ..statistics.link_profile import LinkTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from ..statistics.link_profile import LinkProfile
    from ..statistics.phases import Phase

MAX_LINKS = 500
"""Links of a summary: what a table can show and a person can read."""

MAX_TOTALS = 500
"""Likewise, hosts or switches."""

MAX_ENDS = 96
"""Rows of the matrix: each has at least 5 pixels on a page."""

MAX_MEMBERS = 16
"""Members of a group that are named."""

NUM, ACTUAL_NS, EXPECTED_NS, BYTES, BYTES_NS = range(5)
"""Rows of the sums: transfers, their time, the expected time, and, of the transfers of known size,
bytes and time."""


def summarize_links(profile: LinkProfile) -> LinkSummary | None:
    """Return the transfers of a run by link; None if no transfer is known.

    A link is slow if it is among `LinkProfile.slow_links`, or in the `LinkProfile.rise`. These are
    the rules of the causes `slow-link` and `network-degradation`, which may still explain a slow
    link otherwise, as by a slow device at its end.
    """
    slow: dict[int, Phase] = {}
    if profile.rise is not None:
        slow = dict.fromkeys(np.flatnonzero(profile.rise.is_slower).tolist(), profile.rise.phase)
    for phase in sorted(profile.slow_links, key=lambda phase: phase.num_steps):
        slow[phase.row] = phase
    sums = _sum_links(profile)
    compared = np.flatnonzero((sums[NUM] > 0) & (sums[EXPECTED_NS] > 0))
    if not len(compared):
        return None
    is_slow = np.isin(np.arange(len(profile.links)), list(slow))
    order = compared[np.lexsort((-_excess(sums[:, compared]), ~is_slow[compared]))]
    return LinkSummary(
        num_links=len(compared),
        num_slow=int(is_slow[compared].sum()),
        links=tuple(
            _transfers(profile, sums[:, link], link, slow.get(link))
            for link in order[:MAX_LINKS].tolist()
        ),
        totals=tuple(
            total
            for group in LinkGroup
            for total in _totals(profile, sums, compared, group, is_slow)
        ),
        matrix=_matrix(profile, sums, order),
    )


def _sum_links(profile: LinkProfile) -> NDArray[np.float64]:
    """Return the sums of each link over all steps. Shape (5, links)."""
    transfers, num_links = profile.transfers, len(profile.links)
    # A step without alike transfers counts on neither side.
    is_known = ~np.isnan(profile.usual_ns)
    sized = transfers.num_bytes > 0
    return np.array(
        [
            *(
                np.where(is_known, values, 0.0).sum(axis=1)
                for values in (profile.num_instances, profile.total_ns, profile.usual_ns)
            ),
            *(
                np.bincount(transfers.link[sized], weights=values[sized], minlength=num_links)
                for values in (transfers.num_bytes, transfers.transfer_ns)
            ),
        ]
    )


def _excess(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the excess over the expected time. Shape as a row of ``sums``; NaN if unknown."""
    expected = sums[EXPECTED_NS]
    excess: NDArray[np.float64] = sums[ACTUAL_NS] / np.where(expected > 0, expected, np.nan) - 1.0
    return excess


def _rate(sums: NDArray[np.float64]) -> float | None:
    return float(sums[BYTES] * NS_PER_S / sums[BYTES_NS]) if sums[BYTES_NS] > 0 else None


def _transfers(
    profile: LinkProfile,
    sums: NDArray[np.float64],
    number: int,
    slow: Phase | None,
) -> LinkTransfers:
    """Return one link, a slow one in its slow steps; ``sums`` has shape (5,)."""
    link = profile.links[number]
    members = link.members[:MAX_MEMBERS]
    names = dict.fromkeys(profile.ranks[rank].host for rank in members)
    num_steps = int((~np.isnan(profile.usual_ns[number])).sum())
    if slow is None:
        times = LinkTimes(
            transfer_ns=float(sums[ACTUAL_NS] / sums[NUM]),
            expected_ns=float(sums[EXPECTED_NS] / sums[NUM]),
            lost_ns_per_step=float(sums[ACTUAL_NS] - sums[EXPECTED_NS]) / num_steps,
            bytes_per_s=_rate(sums),
        )
    else:
        times = profile.times_within(number, slow.shown, usual_ns=profile.usual_ns)
    return LinkTransfers(
        members=members,
        num_members=len(link.members),
        kind=link.kind,
        is_pair=link.is_pair,
        hosts=() if "" in names else tuple(names),
        num_transfers=int(sums[NUM]),
        transfer_ns=times.transfer_ns,
        expected_ns=times.expected_ns,
        bytes_per_s=times.bytes_per_s,
        lost_ns_per_step=times.lost_ns_per_step,
        slow_steps=None if slow is None else slow.steps(profile.steps),
    )


def _totals(
    profile: LinkProfile,
    sums: NDArray[np.float64],
    compared: NDArray[np.int64],
    group: LinkGroup,
    is_slow: NDArray[np.bool_],
) -> Sequence[LinkTotal]:
    links, ranks = profile.links, profile.ranks
    names_of: dict[LinkGroup, Callable[[int], set[str]]] = {
        LinkGroup.KIND: lambda link: {links[link].kind},
        LinkGroup.HOST: lambda link: {ranks[rank].host for rank in links[link].members},
        LinkGroup.SWITCH: lambda link: {ranks[rank].switch for rank in links[link].members},
    }
    links_of: dict[str, list[int]] = defaultdict(list)
    for link in compared.tolist():
        for name in names_of[group](link):
            links_of[name].append(link)
    links_of.pop("", None)
    whole = {name: sums[:, chosen].sum(axis=1) for name, chosen in links_of.items()}
    totals = [
        LinkTotal(
            group=group,
            name=name,
            num_links=len(chosen),
            num_slow=int(is_slow[chosen].sum()),
            num_transfers=int(whole[name][NUM]),
            excess_ratio=float(_excess(whole[name])),
            bytes_per_s=_rate(whole[name]),
        )
        for name, chosen in links_of.items()
    ]
    return sorted(totals, key=lambda total: (-total.excess_ratio, total.name))[:MAX_TOTALS]


def _matrix(
    profile: LinkProfile, sums: NDArray[np.float64], order: NDArray[np.int64]
) -> LinkMatrix | None:
    """Return the matrix of the pairs: by host if several hosts are known, else by rank."""
    pairs = order[profile.is_pair[order]]
    if not len(pairs):
        return None
    members = [profile.links[link].members for link in pairs]
    hosts = {profile.ranks[rank].host for ends in members for rank in ends}
    of_hosts = "" not in hosts and len(hosts) > 1
    names = [
        [profile.ranks[rank].host if of_hosts else str(rank) for rank in ends] for ends in members
    ]
    ends = list(dict.fromkeys(name for both in names for name in both))
    # Shorter names first: node9 before node10.
    shown = sorted(ends[:MAX_ENDS], key=lambda name: (len(name), name))
    row = {name: number for number, name in enumerate(shown)}
    cell = np.array([[row.get(name, -1) for name in both] for both in names])
    is_shown = (cell >= 0).all(axis=1)
    cells = np.zeros((len(sums), len(shown), len(shown)))
    np.add.at(cells, (slice(None), *cell[is_shown].T), sums[:, pairs[is_shown]])
    return LinkMatrix(
        ends=tuple(shown),
        of_hosts=of_hosts,
        num_left_out=len(ends) - len(shown),
        excess_ratio=_excess(cells),
        bytes_per_s=cells[BYTES]
        * NS_PER_S
        / np.where(cells[BYTES_NS] > 0, cells[BYTES_NS], np.nan),
    )
