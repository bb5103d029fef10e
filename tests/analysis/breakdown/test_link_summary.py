"""The transfers of a run by link, kind and host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.breakdown import link_summary
from rankscope.analysis.breakdown.link_summary import summarize_links
from rankscope.analysis.report.network import LinkGroup
from rankscope.analysis.trace.tables import RankInfo
from rankscope.tracer.topology import Coords
from tests.support.analysis.link_builders import MS, group, pair, profile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankscope.analysis.replay.model import Link
    from rankscope.analysis.report.network import LinkSummary

NUM_STEPS = 10


def summary(ms_of: Mapping[Link, Sequence[float]], *, ranks_per_host: int) -> LinkSummary:
    """Return the summary of links, on hosts "node0", "node1", ... behind switches of two hosts."""
    ranks = sorted({rank for link in ms_of for rank in link.members})
    infos = {
        rank: RankInfo(
            rank=rank,
            coords=Coords(dp=rank),
            host=f"node{rank // ranks_per_host}",
            switch=f"leaf{rank // ranks_per_host // 2}",
        )
        for rank in ranks
    }
    found = summarize_links(profile(ms_of, infos=infos))
    assert found is not None
    return found


def test_a_slow_pair_comes_first_with_its_excess_bandwidth_and_hosts() -> None:
    # GIVEN 2 transfers of 1 MiB a step on each of 8 pairs, which take 1 ms, and 4 ms on 2 -> 3
    ms_of = {pair(k, k + 1): [4.0 if k == 2 else 1.0] * NUM_STEPS for k in range(0, 16, 2)}

    found = summary(ms_of, ranks_per_host=1)

    assert (found.num_links, found.num_slow) == (8, 1)
    slow = found.links[0]
    assert (slow.members, slow.hosts, slow.slow_steps) == ((2, 3), ("node2", "node3"), (0, 9))
    assert (slow.num_transfers, slow.transfer_ns, slow.expected_ns) == (20, 4.0 * MS, 1.0 * MS)
    assert slow.excess_ratio == 3.0
    assert slow.lost_ns_per_step == 6.0 * MS
    # AND 1 MiB in 4 ms
    assert slow.bytes_per_s == pytest.approx(262_144_000.0)
    assert slow.expected_bytes_per_s == pytest.approx(1_048_576_000.0)


def test_links_that_became_slow_together_are_compared_with_their_own_other_steps() -> None:
    ms = [1.0] * 5 + [2.0] * 5
    found = summary({pair(k, k + 1): ms for k in range(0, 16, 2)}, ranks_per_host=1)

    assert (found.num_links, found.num_slow) == (8, 8)
    assert {link.slow_steps for link in found.links} == {(5, 9)}
    # THEN 2 ms instead of 1 in these steps
    assert {link.excess_ratio for link in found.links} == {1.0}


def test_totals_count_a_link_for_each_of_its_hosts_and_switches() -> None:
    slow = {pair(0, 2): [4.0] * NUM_STEPS}
    fast = {pair(k, k + 2): [1.0] * NUM_STEPS for k in range(4, 16, 4)}
    groups = {group(0, 1): [1.0] * NUM_STEPS, group(2, 3): [1.0] * NUM_STEPS}

    found = summary(slow | fast | groups, ranks_per_host=2)

    totals = {(each.group, each.name): each for each in found.totals}
    # node0: the slow pair, and a group of its own
    node0 = totals[LinkGroup.HOST, "node0"]
    assert (node0.num_links, node0.num_transfers) == (2, 40)
    assert totals[LinkGroup.KIND, "pp-send"].num_links == 4
    # one link is inside a switch, and counts once there
    assert totals[LinkGroup.SWITCH, "leaf0"].num_links == 3
    assert totals[LinkGroup.HOST, "node4"].excess_ratio == 0.0


def test_the_matrix_has_senders_as_rows_and_leaves_out_the_fastest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ms_of = {pair(k, k + 1): [4.0 if k == 8 else 1.0] * NUM_STEPS for k in range(0, 16, 2)}
    whole = summary(ms_of, ranks_per_host=1).matrix
    assert whole is not None
    assert whole.of_hosts
    assert len(whole.ends) == 16
    at = whole.ends.index("node8"), whole.ends.index("node9")
    assert whole.excess_ratio[at] == 3.0
    assert np.isfinite(whole.excess_ratio).sum() == 8

    monkeypatch.setattr(link_summary, "MAX_ENDS", 2)
    few = summary(ms_of, ranks_per_host=1).matrix
    assert few is not None
    assert (few.ends, few.num_left_out) == (("node8", "node9"), 14)
    # AND on one host, the ends are ranks
    alone = summary(ms_of, ranks_per_host=16).matrix
    assert alone is not None
    assert (alone.of_hosts, alone.ends) == (False, ("8", "9"))


def test_groups_without_pairs_have_no_matrix() -> None:
    found = summary({group(0, 1, 2, 3): [1.0] * NUM_STEPS}, ranks_per_host=1)
    assert found.matrix is None
