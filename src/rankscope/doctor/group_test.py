"""Group testing: which hosts are slow, from collectives of groups of hosts.

Every host is in several groups. A group is slow if one of its hosts is. So a host in any fast group
is not slow, and the only host of a slow group that is in no fast one is slow for certain. If a slow
group has several such hosts, the groups do not say which of them is slow.

Source: Imbue, "From bare metal to a 70B model": 48 hosts as 6 x 8, then as 8 x 6, intersected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

MIN_GRID_HOSTS = 16
"""Hosts from which on there are at least four rows and four columns, so that each group has three
peers. Fewer hosts are tested in pairs."""

MIN_ROWS = math.isqrt(MIN_GRID_HOSTS)

NUM_PAIR_ROUNDS = 3
"""Rounds of pairs. With three partners each, two slow hosts never hide behind each other."""

Group = tuple[int, ...]
"""Numbers of the hosts in a group, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspects:
    """Hosts that slow groups accuse."""

    slow: tuple[int, ...]
    """Hosts that are slow for certain."""

    unclear: tuple[Group, ...] = ()
    """For each slow group that none of them explains: the hosts of which at least one is slow."""

    hidden: tuple[int, ...] = ()
    """Hosts in no fast group, whose slow groups all have a host that is slow for certain."""

    contradictory: tuple[Group, ...] = ()
    """Slow groups whose hosts are all in fast groups too: slow only together, or only for a
    time."""


def plan_rounds(num_hosts: int) -> list[list[Group]]:
    """Return the rounds of the test, each with groups that have no host in common.

    From `MIN_GRID_HOSTS` hosts on there are two rounds: the rows of a grid that is nearly square,
    then its columns. Two hosts are together in one group at most. Fewer hosts are paired in rounds
    of a tournament.
    """
    if num_hosts < MIN_GRID_HOSTS:
        return plan_pairs(num_hosts)
    most = math.isqrt(num_hosts)
    exact = [rows for rows in range(most, most // 2, -1) if num_hosts % rows == 0]
    num_rows = next((rows for rows in exact if rows >= MIN_ROWS), most)
    ends = [row * num_hosts // num_rows for row in range(num_rows + 1)]
    rows = [tuple(range(*pair)) for pair in pairwise(ends)]
    columns = [
        tuple(row[number] for row in rows if number < len(row))
        for number in range(max(map(len, rows)))
    ]
    *full, last = columns
    if len(last) > 1:
        return [rows, columns]
    # A column of one host would test nothing: it gets a partner of another row, in its own round.
    own_row = next(row for row in rows if last[0] in row)
    partner = next(host for host in full[0] if host not in own_row)
    return [rows, full, [tuple(sorted((*last, partner)))]]


def plan_pairs(num_hosts: int) -> list[list[Group]]:
    """Return the first rounds of a tournament, by the circle method.

    A host is in one pair of a round at most, and has three partners from four hosts on.
    """
    if num_hosts < 2:  # noqa: PLR2004  # a pair
        return []
    players: list[int | None] = [*range(num_hosts)] + ([None] if num_hosts % 2 else [])
    size = len(players)
    rounds: list[list[Group]] = []
    # With an odd number one host pauses in each round, so that one round more is needed.
    for _ in range(min(size - 1, NUM_PAIR_ROUNDS + num_hosts % 2)):
        pairs = [(players[place], players[size - 1 - place]) for place in range(size // 2)]
        rounds.append(
            sorted(
                (min(one, other), max(one, other))
                for one, other in pairs
                if one is not None and other is not None
            )
        )
        players = [players[0], players[-1], *players[1:-1]]
    return rounds


def find_suspects(groups: Sequence[Group], slow: Collection[Group]) -> Suspects:
    """Return the slow hosts, from all groups and from those that were slow."""
    cleared = {host for group in groups if group not in slow for host in group}
    candidates = {group: tuple(host for host in group if host not in cleared) for group in slow}
    certain = {hosts[0] for hosts in candidates.values() if len(hosts) == 1}
    unexplained = [hosts for hosts in candidates.values() if hosts and not certain & {*hosts}]
    accused = certain.union(*unexplained)
    return Suspects(
        slow=tuple(sorted(certain)),
        unclear=tuple(sorted(set(unexplained))),
        hidden=tuple(sorted(set().union(*candidates.values()) - accused)),
        contradictory=tuple(sorted(group for group, hosts in candidates.items() if not hosts)),
    )
