"""The list of causes is complete, and its order makes causes explain each other."""

from __future__ import annotations

import pkgutil
from importlib import import_module

import pytest

from rankscope.analysis import causes
from rankscope.analysis.causes.detector import Cause, Subject
from rankscope.analysis.causes.order import CAUSES, FROM_RECORDS, FROM_REPLAY
from rankscope.analysis.replay.model import Place
from tests.support.analysis.gap_builders import Gap, gaps_with, host_candidates

MODULES = [
    import_module(f"{causes.__name__}.{module.name}")
    for module in pkgutil.iter_modules(causes.__path__)
]
OF_A_CAUSE = [module for module in MODULES if hasattr(module, "CAUSE")]


def test_every_module_of_a_cause_is_in_the_list() -> None:
    assert {module.CAUSE.name for module in OF_A_CAUSE} == set(CAUSES)


def test_every_detector_is_in_the_list() -> None:
    assert {*FROM_RECORDS, *FROM_REPLAY} == {
        module for module in MODULES if hasattr(module, "detect")
    }


def test_modules_are_named_as_their_findings() -> None:
    named = {module.__name__.rpartition(".")[2].replace("_", "-"): module for module in OF_A_CAUSE}

    assert {name: module.CAUSE.name for name, module in named.items()} == {
        name: name for name in named
    }


@pytest.mark.parametrize("cause", CAUSES.values(), ids=lambda cause: cause.name)
def test_a_verdict_has_words_for_every_cause(cause: Cause) -> None:
    if cause.subject is Subject.JOB:
        assert cause.sentence
    elif cause.subject is not Subject.STAGE:
        assert cause.one
        assert cause.several


NUM_RANKS = 8


def host_findings(*gaps: Gap) -> list[tuple[str, tuple[int, ...], tuple[int, int]]]:
    """Return (cause, ranks, steps) of all host causes of one stage and group of eight ranks."""
    table = gaps_with(gaps, stage=[0] * NUM_RANKS, num_steps=12)
    found = host_candidates(table, tuple(range(NUM_RANKS)))
    return [(each.cause.name, each.ranks, each.steps) for each in found]


def test_a_stalling_host_explains_why_its_first_launch_is_late() -> None:
    # GIVEN 15 ms before the first launch, and before two others, of each step
    places = (Place.INPUT, Place.FORWARD, Place.BACKWARD)
    gaps = [(step, 2, place, 15) for step in range(3, 9) for place in places]

    assert host_findings(*gaps) == [("host-stall", (2,), (3, 8))]


def test_a_stalling_host_does_not_explain_input_that_is_later_still() -> None:
    # GIVEN the same with 80 ms before the first launch
    gaps = [
        (step, 2, place, ms)
        for step in range(3, 9)
        for place, ms in ((Place.INPUT, 80), (Place.FORWARD, 15), (Place.BACKWARD, 15))
    ]

    assert host_findings(*gaps) == [("host-stall", (2,), (3, 8)), ("data-stall", (2,), (3, 8))]


def test_checkpoints_do_not_hide_a_stalling_host_in_their_steps() -> None:
    # GIVEN a checkpoint of 300 ms after every second step, and a host that loses 8 ms twice in
    # each of the steps 4 to 8
    gaps = [(step, rank, Place.OTHER, 300) for step in range(1, 12, 2) for rank in range(NUM_RANKS)]
    gaps += [(step, 5, Place.FORWARD, 8) for step in range(4, 9) for _ in range(2)]

    assert ("host-stall", (5,), (4, 8)) in host_findings(*gaps)


def test_input_that_all_ranks_miss_is_reported_once() -> None:
    gaps = [(step, rank, Place.INPUT, 80) for step in range(4, 10) for rank in range(NUM_RANKS)]

    assert [cause for cause, _, _ in host_findings(*gaps)] == ["data-stall"]


def test_one_pause_of_one_rank_is_insufficient_evidence() -> None:
    assert host_findings((7, 3, Place.FORWARD, 200)) == [("insufficient-evidence", (3,), (7, 7))]
