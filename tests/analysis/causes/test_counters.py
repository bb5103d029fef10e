from __future__ import annotations

from rankscope.analysis.causes.network_degradation import find_network_symptom
from rankscope.analysis.trace.context import empty_samples
from tests.support.analysis.sample_builders import S, samples

PHASE = (3 * S, 6 * S)


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

    assert not find_network_symptom(command, PHASE).is_known
