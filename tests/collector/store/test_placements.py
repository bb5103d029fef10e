"""The index of placements against the decision that looks at all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from rankscope.collector.spool.cut import ProcessFacts
from rankscope.collector.store.placements import Placed, Placements, Progress, _Known, decide

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store

FACTS = st.builds(
    ProcessFacts,
    run_id=st.just("r"),
    epoch=st.integers(0, 1),
    rank=st.integers(0, 3),
    process=st.uuids().map(str),
    world_size=st.sampled_from((0, 4, 8)),
    job=st.sampled_from(("a", "b")),
    started_ns=st.just(1),
    first_step=st.none() | st.integers(0, 5),
    has_ended=st.booleans(),
)
NOTHING = Progress(ended_ns={}, first_step=None, last_end_ns=0)


@given(st.lists(FACTS, max_size=12, unique_by=lambda one: one.process), FACTS)
def test_a_vacancy_of_the_index_is_what_the_decision_finds(
    earlier: list[ProcessFacts], new: ProcessFacts
) -> None:
    placed: list[Placed] = []
    for one in earlier:
        decision = decide(one, placed, lambda _: NOTHING, has_waited=True) if placed else "other"
        run, epoch = ("r", one.epoch) if isinstance(decision, str) else decision
        placed.append(
            Placed(
                stored_run=run, stored_epoch=epoch, declared_epoch=one.epoch, rank=one.rank,
                process=one.process, job=one.job, world_size=one.world_size, layout="",
                started_ns=1, at_ns=1, note="",
            )
        )  # fmt: skip

    found = _Known(placed).find_vacancy(new)

    if found is not None:
        assert decide(new, placed, lambda _: NOTHING, has_waited=True) == found.incarnation
    else:
        same = [one for one in placed if (one.job, one.declared_epoch) == (new.job, new.epoch)]
        assert all(one.rank == new.rank or not _fits(one, new, same) for one in same)


def _fits(one: Placed, new: ProcessFacts, same: list[Placed]) -> bool:
    """Return whether the incarnation of a process has no such rank and an equal size."""
    mates = [each for each in same if each.incarnation == one.incarnation]
    return mates[0].is_like(new) and all(each.rank != new.rank for each in mates)


def test_ranks_of_one_launch_are_placed_together_for_every_client(store: Store) -> None:
    one, other = Placements(store), Placements(store)
    for first in range(0, 64, 8):
        facts = [
            ProcessFacts(
                run_id="placed", epoch=0, rank=rank, process=f"{rank:032x}", world_size=64,
                job="launch", started_ns=rank,
            )
            for rank in range(first, first + 8)
        ]  # fmt: skip
        asked = (one if first % 16 else other).place(facts, lambda _: True)
        assert {(each.run_id, each.epoch) for each in asked if each} == {("placed", 0)}
        assert None not in asked
        assert one.place(facts, lambda _: True) == asked


def test_ranks_of_one_job_with_two_owners_are_two_runs_and_the_note_says_why(store: Store) -> None:
    placements = Placements(store)
    first, second = (
        ProcessFacts(
            run_id="shared", epoch=0, rank=rank, process=f"5{rank:031x}", world_size=2, job="j",
            started_ns=rank,
        )
        for rank in range(2)
    )  # fmt: skip
    placements.place([first], lambda _: True)

    (found,) = placements.place([second], lambda run_id: run_id != "shared")

    assert found is not None
    assert found.run_id == "shared-2"
    assert "other ranks of this job have another owner" in found.note
