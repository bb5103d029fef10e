from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.trainer.simulator.scenario import TpDetail
from rankscope.trainer.simulator.schedule import (
    Exchange,
    Posted,
    Schedule,
    Slot,
    deferring_slots,
    exchange_order,
    receiver_of,
    run_order,
    sender_of,
    stage_exchanges,
    stage_slots,
    v_slots,
)
from tests.support.trainer.recorded import MS, exact, record


def format_slots(slots: list[Slot]) -> str:
    """Return slots as ``F0``, ``B0``, ``W0`` (``F0b`` on the second chunk)."""
    return " ".join(
        f"{'F' if slot.is_forward else 'W' if slot.is_weight else 'B'}{slot.microbatch}"
        f"{'b' if slot.chunk else ''}"
        for slot in slots
    )


def format_stage(stage: int, *, pp: int, vpp: int, num_microbatches: int) -> str:
    return format_slots(stage_slots(stage, pp=pp, vpp=vpp, num_microbatches=num_microbatches))


def exchanged(stage: int, *, pp: int, num_microbatches: int) -> str:
    """Return the actions of a stage: ``>F0`` sends an output, ``<B1`` receives an input."""
    words = []
    for action in stage_exchanges(stage, pp=pp, num_microbatches=num_microbatches):
        if isinstance(action, Slot):
            words.append(_name(action))
        else:
            out = [f">{_name(slot)}" for slot in action.sends]
            words.append("".join(out + [f"<{_name(slot)}" for slot in action.receives]))
    return " ".join(words)


def _name(slot: Slot) -> str:
    return f"{'F' if slot.is_forward else 'B'}{slot.microbatch}"


def test_in_the_steady_state_one_call_sends_and_receives() -> None:
    assert exchanged(0, pp=3, num_microbatches=3) == ("F0 >F0 F1 >F1 F2 >F2<B0 B0 <B1 B1 <B2 B2")
    assert exchanged(1, pp=3, num_microbatches=3) == (
        "<F0 F0 >F0 <F1 F1 >F1<B0 B0 >B0<F2 F2 >F2<B1 B1 >B1 <B2 B2 >B2"
    )
    assert exchanged(2, pp=3, num_microbatches=3) == ("<F0 F0 B0 >B0<F1 F1 B1 >B1<F2 F2 B2 >B2")


@settings(deadline=None)  # cores are shared
@given(pp=st.integers(1, 8), num_microbatches=st.integers(1, 20))
def test_exchanges_never_deadlock_and_are_posted_once(pp: int, num_microbatches: int) -> None:
    order = exchange_order(pp=pp, num_microbatches=num_microbatches)
    posted = [action.exchange for action in order if isinstance(action, Posted)]
    wanted = [
        action
        for stage in range(pp)
        for action in stage_exchanges(stage, pp=pp, num_microbatches=num_microbatches)
        if isinstance(action, Exchange)
    ]

    assert sum(isinstance(action, Slot) for action in order) == 2 * pp * num_microbatches
    assert len(posted) == len(wanted) == len(set(wanted))
    assert set(posted) == set(wanted)


def test_one_forward_and_one_backward_alternate_after_the_warm_up() -> None:
    assert format_stage(0, pp=3, vpp=1, num_microbatches=4) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert format_stage(1, pp=3, vpp=1, num_microbatches=4) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert format_stage(2, pp=3, vpp=1, num_microbatches=4) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_fewer_micro_batches_than_stages_all_run_before_the_first_backward() -> None:
    assert format_stage(0, pp=4, vpp=1, num_microbatches=2) == "F0 F1 B0 B1"


def test_interleaved_chunks_alternate_every_pp_micro_batches() -> None:
    assert format_stage(0, pp=2, vpp=2, num_microbatches=4) == (
        "F0 F1 F0b F1b F2 B0b F3 B1b F2b B0 F3b B1 B2b B3b B2 B3"
    )
    assert format_stage(1, pp=2, vpp=2, num_microbatches=4) == (
        "F0 F1 F0b B0b F1b B1b F2 B0 F3 B1 F2b B2b F3b B3b B2 B3"
    )


@settings(deadline=None)  # cores are shared
@given(
    pp=st.integers(1, 8), rounds=st.integers(1, 4), vpp=st.integers(1, 4), rest=st.integers(0, 7)
)
def test_every_slot_runs_once_and_after_what_it_receives(
    pp: int, rounds: int, vpp: int, rest: int
) -> None:
    vpp = vpp if pp > 1 else 1
    num_microbatches = pp * rounds + (rest if vpp == 1 else 0)
    waiting = [
        stage_slots(stage, pp=pp, vpp=vpp, num_microbatches=num_microbatches) for stage in range(pp)
    ]
    order = run_order(waiting, vpp=vpp)
    place = {slot: at for at, slot in enumerate(order)}

    assert len(order) == len(place) == 2 * pp * vpp * num_microbatches
    for slot in order:
        sender = sender_of(slot, pp=pp, vpp=vpp)
        if sender is not None:
            assert place[sender] < place[slot]
            assert receiver_of(sender, pp=pp, vpp=vpp) == slot


