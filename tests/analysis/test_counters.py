from __future__ import annotations

import numpy as np

from analysis.context import SampleTable, no_samples
from analysis.counters import clock_drop, network_trouble

S = 1_000_000_000
PHASE = (3 * S, 6 * S)


def samples(name: str, rows: dict[tuple[str, int], list[float]]) -> SampleTable:
    """Return one reading a second of each (host, device), from second 0 on."""
    hosts = tuple(sorted({host for host, _ in rows}))
    flat = [
        (hosts.index(host), device, second * S, value)
        for (host, device), values in rows.items()
        for second, value in enumerate(values)
    ]
    host, device, at, value = zip(*flat, strict=True)
    return SampleTable(
        host=np.array(host, np.int32),
        device=np.array(device, np.int32),
        at_ns=np.array(at, np.int64),
        name=np.zeros(len(flat), np.int32),
        value=np.array(value, np.float64),
        hosts=hosts,
        names=(name,),
    )


def test_a_clock_that_falls_in_the_slow_phase_explains_it() -> None:
    readings = samples(
        "gpu-clock-hz",
        {("a", 0): [2e9, 2e9, 2e9, 1.5e9, 1.5e9, 1.5e9, 1.5e9], ("a", 1): [2e9] * 7},
    )

    drop = clock_drop(readings, "a", 0, PHASE)

    assert drop is not None
    assert (drop.name, drop.inside, drop.usual) == ("gpu-clock-hz", 1.5e9, 2e9)


def test_a_clock_like_its_peers_explains_nothing() -> None:
    readings = samples("gpu-clock-hz", {("a", 0): [1.99e9] * 7, ("a", 1): [2e9] * 7})

    assert clock_drop(readings, "a", 0, PHASE) is None
    assert clock_drop(no_samples(), "a", 0, PHASE) is None


def test_a_counter_that_grows_in_the_phase_names_the_trouble_and_its_hosts() -> None:
    quiet = [0.0, 1, 2, 3, 4, 5, 6]
    readings = samples(
        "rdma-retransmitted-packets",
        {("a", -1): [0.0, 1, 2, 3, 900, 1800, 2700], ("b", -1): quiet, ("c", -1): quiet},
    )

    trouble = network_trouble(readings, PHASE)

    assert (trouble.word, trouble.hosts) == ("retransmits", ("a",))


def test_quiet_counters_are_told_from_none() -> None:
    quiet = samples("rdma-ecn-marked-packets", {("a", -1): [0.0, 1, 2, 3, 4, 5, 6]})

    assert str(network_trouble(quiet, PHASE)) == "the network's counters are quiet"
    assert str(network_trouble(no_samples(), PHASE)) == "there are no counters to tell why"


def test_a_part_that_is_called_like_a_trouble_is_none() -> None:
    # A container is called "pause" in every pod, and a process may be called after a clock.
    busier = {("a", -1): [0.0, 0, 0, 9, 9, 9, 0], ("a", 0): [9.0, 9, 9, 0, 0, 0, 9]}
    command = samples("process-cpu-cores:pause", busier)
    clock = samples("process-cpu-cores:clockd", busier)

    assert not network_trouble(command, PHASE).is_known
    assert clock_drop(clock, "a", 0, PHASE) is None
