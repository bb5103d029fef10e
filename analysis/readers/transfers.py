"""Bring the members of each communication together, as one transfer over one link."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.grouping import factorize
from ..arrays.sorting import stable_argsort
from ..replay.model import NO_LINK, Link, Transfers

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceMembers:
    """One row per member of a communication instance."""

    instance: NDArray[np.int64]
    """Equal for the members of one instance."""

    step: NDArray[np.int32]
    """Step number."""

    duration_ns: NDArray[np.int64]
    num_bytes: NDArray[np.int64]
    name: NDArray[np.int32]
    """Codes into ``names``."""

    names: tuple[str, ...]
    unclear: NDArray[np.bool_]
    """One such member leaves its instance out."""

    carrier: NDArray[np.int64]
    """Shape (keys, members): members with equal columns share a link."""

    alike: NDArray[np.int64]
    """Shape (keys, members): columns of alike operations are equal."""

    operation: NDArray[np.int64]
    """The member's operation in the replay."""


def collect_transfers(
    members: InstanceMembers,
    *,
    link_of: Callable[[int], Link],
    spread_of: Callable[[Link], tuple[int, bool]],
    num_operations: int,
) -> Transfers:
    """Return one transfer an instance.

    The member that entered last waited for nobody: the shortest duration of an
    instance is its transfer, whatever the clocks say.

    Args:
        members: Who took part in what.
        link_of: Returns the link of a member's row.
        spread_of: Returns what else links must have in common to be alike: how
            many members, and whether they lie on several hosts.
        num_operations: Operations of the replay.
    """
    order = stable_argsort(members.instance)
    first = np.flatnonzero(np.diff(members.instance[order], prepend=-1))
    sizes = np.diff(np.append(first, len(order)))
    lead = order[first]
    link, num_links = factorize(*members.carrier[:, lead])
    links = tuple(link_of(int(lead[row])) for row in _pick_rows(link, num_links))
    spread = np.array([spread_of(each) for each in links], dtype=np.int64).reshape(-1, 2)
    kind, _ = factorize(*members.alike[:, lead], *spread[link].T)
    of_operation = np.full(num_operations, NO_LINK, dtype=np.int32)
    of_operation[members.operation[order]] = np.repeat(link, sizes)
    known = np.ones(len(first), dtype=np.bool_)
    shortest = members.duration_ns[:0]
    if len(first):
        known = ~np.logical_or.reduceat(members.unclear[order], first)
        shortest = np.minimum.reduceat(members.duration_ns[order], first)
    return Transfers(
        step=members.step[lead][known],
        link=link[known].astype(np.int32),
        alike=kind[known].astype(np.int32),
        transfer_ns=shortest[known],
        num_bytes=members.num_bytes[lead][known],
        name=members.name[lead][known],
        names=members.names,
        links=links,
        link_of_operation=of_operation,
    )


def _pick_rows(number: NDArray[np.int64], num: int) -> list[int]:
    row = np.zeros(num, dtype=np.int64)
    row[number] = np.arange(len(number))
    rows: list[int] = row.tolist()
    return rows
