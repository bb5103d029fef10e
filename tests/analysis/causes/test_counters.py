from __future__ import annotations

import numpy as np
import pytest

from rankscope.analysis.causes.clock_throttle import find_clock_drop
from rankscope.analysis.causes.network_degradation import find_network_symptom
from rankscope.analysis.trace.context import SampleTable, empty_samples

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


def both(one: SampleTable, other: SampleTable) -> SampleTable:
    """Return the readings of two tables of the same hosts."""
    joined = {
        column: np.concatenate((getattr(one, column), getattr(other, column)))
        for column in ("host", "device", "at_ns", "value")
    }
    name = np.repeat(np.arange(2, dtype=np.int32), (len(one), len(other)))
    return SampleTable(**joined, name=name, hosts=one.hosts, names=one.names + other.names)


def test_a_clock_that_falls_in_the_slow_phase_explains_it() -> None:
    readings = samples(
        "gpu-clock-hz",
        {("a", 0): [2e9, 2e9, 2e9, 1.5e9, 1.5e9, 1.5e9, 1.5e9], ("a", 1): [2e9] * 7},
    )

    drop = find_clock_drop(readings, "a", 0, PHASE)

    assert drop is not None
    assert (drop.name, drop.inside, drop.usual) == ("gpu-clock-hz", 1.5e9, 2e9)
    assert drop.explained_ratio == pytest.approx(2 / 1.5 - 1)


def test_readings_of_the_time_beside_a_phase_do_not_hide_how_low_the_clock_was() -> None:
    # Two of six readings are of the time after: at 1.6 GHz compute takes a quarter longer.
    own = [2e9, 2e9, 2e9, 1.6e9, 1.6e9, 1.6e9, 1.6e9, 2e9, 2e9, 2e9]
    readings = samples("gpu-clock-hz", {("a", 0): own, ("a", 1): [2e9] * 10})

    drop = find_clock_drop(readings, "a", 0, (3 * S, 8 * S))

    assert drop is not None
    assert drop.explained_ratio == pytest.approx(0.25)


def test_power_speaks_only_where_no_clock_was_read() -> None:
    # A device that waits more draws less.
    watts = {("a", 0): [600.0, 600, 600, 500, 500, 500, 500], ("a", 1): [600.0] * 7}
    hertz = {("a", 0): [2e9] * 7, ("a", 1): [2e9] * 7}
    power = samples("gpu-power-w", watts)

    alone = find_clock_drop(power, "a", 0, PHASE)
    beside_clock = find_clock_drop(both(samples("gpu-clock-hz", hertz), power), "a", 0, PHASE)

    assert alone is not None
    assert (alone.name, alone.explained_ratio) == ("gpu-power-w", None)
    assert beside_clock is None


def test_a_clock_like_its_peers_explains_nothing() -> None:
    readings = samples("gpu-clock-hz", {("a", 0): [1.99e9] * 7, ("a", 1): [2e9] * 7})

    assert find_clock_drop(readings, "a", 0, PHASE) is None
    assert find_clock_drop(empty_samples(), "a", 0, PHASE) is None


def test_a_counter_that_grows_in_the_phase_names_the_trouble_and_its_hosts() -> None:
    quiet = [0.0, 1, 2, 3, 4, 5, 6]
    readings = samples(
        "rdma-retransmitted-packets",
        {("a", -1): [0.0, 1, 2, 3, 900, 1800, 2700], ("b", -1): quiet, ("c", -1): quiet},
    )

    trouble = find_network_symptom(readings, PHASE)

    assert (trouble.word, trouble.hosts) == ("retransmits", ("a",))


def test_counters_that_grow_on_all_hosts_alike_are_the_networks_trouble() -> None:
    # 10 a second before, and 100 a second from second 3 on.
    marked = [0.0, 10, 20, 30, 130, 230, 330]
    readings = samples("rdma-ecn-marked-packets", {("a", -1): marked, ("b", -1): marked})

    trouble = find_network_symptom(readings, PHASE)

    assert (trouble.word, trouble.hosts) == ("congestion", ("a", "b"))


def test_hosts_whose_congestion_is_counted_are_told_from_those_whose_losses_are() -> None:
    quiet = {("a", -1): [0.0] * 7, ("b", -1): [0.0] * 7}

    marks = find_network_symptom(samples("rdma-ecn-marked-packets", quiet), PHASE)
    losses = find_network_symptom(samples("tcp-retransmitted-packets", quiet), PHASE)

    assert (marks.word, marks.watched) == ("", frozenset({"a", "b"}))
    assert (losses.is_known, losses.watched) == (True, frozenset())


def test_quiet_counters_are_told_from_none() -> None:
    quiet = samples("rdma-ecn-marked-packets", {("a", -1): [0.0, 1, 2, 3, 4, 5, 6]})

    assert str(find_network_symptom(quiet, PHASE)) == "the network's counters are quiet"
    assert str(find_network_symptom(empty_samples(), PHASE)) == "there are no counters to tell why"


def test_a_part_that_is_called_like_a_trouble_is_none() -> None:
    # A container is called "pause" in every pod, and a process may be called after a clock.
    busier = {("a", -1): [0.0, 0, 0, 9, 9, 9, 0], ("a", 0): [9.0, 9, 9, 0, 0, 0, 9]}
    command = samples("process-cpu-cores:pause", busier)
    clock = samples("process-cpu-cores:clockd", busier)

    assert not find_network_symptom(command, PHASE).is_known
    assert find_clock_drop(clock, "a", 0, PHASE) is None
