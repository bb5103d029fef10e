from __future__ import annotations

from dataclasses import replace

import numpy as np

from rankscope.analysis.breakdown.bandwidth import measure_bandwidths
from rankscope.analysis.replay.model import Link, Transfers


def transfers(name: str, link: Link, num_bytes: int) -> Transfers:
    """Return three alike transfers, the median of which takes 2 ms."""
    zero = np.zeros(3, np.int32)
    return Transfers(
        step=zero,
        link=zero,
        alike=zero,
        transfer_ns=np.array([1_000_000, 2_000_000, 9_000_000], np.int64),
        num_bytes=np.full(3, num_bytes, np.int64),
        name=zero,
        names=(name,),
        links=(link,),
        link_of_operation=zero,
    )


RING = Link(members=(0, 1, 2, 3), kind="dp-comm", is_pair=False)


def test_an_all_reduce_moves_nearly_twice_its_bytes_over_each_link() -> None:
    (found,) = measure_bandwidths(transfers("all_reduce", RING, 8_000_000), {})

    # 8 MB in 2 ms: 4 GB/s; 2 (4 - 1) / 4 of it on the bus.
    assert (found.algorithm_bytes_per_s, found.bus_bytes_per_s) == (4e9, 6e9)
    assert found.across_hosts is None


def test_a_send_moves_its_bytes_once() -> None:
    pair = Link(members=(0, 8), kind="pp-send", is_pair=True)

    (found,) = measure_bandwidths(transfers("send", pair, 8_000_000), {0: "a", 8: "b"})

    assert (found.bus_bytes_per_s, found.across_hosts) == (4e9, True)


def test_the_two_directions_of_a_pipeline_are_one_class() -> None:
    down, up = (Link(members=pair, kind="pp-send", is_pair=True) for pair in ((0, 8), (8, 0)))
    one = transfers("send", down, 8_000_000)
    side = np.array([0, 1, 1], np.int32)

    (found,) = measure_bandwidths(replace(one, link=side, alike=side, links=(down, up)), {})

    assert (found.num_instances, found.transfer_ns) == (3, 2_000_000)


def test_an_unknown_operation_has_no_bus_bandwidth() -> None:
    (found,) = measure_bandwidths(
        transfers("permute", RING, 8_000_000), dict.fromkeys(range(4), "a")
    )

    assert (found.bus_bytes_per_s, found.across_hosts) == (None, False)


def test_without_sizes_there_is_no_bandwidth() -> None:
    assert measure_bandwidths(transfers("all_reduce", RING, -1), {}) == ()
