from __future__ import annotations

import pytest

from rankscope.analysis.report.text import (
    format_bytes,
    format_count,
    format_duration,
    format_percent,
    format_range,
    format_ranges,
    format_ranks,
    format_rate,
    format_seconds,
    format_slowdown,
    format_steps,
    name_ranges,
)


@pytest.mark.parametrize(
    ("num", "noun", "text"),
    [
        (0, "rank", "0 ranks"),
        (1, "rank", "1 rank"),
        (2, "micro-batch", "2 micro-batches"),
        (999, "rank", "999 ranks"),
        (12_288, "rank", "12,288 ranks"),
    ],
)
def test_a_count_has_its_noun_and_a_separator_from_1000_on(num: int, noun: str, text: str) -> None:
    assert format_count(num, noun) == text


@pytest.mark.parametrize(("ratio", "text"), [(0.0, "0 %"), (0.264, "26 %"), (1.0, "100 %")])
def test_a_share_is_written_in_percent(ratio: float, text: str) -> None:
    assert format_percent(ratio) == text


def test_a_share_has_as_many_digits_as_asked_for() -> None:
    assert format_percent(0.4567, digits=1) == "45.7 %"
    assert format_percent(-0.0001, digits=1) == "0.0 %"


@pytest.mark.parametrize(
    ("duration_ns", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1_500, "1.50 us"),
        (999_600, "1.00 ms"),
        (9_996_000, "10.0 ms"),
        (43_210_000, "43.2 ms"),
        (812_000_000, "812 ms"),
        (2_345_000_000, "2.35 s"),
        (12_345_000_000_000, "12,345 s"),
        (-1_500, "-1.50 us"),
        (None, "n/a"),
    ],
)
def test_a_duration_has_three_digits_and_a_fitting_unit(
    duration_ns: float | None, text: str
) -> None:
    assert format_duration(duration_ns) == text


def test_seconds_a_slowdown_and_sizes_have_their_units() -> None:
    assert format_seconds(0.61) == "610 ms"
    assert format_slowdown(1.3841) == "1.38x"
    assert format_bytes(4 << 20) == "4.00 MiB"
    assert format_bytes(12) == "12 B"


def test_bandwidths_are_in_decimal_units() -> None:
    rates = (37.34e9, 999.9e6, 27.5e3, 12.0, None)
    assert [format_rate(rate) for rate in rates] == [
        "37.3 GB/s",
        "1.00 GB/s",
        "27.5 kB/s",
        "12 B/s",
        "n/a",
    ]


def test_unknown_is_not_a_number() -> None:
    assert format_seconds(None) == format_percent(None) == format_slowdown(None) == "n/a"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((12_287,), "rank 12287"),
        ((4, 5), "ranks 4 and 5"),
        ((4, 5, 6), "ranks 4 to 6"),
        (tuple(range(6_144, 6_152)), "ranks 6144 to 6151"),
        ((3, 8, 9, 10, 11), "ranks 3 and 8 to 11"),
        ((0, 1, 2, 5, 6, 9), "ranks 0 to 2, 5, 6 and 9"),
        (tuple(range(12_288)), "ranks 0 to 12287"),
    ],
)
def test_three_consecutive_ranks_are_a_range(ranks: tuple[int, ...], text: str) -> None:
    assert format_ranks(ranks) == text


def test_ranks_that_are_not_listed_are_counted() -> None:
    ranks = (*range(8), *range(10, 12_288, 2))

    assert format_ranks(ranks) == "ranks 0 to 7, 10, 12, 14, 16, 18, 20, 22 and 6,132 more"


def test_steps_are_written_with_the_first_and_the_last() -> None:
    assert format_steps((3, 3)) == "step 3"
    assert format_steps((3, 9)) == "steps 3 to 9"
    assert format_range((3, 3)) == "3"
    assert format_range((3, 9)) == "3-9"
    assert format_range(None) == "-"


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], "-"),
        ([5], "5"),
        ([5, 6], "5, 6"),
        ([0, 1, 2, 3], "0-3"),
        ([0, 4, 5, 6, 7, 9, 10], "0, 4-7, 9, 10"),
    ],
)
def test_a_table_lists_ranges(numbers: list[int], text: str) -> None:
    assert format_ranges(numbers) == text


def test_a_table_counts_the_ranges_that_it_leaves_out() -> None:
    assert format_ranges(range(0, 40, 2), max_ranges=2) == "0, 2 and 18 more"


def test_a_count_is_never_longer_than_the_numbers_that_it_replaces() -> None:
    assert format_ranges([0, 2, 4, 6], max_ranges=2) == "0, 2, 4, 6"
    assert format_ranges([0, 2, 4, 10_000, 12_000], max_ranges=2) == "0, 2 and 3 more"
    assert name_ranges([0, 2, 4], max_ranges=2, num_all=192) == ([(0, 0), (2, 2)], 190)
