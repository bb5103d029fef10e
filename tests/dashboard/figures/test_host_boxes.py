"""Ranks in boxes of hosts, hosts in blocks of switches."""

from __future__ import annotations

import numpy as np

from rankscope.dashboard.figures.host_boxes import arrange_hosts
from rankscope.dashboard.records.rank_details import RankQuantity, RankValues
from rankscope.tracer.span import NONE


def values(num: int, *, per_host: int, hosts_per_switch: int, slow: int) -> RankValues:
    hosts = {
        rank: (f"n{rank // per_host}", f"s{rank // per_host // hosts_per_switch}")
        for rank in range(num)
    }
    return RankValues(
        quantity=RankQuantity.COMPUTE,
        steps=(0, 9),
        seconds={rank: 2.0 if rank == slow else 1.0 for rank in range(num)},
        hosts=hosts,
    )


def test_the_slow_host_and_its_switch_come_first() -> None:
    # GIVEN 8 hosts of 4 ranks behind 2 switches, with rank 26 slow: the third of the seventh host
    found = arrange_hosts(values(32, per_host=4, hosts_per_switch=4, slow=26))

    assert [(box.switch, box.host) for box in found.boxes[:2]] == [("s1", "n6"), ("s1", "n4")]
    assert {box.switch for box in found.boxes[4:]} == {"s0"}
    assert (found.boxes[0].line, found.boxes[0].column) == (0, 0)
    assert found.rank[0, :5].tolist() == [24, 25, 26, 27, NONE]
    assert found.seconds[0, 2] == 2.0
    # AND the other switch is a block below
    assert min(box.line for box in found.boxes[4:]) > max(box.line for box in found.boxes[:4])


def test_small_switches_are_side_by_side_so_that_the_picture_is_not_tall() -> None:
    # GIVEN 1,536 hosts of 8 ranks, 4 behind each switch: 32 boxes of 9 x 2 cells side by side
    found = arrange_hosts(values(12_288, per_host=8, hosts_per_switch=4, slow=26))

    # THEN 8 switches are side by side, an empty column more between them, in 48 rows
    assert found.seconds.shape == (48 * 2 - 1, 8 * (4 * 9 + 1) - 2)
    first, ninth = found.boxes[0], found.boxes[32]
    assert [box.column for box in found.boxes[3:5]] == [27, 37]
    assert (first.line, ninth.line, ninth.column) == (0, 2, 0)


def test_each_rank_has_one_cell_at_every_size() -> None:
    for num, per_host in ((1, 1), (12_288, 8), (24, 16), (7, 3)):
        found = arrange_hosts(values(num, per_host=per_host, hosts_per_switch=16, slow=0))
        assert np.sort(found.rank[found.rank != NONE]).tolist() == list(range(num))
        assert np.isnan(found.seconds).sum() == found.seconds.size - num


def test_ranks_of_unknown_hosts_share_a_box() -> None:
    unknown = RankValues(
        quantity=RankQuantity.WAIT, steps=(1, 1), seconds={0: 1.0, 1: 2.0}, hosts={}
    )
    (box,) = arrange_hosts(unknown).boxes
    assert (box.host, box.switch) == ("", "")
