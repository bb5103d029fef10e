from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.simulator.schedule import receiver_of, run_order, sender_of, stage_slots


def written(stage: int, *, pp: int, vpp: int, num_microbatches: int) -> str:
    """Spell a stage's slots as ``F0`` (``F0b`` on its second chunk)."""
    slots = stage_slots(stage, pp=pp, vpp=vpp, num_microbatches=num_microbatches)
    return " ".join(
        f"{'F' if slot.is_forward else 'B'}{slot.microbatch}{'b' if slot.chunk else ''}"
        for slot in slots
    )


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


@given(
    pp=st.integers(1, 8), rounds=st.integers(1, 4), vpp=st.integers(1, 4), rest=st.integers(0, 7)
)
def test_every_slot_runs_once_and_after_what_it_receives(
    pp: int, rounds: int, vpp: int, rest: int
) -> None:
    vpp = vpp if pp > 1 else 1
    num_microbatches = pp * rounds + (rest if vpp == 1 else 0)
    order = run_order(pp=pp, vpp=vpp, num_microbatches=num_microbatches)
    place = {slot: at for at, slot in enumerate(order)}

    assert len(order) == len(place) == 2 * pp * vpp * num_microbatches
    for slot in order:
        sender = sender_of(slot, pp=pp, vpp=vpp)
        if sender is not None:
            assert place[sender] < place[slot]
            assert receiver_of(sender, pp=pp, vpp=vpp) == slot
