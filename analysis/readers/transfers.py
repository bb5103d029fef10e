"""Transfers of communication instances, each over one link."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.tracer.span import SpanFlag

from ..arrays.group_stats import MIN_ROWS_OF_KIND, mean_absolute_deviations
from ..arrays.grouping import factorize
from ..arrays.sorting import stable_argsort
from ..replay.model import NO_LINK, Link, Transfers

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ..trace.tables import SpanTable
    from .waits import WaitSplit

MAX_DELAY_RATIO = 0.05
"""Share of a communication by which another one of its call may delay it, or an eager send may
precede its receive: half of the smallest excess that is a finding."""

VARIES_FACTOR = 2.0
"""Ratio from which one duration varies more than another: a send that waits varies with all that
its receiver does, one that does not only with the link."""


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


def find_truncated(
    spans: SpanTable, split: WaitSplit, comm: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return the members of pairs whose transfer had begun before its receive was posted.

    A sender that does not wait for its receiver (an eager send) begins at once, and a receive that
    is posted meanwhile ends with it. Its duration, the shorter one, is then only a lower bound of
    the transfer. The record of one such pair looks as if the sender had waited. But if senders
    wait, the send's duration varies with the receiver's lateness and the shorter duration is
    constant; if they don't, it is the other way round. So alike pairs are eager if that is so on
    most links that show a difference.

    Returns:
        Shape as ``comm``: both members of such a pair.
    """
    truncated = np.zeros(len(comm), dtype=np.bool_)
    is_pair = (spans.src_rank[comm] >= 0) & (spans.dst_rank[comm] >= 0)
    rows = np.flatnonzero(is_pair & (split.instance[comm] >= 0))
    rows = rows[stable_argsort(split.instance[comm[rows]])]
    instance = split.instance[comm[rows]]
    first = np.flatnonzero(instance[1:] == instance[:-1])
    is_send = spans.rank[comm[rows]] == spans.src_rank[comm[rows]]
    send = rows[np.where(is_send[first], first, first + 1)]
    receive = rows[np.where(is_send[first], first + 1, first)]
    whole_ns = spans.duration_ns[comm[send]].astype(np.float64)
    seen_ns = np.minimum(whole_ns, spans.duration_ns[comm[receive]])
    known = ((spans.flags[comm[send]] | spans.flags[comm[receive]]) & SpanFlag.END_BOUND) == 0
    # A send that ended before its receive was posted was buffered, and is known as such.
    known &= split.wait_ns[comm[send]] + split.wait_ns[comm[receive]] > 0
    if not (known & (seen_ns < whole_ns)).any():
        return truncated
    send, receive, whole_ns, seen_ns = (each[known] for each in (send, receive, whole_ns, seen_ns))
    row = comm[send]
    link, num_links = factorize(
        spans.src_rank[row], spans.dst_rank[row], spans.kind[row], spans.num_bytes[row]
    )
    alike, num_alike = factorize(spans.kind[row], spans.num_bytes[row])
    alike_of_link = np.zeros(num_links, dtype=np.int64)
    alike_of_link[link] = alike
    of_whole, of_seen = (
        mean_absolute_deviations(each, link, num_links) for each in (whole_ns, seen_ns)
    )
    votes = (of_seen > VARIES_FACTOR * of_whole).astype(np.float64)
    votes -= of_whole > VARIES_FACTOR * of_seen
    votes[np.bincount(link, minlength=num_links) < MIN_ROWS_OF_KIND] = 0.0
    eager = np.bincount(alike_of_link, weights=votes, minlength=num_alike) > 0
    shorter = eager[alike] & (whole_ns - seen_ns > MAX_DELAY_RATIO * whole_ns)
    truncated[send[shorter]] = truncated[receive[shorter]] = True
    return truncated


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
        make_link: Returns the link of a member's row.
        link_extent: Returns the number of a link's members, and whether they are on several hosts.
            Transfers are alike only over links of equal extent.
    """
    order = stable_argsort(members.instance)
    first = np.flatnonzero(np.diff(members.instance[order], prepend=-1))
    sizes = np.diff(np.append(first, len(order)))
    lead = order[first]
    link, num_links = factorize(*members.link_key[:, lead])
    any_instance = np.zeros(num_links, dtype=np.int64)
    any_instance[link] = lead
    links = tuple(map(make_link, any_instance.tolist()))
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
