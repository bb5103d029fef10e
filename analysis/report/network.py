"""Records of a report: transfers by link, direct waits of ranks on ranks, and common pauses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .fields import FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTransfers:
    """Transfers of one link, compared with those of alike links.

    Those of a slow link are the ones in ``slow_steps``, as its finding counts them; those of any
    other link are of all analysed steps. A link that became slow together with most others is
    compared with its own other steps.
    """

    members: tuple[int, ...]
    """Global ranks: (source, destination) of a pair, the first ones ascending of a group."""

    num_members: int
    kind: str
    """Span kind; ``pp-send`` for a pair of stages."""

    is_pair: bool
    hosts: tuple[str, ...]
    """Names of the hosts of ``members``, in that order and each once; empty if unknown."""

    num_transfers: int
    transfer_ns: float
    """Mean; of a slow link the median of its slow steps."""

    expected_ns: float
    """Likewise of what it is compared with."""

    bytes_per_s: float | None
    """None if the sizes are unknown."""

    lost_ns_per_step: float
    """Time beyond that of alike links, mean of the steps with transfers; it may be negative."""

    slow_steps: tuple[int, int] | None
    """First and last step of its longest significant slowness; None if there is none."""

    @property
    def excess_ratio(self) -> float:
        """Transfer time above that of alike links."""
        return self.transfer_ns / self.expected_ns - 1.0

    @property
    def expected_bytes_per_s(self) -> float | None:
        """Bandwidth if it transferred as alike links do; None if the sizes are unknown."""
        rate = self.bytes_per_s
        return None if rate is None else rate * self.transfer_ns / self.expected_ns


class LinkGroup(StrEnum):
    """Property that the links of a `LinkTotal` share."""

    KIND = "kind"
    """The span kind of their transfers."""

    HOST = "host"
    """A host that at least one of their members is on. A link counts for each of its hosts."""

    SWITCH = "switch"
    """Likewise a network switch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTotal:
    """Transfers of the links that have something in common."""

    group: LinkGroup
    name: str
    num_links: int
    num_slow: int
    """Links that are significantly slower than alike ones."""

    num_transfers: int
    excess_ratio: float
    """Their transfer time above that of alike links."""

    bytes_per_s: float | None
    """Bytes over transfer time; None if no size is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMatrix:
    """Transfers of pairs from one end to the other."""

    ends: tuple[str, ...]
    """Names of hosts, or ranks; rows are senders and columns receivers."""

    of_hosts: bool
    """False: of ranks."""

    num_left_out: int
    """Ends without a row, because their pairs are the fastest."""

    excess_ratio: FloatArray
    """Shape (ends, ends): transfer time above that of alike pairs; NaN without a transfer."""

    bytes_per_s: FloatArray
    """Shape (ends, ends): NaN if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSummary:
    """Transfers of a run by link; see `analysis.breakdown.link_summary`."""

    num_links: int
    num_slow: int
    """Links that are significantly slower than alike ones."""

    links: tuple[LinkTransfers, ...]
    """Significantly slow ones first, then by the excess; a bounded number."""

    totals: tuple[LinkTotal, ...]
    """By group and name, the largest excess first; a bounded number for each group."""

    matrix: LinkMatrix | None
    """None if no transfer is between a pair."""


TRANSFER_CAUSES = frozenset({"slow-link", "network-degradation"})
"""Causes that are seen in transfers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitedLink:
    """A link whose slow transfers ranks wait for."""

    members: tuple[int, ...]
    """Global ranks: (source, destination) of a pair, all of a group ascending."""

    kind: str
    """Span kind of its transfers; ``pp-send`` for a pair of stages."""

    is_pair: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectWaits:
    """Waiting of ranks, beyond the pipeline's bubble, for the last member to arrive.

    The last member may itself have waited for another one: `analysis.breakdown.wait_graph` follows
    the waits outward from a rank. All columns have shape (pairs,), by ascending rank.
    """

    rank: IntArray
    """The rank that waits ..."""

    on_rank: IntArray
    """... for this member."""

    waiting_ns: IntArray
    """Over all analysed steps."""

    total_ns: int
    """Time of these steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonPause:
    """A step in which nearly all ranks pause at once."""

    step: int
    name: str
    """``checkpoint``, ``evaluation``, ``pause`` (planned, by its distance) or ``late input``."""

    seconds: float
    """Median of the ranks."""
