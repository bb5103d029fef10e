from __future__ import annotations

from rankscope.collector.http.connection import Window


def test_a_stretch_with_too_little_is_told_at_its_end_and_not_before() -> None:
    window = Window(10.0)

    # 10 bytes a second for 10 s are 100 bytes.
    assert not window.is_below(10, 0.0, total=5000, is_due=True)
    assert not window.is_below(10, 9.9, total=5000, is_due=True)
    assert window.is_below(10, 10.0, total=5099, is_due=True)


def test_each_stretch_counts_for_itself() -> None:
    window = Window(10.0)
    window.is_below(10, 0.0, total=0, is_due=True)

    assert not window.is_below(10, 10.0, total=1_000_000, is_due=True)
    assert not window.is_below(10, 20.0, total=1_000_100, is_due=True)
    assert window.is_below(10, 30.0, total=1_000_199, is_due=True)


def test_time_in_which_nothing_is_due_does_not_count() -> None:
    window = Window(10.0)
    window.is_below(10, 0.0, total=0, is_due=True)
    window.is_below(10, 9.0, total=0, is_due=False)

    assert not window.is_below(10, 11.0, total=0, is_due=True)
    assert not window.is_below(10, 20.9, total=0, is_due=True)
    assert window.is_below(10, 21.0, total=99, is_due=True)
