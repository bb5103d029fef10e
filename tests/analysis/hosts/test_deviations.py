"""Readings beside those of peers."""

from __future__ import annotations

import numpy as np
import pytest

from rankscope.analysis.hosts.deviations import QUANTITIES, HostReadings
from rankscope.analysis.trace.context import SampleTable
from tests.support.analysis.sample_builders import S, join, samples

PLACES = {rank: (f"h{rank // 4}", rank % 4) for rank in range(16)}
HOSTS = [("h0", -1), ("h1", -1), ("h2", -1), ("h3", -1)]


def readings(table: SampleTable, *, begin_s: int = 10, end_s: int = 19) -> HostReadings:
    return HostReadings(samples=table, begin_ns=begin_s * S, end_ns=end_s * S, places=PLACES)


def by_device(usual: float, **of_rank: list[float]) -> dict[tuple[str, int], list[float]]:
    """Return 20 readings of each device with noise of a thousandth; ``r5=[...]`` of one rank."""
    noise = np.random.default_rng(0)
    rows = {
        place: (usual * (1 + 0.001 * noise.normal(size=20))).tolist() for place in PLACES.values()
    }
    return rows | {PLACES[int(name[1:])]: values for name, values in of_rank.items()}


def texts(table: SampleTable, *ranks: int) -> list[str]:
    return [each.text for each in readings(table).deviations(ranks)]


def test_a_lower_clock_is_shown_beside_that_of_its_peers() -> None:
    table = samples("gpu-clock-hz", by_device(1.76e9, r5=[1.76e9] * 10 + [1.35e9] * 10))

    assert texts(table, 5) == ["GPU clock 1.35 GHz, peers 1.76 GHz"]
    assert texts(table, 4) == []


def test_a_difference_on_the_good_side_or_within_noise_says_nothing() -> None:
    fast = samples("gpu-clock-hz", by_device(1.76e9, r5=[1.98e9] * 20))
    near = samples("gpu-temperature-c", by_device(60.0, r5=[64.0] * 20))

    assert texts(fast, 5) == []
    assert texts(near, 5) == []


def test_a_counter_is_compared_by_what_it_grew_in_the_time() -> None:
    grows = [7.0] * 10 + [7.0 + 3 * n for n in range(10)]
    table = samples("gpu-ecc-uncorrected-errors", by_device(0.0, r5=grows))
    had_before = samples("gpu-ecc-uncorrected-errors", by_device(0.0, r5=[40.0] * 20))

    assert texts(table, 5) == ["uncorrected ECC errors 3/s, peers 0/s"]
    assert texts(had_before, 5) == []


def test_a_counter_that_rises_on_all_hosts_alike_is_no_deviation() -> None:
    rising = [100.0 * n for n in range(20)]
    table = samples("nic-dropped-packets", dict.fromkeys(HOSTS, rising))

    assert texts(table, 5) == []


def test_a_reading_of_the_host_is_compared_with_other_hosts() -> None:
    rows = dict.fromkeys(HOSTS, [0.02] * 20) | {("h1", -1): [0.02] * 10 + [0.6] * 10}
    table = samples("cpu-pressure-ratio", rows)

    assert texts(table, 5) == ["CPU pressure 60 %, peers 2 %"]
    assert texts(table, 1) == []


def test_on_a_single_host_its_own_other_steps_are_the_comparison() -> None:
    table = samples("io-pressure-ratio", {("h1", -1): [0.01] * 10 + [0.5] * 10})
    short = samples("io-pressure-ratio", {("h1", -1): [0.01] * 2 + [0.5] * 10})

    assert texts(table, 5) == ["I/O pressure 50 %, in other steps 1 %"]
    assert [each.text for each in readings(short, begin_s=2).deviations([5])] == []


def test_the_same_disk_of_each_host_is_compared() -> None:
    rows = dict.fromkeys(HOSTS, [2e6] * 20) | {("h1", -1): [90e6] * 20}
    table = samples("disk-read-latency-ns:nvme0n1", rows)

    assert texts(table, 5) == ["disk read latency of nvme0n1 90 ms, peers 2 ms"]