def test_gradients_of_the_weights_are_late_by_the_number_of_the_stage() -> None:
    slots = [deferring_slots(stage, pp=3, vpp=1, num_microbatches=4) for stage in range(3)]

    assert [format_slots(each) for each in slots] == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]


def test_chunks_of_a_v_are_neighbours_on_the_last_stage() -> None:
    assert format_slots(v_slots(1, pp=2, num_microbatches=3)) == (
        "F0 F0b F1 F1b B0b W0b F2 B0 W0 F2b B1b W1b B1 B2b B2 W1 W2b W2"
    )
    first, turned = _forward(1, chunk=0), _forward(1, chunk=1)
    assert receiver_of(first, pp=2, vpp=2, schedule=Schedule.ZERO_BUBBLE_V) == turned
    assert sender_of(first, pp=2, vpp=2, schedule=Schedule.ZERO_BUBBLE_V) == _forward(0, chunk=0)
    assert sender_of(turned, pp=2, vpp=2, schedule=Schedule.ZERO_BUBBLE_V) == first
    last = _forward(0, chunk=1)
    assert receiver_of(last, pp=2, vpp=2, schedule=Schedule.ZERO_BUBBLE_V) is None


def _forward(stage: int, *, chunk: int) -> Slot:
    return Slot(stage, is_forward=True, microbatch=0, chunk=chunk)


@settings(deadline=None)  # cores are shared
@given(pp=st.integers(1, 8), rounds=st.integers(1, 4), vpp=st.integers(1, 3), data=st.data())
def test_a_split_backward_runs_every_slot_once_and_after_what_it_receives(
    pp: int, rounds: int, vpp: int, data: st.DataObject
) -> None:
    schedule = data.draw(st.sampled_from((Schedule.ZERO_BUBBLE, Schedule.ZERO_BUBBLE_V)))
    vpp = 2 if schedule is Schedule.ZERO_BUBBLE_V else vpp if pp > 1 else 1
    num = pp * rounds
    if schedule is Schedule.ZERO_BUBBLE_V:
        waiting = [v_slots(stage, pp=pp, num_microbatches=num) for stage in range(pp)]
    else:
        waiting = [deferring_slots(s, pp=pp, vpp=vpp, num_microbatches=num) for s in range(pp)]

    order = run_order(waiting, vpp=vpp, schedule=schedule)

    place = {slot: at for at, slot in enumerate(order)}
    assert len(order) == len(place) == 3 * pp * vpp * num
    for slot in order:
        sender = sender_of(slot, pp=pp, vpp=vpp, schedule=schedule)
        if sender is not None:
            assert place[sender] < place[slot]
            assert receiver_of(sender, pp=pp, vpp=vpp, schedule=schedule) == slot
        if slot.is_weight:
            assert place[replace(slot, is_weight=False)] < place[slot]


@pytest.mark.parametrize(("vpp", "bubble_ms"), [(1, 3 * 10.0), (2, 3 * 5.0)])
def test_the_weights_gradients_fill_two_thirds_of_the_bubble(vpp: int, bubble_ms: float) -> None:
    # F = B = W = 10 ms: (pp - 1) (F + B - W) / vpp remains of 1F1B's (pp - 1) (F + B + W) / vpp.
    recorded = record(
        exact(pp=4, dp=1, vpp=vpp, num_microbatches=8, num_steps=1, schedule=Schedule.ZERO_BUBBLE)
    )

    assert recorded.step_ms(0) == pytest.approx(8 * 30 + bubble_ms + 5, abs=0.001)


def test_a_v_leaves_only_the_bubble_of_the_first_forwards() -> None:
    recorded = record(
        exact(pp=4, dp=1, vpp=2, num_microbatches=8, num_steps=1, schedule=Schedule.ZERO_BUBBLE_V)
    )

    # Each stage computes 8 x 30 ms without a pause, the last one from its first forward on.
    optimizer = recorded.spans.where(kind="optimizer")
    forward = recorded.spans.where(kind="forward", rank=3)
    assert recorded.step_ms(0) == pytest.approx(8 * 30 + 3 * 5 + 5, abs=0.001)
    assert optimizer["start_ns"].max() - forward["start_ns"].min() == 240 * MS


def test_only_the_input_part_of_a_backward_communicates() -> None:
    recorded = record(
        exact(
            pp=2, dp=1, tp=2, num_microbatches=2, num_steps=1, tp_detail=TpDetail.COARSE,
            schedule=Schedule.ZERO_BUBBLE, weight_ratio=0.25,
        )
    )  # fmt: skip

    backward = recorded.spans.where(kind="backward", rank=0)
    found = zip(backward["name"].tolist(), (backward["duration_ns"] / MS).tolist(), strict=True)
    assert sorted(found) == [
        ("backward input", 15.0), ("backward input", 15.0),
        ("backward weight", 5.0), ("backward weight", 5.0),
    ]  # fmt: skip
    assert len(recorded.spans.where(kind="tp-comm", rank=0)) == 4
