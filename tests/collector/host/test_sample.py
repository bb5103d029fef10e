from __future__ import annotations

from rankscope.collector.host.sample import MAX_PARTS, CounterTotals, Sample, growth_between


def test_a_counter_that_was_reset_grew_by_its_value() -> None:
    assert growth_between(3_000_000_000, 7) == 7
    assert growth_between(2**40, 12) == 12


def test_a_counter_that_steps_back_a_little_was_not_reset() -> None:
    # GIVEN 5 TB sent, and a driver's next sum over its queues that is 1,500 bytes lower
    totals = CounterTotals()
    for raw in (5 * 10**12, 5 * 10**12 - 1500, 5 * 10**12 - 1400):
        totals.add_reading("sent-bytes", "eth0", raw)

    assert totals.total("sent-bytes") == 100


def test_each_counter_of_a_port_is_reset_alone() -> None:
    totals = CounterTotals()
    for first, second in ((10**9, 5), (10**9 + 3, 2), (10**9 + 4, 4)):
        totals.add_reading("pause-frames", "eth0", first, counter="rx_prio0_pause")
        totals.add_reading("pause-frames", "eth0", second, counter="rx_prio1_pause")
    totals.add_reading("pause-frames", "eth0", 10**9 + 4, counter="rx_prio0_pause")  # and no other

    assert totals.total("pause-frames") == 4 + 2 + 2
    assert [s.value for s in totals.samples(1)] == [8.0, 8.0]


def test_a_sum_neither_falls_nor_jumps_if_a_port_returns() -> None:
    totals = CounterTotals()
    totals.add_reading("sent-bytes", "a", 10**9)
    totals.add_reading("sent-bytes", "b", 10**12)
    totals.add_reading("sent-bytes", "a", 10**9 + 5)  # b cannot be read in this round
    assert totals.total("sent-bytes") == 5

    totals.add_reading("sent-bytes", "b", 10**12 + 2)

    assert totals.total("sent-bytes") == 7


def test_growth_is_scaled_after_an_overflow() -> None:
    totals = CounterTotals()
    totals.add_reading("sent-bytes", "a", 2**32 - 10, scale=4)

    totals.add_reading("sent-bytes", "a", 10, scale=4)

    assert totals.total("sent-bytes") == 80


def test_a_port_has_a_sample_only_if_it_changed() -> None:
    totals = CounterTotals()
    totals.add_reading("x-packets", "a", 3)
    totals.add_reading("x-packets", "b", 3)
    assert [s.name for s in totals.samples(1)] == ["x-packets", "x-packets:a", "x-packets:b"]

    totals.add_reading("x-packets", "b", 4)

    assert totals.samples(2) == [Sample(2, "x-packets", 1.0), Sample(2, "x-packets:b", 1.0)]


def test_counters_beyond_the_limit_are_refused_and_counted() -> None:
    totals = CounterTotals()

    for port in range(MAX_PARTS + 3):
        totals.add_reading("x-packets", str(port), 1)

    assert totals.num_refused == 3


def test_a_name_without_counters_is_unknown() -> None:
    assert CounterTotals().total("rdma-sent-bytes") is None
