from __future__ import annotations

import pytest

from rankscope.analysis.hosts.stacks import (
    StackPlace,
    classify_hang,
    describe_groups,
    find_place,
    group_stacks,
)
from rankscope.analysis.trace.context import EventRecord
from tests.support.analysis.exit_builders import event

LIB = "/opt/venv/lib/python3.11/site-packages"
ALL_REDUCE = (
    f"{LIB}/torch/distributed/distributed_c10d.py:2810 all_reduce",
    f"{LIB}/torch/distributed/c10d_logger.py:81 wrapper",
    "/home/ml/project/train.py:70 main",
)
LOADER = (
    "/usr/lib/python3.11/threading.py:331 Condition.wait",
    "/usr/lib/python3.11/queue.py:180 Queue.get",
    f"{LIB}/torch/utils/data/dataloader.py:1284 _MultiProcessingDataLoaderIter._try_get_data",
    "/home/ml/project/loader.py:12 next_batch",
)


def stack(rank: int, frames: tuple[str, ...], *, step: int = 7, place: str = "") -> EventRecord:
    found = event(
        rank, "stack", step=step, threads=[{"name": "MainThread", "frames": list(frames)}]
    )
    return EventRecord(
        epoch=0, rank=rank, at_ns=0, kind="stack", text="", data=found.data, place=place
    )


def test_ranks_in_the_same_line_are_one_group() -> None:
    events = [stack(rank, ALL_REDUCE, place=ALL_REDUCE[-1]) for rank in range(48) if rank != 3]
    events.append(stack(3, LOADER, place=LOADER[-1]))

    groups = group_stacks(events, epoch=0, steps=(7, 7))

    assert describe_groups(groups) == (
        "47 ranks in the collective at project/train.py:70 main;"
        " rank 3 in the data loader at project/loader.py:12 next_batch"
    )


def test_the_newest_stack_of_these_steps_counts() -> None:
    events = [stack(0, ALL_REDUCE, step=6), stack(0, LOADER, step=7), stack(0, (), step=9)]

    (group,) = group_stacks(events, epoch=0, steps=(6, 7))

    assert (group.ranks, group.place) == ((0,), StackPlace.DATA_LOADER)
    assert group_stacks(events, epoch=1, steps=None) == ()


@pytest.mark.parametrize(
    ("frame", "place"),
    [
        (f"{LIB}/torch/serialization.py:850 save", StackPlace.STORAGE),
        (f"{LIB}/torch/distributed/checkpoint/filesystem.py:120 write", StackPlace.STORAGE),
        (f"{LIB}/torch/cuda/__init__.py:985 synchronize", StackPlace.DRIVER),
        (f"{LIB}/torch/distributed/_functional_collectives.py:133 wait", StackPlace.COLLECTIVE),
        (f"{LIB}/webdataset/tariterators.py:30 tar_file_expander", StackPlace.DATA_LOADER),
        ("/home/ml/project/train.py:70 main", StackPlace.NEVER_JOINED),
        ("", StackPlace.NEVER_JOINED),
    ],
)
def test_a_frame_of_a_library_says_in_what_a_rank_is(frame: str, place: StackPlace) -> None:
    assert find_place([frame]) is place


def opened(rank: int, kind: str, seq: int = -1, group: str = "ab") -> EventRecord:
    entry = {"kind": kind, "name": kind, "seq": seq, "group_id": group, "step": 7}
    return event(rank, "stalled", step=7, open=[{"kind": "other", "seq": -1}, entry])


@pytest.mark.parametrize(
    ("of_culprit", "place"),
    [
        (opened(3, "dp-comm", 5), StackPlace.COLLECTIVE),
        (opened(3, "dp-comm", 4), StackPlace.OTHER_COLLECTIVE),
        (opened(3, "tp-comm", 5, "cd"), StackPlace.OTHER_COLLECTIVE),
        (opened(3, "data"), StackPlace.DATA_LOADER),
        (opened(3, "checkpoint"), StackPlace.STORAGE),
        (stack(3, LOADER), StackPlace.DATA_LOADER),
        (stack(3, ("/home/ml/project/train.py:1 f",)), StackPlace.NEVER_JOINED),
    ],
)
def test_a_hang_is_classed_by_what_its_rank_is_in(
    of_culprit: EventRecord, place: StackPlace
) -> None:
    others = [opened(rank, "dp-comm", 5) for rank in range(3)]

    assert classify_hang([3], [*others, of_culprit], epoch=0, steps=(7, 7)) is place


def test_a_rank_of_which_nothing_is_known_never_joined_the_others() -> None:
    others = [opened(rank, "dp-comm", 5) for rank in range(3)]

    assert classify_hang([3], others, epoch=0, steps=(7, 7)) is StackPlace.NEVER_JOINED
    assert classify_hang([3], [], epoch=0, steps=(7, 7)) is None


def test_malformed_events_are_skipped() -> None:
    bad = [
        event(0, "stack", step="x", threads=7),
        event(0, "stack", step=7, threads=[]),
        event(0, "stack", step=7, threads=[{"frames": {"a": 1}}]),
        event(0, "lost", open={"no": "list"}),
        event(0, "stalled", open=[3, None, {"kind": 5, "seq": "x"}]),
    ]

    assert classify_hang([0], bad, epoch=0, steps=(7, 7)) is StackPlace.NEVER_JOINED