def test_throttle_reasons_are_named_where_most_others_have_none() -> None:
    rows = by_device(0.0, r5=[0.0] * 10 + [float(0x80 | 0x4)] * 10)
    table = samples(
        "gpu-throttle-reasons", {p: np.abs(v).round().tolist() for p, v in rows.items()}
    )

    assert texts(table, 5) == [
        "clock throttled by power cap and power brake, most of 15 other devices are not"
    ]
    # Without other devices there is nothing to compare with.
    assert not readings(table).deviations(range(16))


def test_processes_are_named_with_their_cpus_and_those_of_ranks_are_not() -> None:
    hog = samples("process-cpu-cores:burn[77]", {("h1", -1): [0.0] * 10 + [0.98] * 10})
    rank = samples("process-cpu-cores:python", {("h1", 1): [1.0] * 20})
    table = join(hog, rank)

    ((host, name, cores, before),) = readings(table).processes({"h1"})
    assert (host, name, before) == ("h1", "burn[77]", 0.0)
    assert cores == pytest.approx(0.98)
    assert readings(table).processes({"h0"}) == []


def test_a_process_that_is_not_among_the_busiest_in_a_reading_counts_as_idle_there() -> None:
    often = samples("process-cpu-cores:python", {("h1", 1): [1.0] * 20})
    seldom = samples("process-cpu-cores:gcc[9]", {("h1", -1): [2.0]})
    seldom = SampleTable(
        **{c: getattr(seldom, c) for c in ("host", "device", "name", "value", "hosts", "names")},
        at_ns=np.array([15 * S]),
    )

    assert readings(join(often, seldom)).processes({"h1"}) == []  # 2.0 in one of ten: 0.2


def test_many_small_processes_of_one_command_count_together() -> None:
    first = samples("process-cpu-cores:cc1[7]", {("h1", -1): [0.15] * 20})
    second = samples("process-cpu-cores:cc1[8]", {("h1", -1): [0.14] * 20})
    rest = samples("process-cpu-cores:cc1", {("h1", -1): [0.2] * 20})

    ((_, name, cores, _),) = readings(join(join(first, second), rest)).processes({"h1"})

    assert name == "cc1"
    assert cores == pytest.approx(0.49)


def test_a_process_that_other_hosts_have_alike_distinguishes_none() -> None:
    takes = {("h1", -1): [0.98] * 20, ("h2", -1): [0.9] * 20, ("h3", -1): [0.0] * 20}
    hog = samples("process-cpu-cores:burn[77]", takes)

    # h2 and h3 take 0.45 in the middle: not as much
    assert [name for _, name, _, _ in readings(hog).processes({"h1"})] == ["burn[77]"]
    alike = samples("process-cpu-cores:burn[77]", takes | {("h3", -1): [0.8] * 20})
    assert readings(alike).processes({"h1"}) == []
    assert readings(alike).processes({"h1", "h2", "h3"}) != []


def test_the_same_command_with_another_number_is_the_same() -> None:
    here = samples("process-cpu-cores:burn[77]", {("h1", -1): [0.98] * 20})
    there = samples("process-cpu-cores:burn[5]", {("h1", -1): [0.0], ("h2", -1): [0.9] * 20})
    table = join(here, there)

    # h2 is the second host of the joined table, which has the hosts of the first one
    table = SampleTable(
        **{c: getattr(table, c) for c in ("device", "name", "value", "names", "at_ns", "host")},
        hosts=("h1", "h2"),
    )
    assert readings(table).processes({"h1"}) == []


def test_what_was_not_read_is_named() -> None:
    table = samples("gpu-clock-hz", by_device(1.76e9))

    assert readings(table).not_measured(["GPU", "network"], {"h0", "h9"}) == {
        "GPU": ["h9"],
        "network": ["h0", "h9"],
    }


def test_no_sample_at_all_harms_nothing() -> None:
    empty = samples("gpu-clock-hz", {("h0", 0): [1.0]})
    table = SampleTable(
        **{c: getattr(empty, c)[:0] for c in ("host", "device", "at_ns", "name", "value")},
        hosts=(),
        names=(),
    )

    assert readings(table).deviations([5]) == []
    assert readings(table).processes({"h0"}) == []


def test_every_quantity_has_words_of_its_own() -> None:
    words = [quantity.words for quantity in QUANTITIES.values()]

    assert len(words) == len(set(words))
