"""Transfers of communication instances, each over one link."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays.grouping import factorize
from ..arrays.sorting import stable_argsort
from ..replay.model import NO_LINK, Link, Transfers

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceMembers:
    """Members of communication instances, one row each."""

    instance: NDArray[np.integer[Any]]
    """Equal for the members of one instance."""

    step: NDArray[np.int32]
    """Step number."""

    duration_ns: NDArray[np.int64]
    num_bytes: NDArray[np.int64]
    name: NDArray[np.int32]
    """Codes into ``names``."""

    names: tuple[str, ...]
    is_unclear: NDArray[np.bool_]
    """One such member excludes its instance."""

    link_key: NDArray[np.integer[Any]]
    """Shape (keys, members): equal columns for members of one link."""

    alike_key: NDArray[np.integer[Any]]
    """Shape (keys, members): equal columns for alike operations."""

    operation: NDArray[np.int64]
    """The member's operation in the replay."""


def collect_transfers(
    members: InstanceMembers,
    *,
    make_link: Callable[[int], Link],
    link_extent: Callable[[Link], tuple[int, bool]],
    num_operations: int,
) -> Transfers:
    """Return the transfer of each instance.

    The member that entered last did not wait, so the shortest duration of an instance is its
    transfer, independent of clock errors.

    Args:
        members: The members of all instances.
        make_link: Returns the link of a member's row.
        link_extent: Returns the number of a link's members, and whether they are on several hosts.
            Transfers are alike only over links of equal extent.
        num_operations: Number of operations of the replay.
    """
    order = stable_argsort(members.instance)
    first = np.flatnonzero(np.diff(members.instance[order], prepend=-1))
    sizes = np.diff(np.append(first, len(order)))
    lead = order[first]
    link, num_links = factorize(*members.link_key[:, lead])
    links = tuple(make_link(int(lead[row])) for row in _pick_rows(link, num_links))
    extent = np.array([link_extent(each) for each in links], dtype=np.int64).reshape(-1, 2)
    alike, _ = factorize(*members.alike_key[:, lead], *extent[link].T)
    link_of_operation = np.full(num_operations, NO_LINK, dtype=np.int32)
    link_of_operation[members.operation[order]] = np.repeat(link, sizes)
    known = np.ones(len(first), dtype=np.bool_)
    shortest = members.duration_ns[:0]
    if len(first):
        known = ~np.logical_or.reduceat(members.is_unclear[order], first)
        shortest = np.minimum.reduceat(members.duration_ns[order], first)
    return Transfers(
        step=members.step[lead][known],
        link=link[known].astype(np.int32),
        alike=alike[known].astype(np.int32),
        transfer_ns=shortest[known],
        num_bytes=members.num_bytes[lead][known],
        name=members.name[lead][known],
        names=members.names,
        links=links,
        link_of_operation=link_of_operation,
    )


def _pick_rows(code: NDArray[np.int64], num: int) -> list[int]:
    """Return one row of each code."""
    row = np.zeros(num, dtype=np.int64)
    row[code] = np.arange(len(code))
    rows: list[int] = row.tolist()
    return rows
