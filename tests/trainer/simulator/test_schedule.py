from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.trainer.simulator.schedule import (
    Exchange,
    Posted,
    Slot,
    exchange_order,
    receiver_of,
    run_order,
    sender_of,
    stage_exchanges,
    stage_slots,
)


def written(stage: int, *, pp: int, vpp: int, num_microbatches: int) -> str:
    """Spell a stage's slots as ``F0`` (``F0b`` on its second chunk)."""
    slots = stage_slots(stage, pp=pp, vpp=vpp, num_microbatches=num_microbatches)
    return " ".join(
        f"{'F' if slot.is_forward else 'B'}{slot.microbatch}{'b' if slot.chunk else ''}"
        for slot in slots
    )


def exchanged(stage: int, *, pp: int, num_microbatches: int) -> str:
    """Spell what a stage does: ``>F0`` sends an output, ``<B1`` receives an input."""
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
    assert written(0, pp=3, vpp=1, num_microbatches=4) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert written(1, pp=3, vpp=1, num_microbatches=4) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert written(2, pp=3, vpp=1, num_microbatches=4) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_fewer_micro_batches_than_stages_all_run_before_the_first_backward() -> None:
    assert written(0, pp=4, vpp=1, num_microbatches=2) == "F0 F1 B0 B1"


def test_interleaved_chunks_take_turns_of_as_many_micro_batches_as_stages() -> None:
    assert written(0, pp=2, vpp=2, num_microbatches=4) == (
        "F0 F1 F0b F1b F2 B0b F3 B1b F2b B0 F3b B1 B2b B3b B2 B3"
    )
    assert written(1, pp=2, vpp=2, num_microbatches=4) == (
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
