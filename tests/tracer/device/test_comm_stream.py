from __future__ import annotations

from rankscope.tracer.device.communication import Bounds, CommStream


def test_a_stream_that_stood_still_at_the_wait_tells_the_end() -> None:
    stream = CommStream()

    bounds = stream.place(stream.launch(), 100_000, (150_000, 900_000))

    # Nothing is known of what the communication stream had before its first launch.
    assert bounds == Bounds(100_000, 900_000, begin_known=False, end_known=True)


def test_a_wait_that_held_nobody_up_only_bounds_the_end() -> None:
    stream = CommStream()

    bounds = stream.place(stream.launch(), 100_000, (900_000, 904_000))

    assert bounds == Bounds(100_000, 904_000, begin_known=False, end_known=False)


def test_on_an_idle_communication_stream_the_launch_is_the_begin() -> None:
    stream = CommStream()
    first, second = stream.launch(), stream.launch()
    stream.place(first, 0, (10_000, 200_000))

    assert stream.place(second, 250_000, (260_000, 400_000)) == Bounds(
        250_000, 400_000, begin_known=True, end_known=True
    )


def test_behind_another_it_begins_where_that_one_ended() -> None:
    stream = CommStream()
    first, second = stream.launch(), stream.launch()
    stream.place(first, 0, (10_000, 200_000))

    assert stream.place(second, 50_000, (210_000, 300_000)) == Bounds(
        200_000, 300_000, begin_known=True, end_known=True
    )


def test_behind_one_whose_end_is_a_bound_the_begin_is_a_bound() -> None:
    stream = CommStream()
    first, second = stream.launch(), stream.launch()
    stream.place(first, 0, (200_000, 201_000))

    assert stream.place(second, 50_000, (210_000, 300_000)).begin_known is False


def test_behind_one_that_nobody_knows_of_the_begin_is_a_bound() -> None:
    stream = CommStream()
    stream.launch()
    lost, late = stream.launch(), stream.launch()
    assert lost == 1

    assert stream.place(late, 50_000, (60_000, 300_000)) == Bounds(
        50_000, 300_000, begin_known=False, end_known=True
    )


def test_bounds_that_contradict_each_other_are_not_taken_for_exact() -> None:
    stream = CommStream()
    first, second = stream.launch(), stream.launch()
    stream.place(first, 0, (10_000, 200_000))

    # Passed its wait before the one in front of it had ended: an error of reading.
    assert stream.place(second, 150_000, (190_000, 195_000)) == Bounds(
        150_000, 195_000, begin_known=False, end_known=False
    )
