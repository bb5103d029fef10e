"""Goodput by cause: a case with literal values, each part, and that the parts sum to the whole."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.goodput import (
    Diagnosis,
    EpochRecord,
    Goodput,
    GoodputPart,
    GoodputStep,
    describe_goodput,
    measure_goodput,
)

S = 1_000_000_000


def step(number: int, begin_s: float, end_s: float, saving_s: float = 0.0) -> GoodputStep:
    return GoodputStep(
        step=number,
        begin_ns=round(begin_s * S),
        end_ns=round(end_s * S),
        saving_ns=round(saving_s * S),
    )


def record(epoch: int, *steps: GoodputStep, **times: float | None) -> EpochRecord:
    """Return an epoch of 4 ranks; times are ``started``, ``failed``, ``ended``, ``last``, s."""
    at_ns = {name: None if at is None else round(at * S) for name, at in times.items()}
    return EpochRecord(
        epoch=epoch,
        num_ranks=4,
        started_ns=at_ns.get("started"),
        failed_ns=at_ns.get("failed"),
        ended_ns=at_ns.get("ended"),
        last_begin_ns=at_ns.get("last"),
        steps=steps,
    )


def seconds(goodput: Goodput | None) -> dict[str, float]:
    """Return the parts that are not empty, seconds of the job of 4 ranks."""
    assert goodput is not None
    return {part: rank_s / 4 for part, rank_s in goodput.rank_s.items() if rank_s}


FIRST = record(
    0,
    *(step(number, 10 + 10 * number, 20 + 10 * number) for number in range(4)),
    started=0,
    failed=53,
    ended=58,
    last=52.5,
)
"""Start-up and steps 0 to 3 of 10 s each; 3 s into step 4 a rank fails, 5 s later all have."""

SECOND = record(
    1,
    step(2, 80, 92, saving_s=2),
    step(3, 92, 102),
    step(4, 102, 112),
    started=70,
    ended=115,
)
"""12 s later the first process; 10 s to step 2, which takes 12 s with a save of 2 s."""


def test_a_restart_is_split_as_by_hand() -> None:
    diagnosis = Diagnosis(
        lost_s={"slow-compute": 4.0},
        evaluation_s=1.0,
        flops_by_step=dict.fromkeys(range(5), 6e15),
    )

    goodput = measure_goodput([FIRST, SECOND], diagnosis, total_steps=25)

    assert seconds(goodput) == {
        "startup": 10 + 10,
        "repeated": 20 + 3,  # steps 2 and 3, and the begun step 4
        "detection": 5,
        "restart": 12,
        "checkpoint": 2,
        "evaluation": 1,
        "findings": 4,
        "productive": 20 + 30 - 1 - 4,
        "unknown": 3,  # after the last step
    }
    assert goodput is not None
    assert goodput.wall_s == 115
    assert goodput.total_rank_s == 4 * 115
    assert goodput.ratio == 45 / 115
    assert goodput.hours("restart") == 4 * 12 / 3_600
    assert goodput.finding_rank_s == {"slow-compute": 16.0}
    assert goodput.num_kept_steps == 5
    assert goodput.flops_per_s == 5 * 6e15 / 52  # steps of 20 and 32 s were kept
    assert goodput.total_flops_per_s == 5 * 6e15 / 115
    assert goodput.days_left == 20 * 115 / 5 / 86_400
    assert [(one.steps, one.num_repeated) for one in goodput.epochs] == [((0, 3), 2), ((2, 4), 0)]
    assert goodput.epochs[0].rank_s["restart"] == 4 * 12
    text = describe_goodput(goodput)
    assert text.startswith("Of 0.128 GPU-hours in 2 epochs, 39.1 % trained steps that were kept.")
    assert "577 TFLOP/s while steps run, 261 TFLOP/s over the whole time" in text


def test_a_job_in_which_nothing_begins_was_stuck_before_its_watchdog_ended_it() -> None:
    hung = replace(FIRST, failed_ns=653 * S, ended_ns=654 * S)

    parts = seconds(measure_goodput([hung], Diagnosis()))

    assert parts["repeated"] == 2.5  # step 4 until its last operation began
    assert parts["detection"] == 654 - 52.5


def test_steps_behind_the_loaded_checkpoint_are_lost_before_they_are_repeated() -> None:
    begun = replace(SECOND, steps=SECOND.steps[:1], ended_ns=None)

    goodput = measure_goodput([FIRST, begun], Diagnosis(), until_ns=95 * S)

    assert seconds(goodput)["repeated"] == 20 + 3
    assert seconds(goodput)["unknown"] == 3  # the running step


def test_which_steps_repeat_is_unknown_if_the_tracer_counted_them() -> None:
    counted = replace(SECOND, is_counted=True)

    parts = seconds(measure_goodput([FIRST, counted], Diagnosis()))

    assert parts["unknown"] == 40 + 3
    assert parts["productive"] == 30


def test_an_epoch_that_dies_before_its_first_step_is_start_up() -> None:
    dead = record(1, started=70, failed=75, ended=76)

    parts = seconds(measure_goodput([FIRST, dead], Diagnosis()))

    assert parts["startup"] == 10 + 5
    assert parts["detection"] == 5 + 1
    assert parts["productive"] == 40


def test_time_without_a_known_end_is_unknown_and_no_restart() -> None:
    lost = replace(FIRST, ended_ns=None)

    parts = seconds(measure_goodput([lost, SECOND], Diagnosis()))

    assert "restart" not in parts
    assert "detection" not in parts
    assert parts["unknown"] == 70 - 53 + 3


def test_the_long_first_step_and_a_final_save_count_as_what_they_are() -> None:
    only = replace(
        record(0, step(0, 5, 25), step(1, 25, 35), started=0, ended=40), final_saving_ns=4 * S
    )

    parts = seconds(measure_goodput([only], Diagnosis(startup_excess_s={0: 10.0})))

    assert parts == {"startup": 15, "productive": 20, "checkpoint": 4, "unknown": 1}


def test_tokens_give_the_days_left_only_if_all_are_known() -> None:
    counted = tuple(replace(each, num_tokens=100) for each in SECOND.steps)
    whole = replace(FIRST, steps=tuple(replace(each, num_tokens=100) for each in FIRST.steps))
    known = measure_goodput([whole, replace(SECOND, steps=counted)], Diagnosis(), total_tokens=1500)
    missing = measure_goodput(
        [FIRST, replace(SECOND, steps=counted)], Diagnosis(), total_tokens=900
    )

    assert known is not None
    assert known.days_left == 1000 * 115 / 500 / 86_400
    assert missing is not None
    assert missing.days_left is None


def test_a_run_without_any_time_has_no_goodput() -> None:
    assert measure_goodput([], Diagnosis()) is None
    assert measure_goodput([record(0)], Diagnosis()) is None


TIMES = st.integers(0, 200)
MAYBE = st.none() | TIMES


@st.composite
def records(draw: st.DrawFn) -> list[EpochRecord]:
    """Return epochs in any state, also in states that contradict each other."""
    drawn = []
    for epoch in range(draw(st.integers(1, 4))):
        first = draw(st.integers(0, 5))
        steps = tuple(
            step(first + number, draw(TIMES), draw(TIMES), draw(st.integers(0, 20)))
            for number in range(draw(st.integers(0, 4)))
        )
        one = record(
            epoch,
            *steps,
            started=draw(MAYBE),
            failed=draw(MAYBE),
            ended=draw(MAYBE),
            last=draw(MAYBE),
        )
        drawn.append(
            replace(
                one,
                final_saving_ns=draw(st.integers(0, 5)) * S,
                is_counted=draw(st.booleans()),
            )
        )
    return drawn


@given(records(), MAYBE, st.dictionaries(st.sampled_from("abc"), st.floats(0, 300)))
def test_the_parts_sum_to_the_whole_and_none_is_negative(
    drawn: list[EpochRecord], until_s: int | None, lost_s: dict[str, float]
) -> None:
    diagnosis = Diagnosis(lost_s=lost_s, evaluation_s=3.0, startup_excess_s={0: 2.0, 3: 50.0})

    goodput = measure_goodput(drawn, diagnosis, until_ns=None if until_s is None else until_s * S)

    if goodput is None:
        return
    assert set(goodput.rank_s) == set(GoodputPart)
    assert all(rank_s >= 0 for rank_s in goodput.rank_s.values())
    assert abs(sum(goodput.rank_s.values()) - 4 * goodput.wall_s) < 1e-6
    assert abs(goodput.total_rank_s - sum(sum(e.rank_s.values()) for e in goodput.epochs)) < 1e-6
    assert abs(sum(goodput.finding_rank_s.values()) - goodput.rank_s["findings"]) < 1e-6
    assert 0 <= goodput.ratio <= 1


@given(records(), st.integers(-1000, 1000))
def test_a_shift_of_all_clocks_changes_nothing(drawn: list[EpochRecord], by_s: int) -> None:
    def moved(at_ns: int | None) -> int | None:
        return None if at_ns is None else at_ns + (by_s + 2000) * S

    shifted = [
        replace(
            one,
            started_ns=moved(one.started_ns),
            failed_ns=moved(one.failed_ns),
            ended_ns=moved(one.ended_ns),
            last_begin_ns=moved(one.last_begin_ns),
            steps=tuple(
                replace(
                    each,
                    begin_ns=each.begin_ns + (by_s + 2000) * S,
                    end_ns=each.end_ns + (by_s + 2000) * S,
                )
                for each in one.steps
            ),
        )
        for one in drawn
    ]

    assert measure_goodput(shifted, Diagnosis()) == measure_goodput(drawn, Diagnosis())
