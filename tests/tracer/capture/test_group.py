"""Groups that are destroyed and made again, for which torch reuses names."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers a backend

from rankscope import tracer
from rankscope.tracer.capture.group import Groups
from rankscope.tracer.span import hash_group
from rankscope.tracer.topology import Coords, Layout
from tests.support.tracer.reading import Row, only_folder, read_spans
from tests.support.tracer.recording import recorder_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def world_of_three() -> Iterator[None]:
    """Be rank 0 of three; the other two are simulated."""
    dist.init_process_group("fake", store=HashStore(), rank=0, world_size=3)
    try:
        yield
    finally:
        dist.destroy_process_group()


def communicate(*members: int) -> str:
    """Make a group, communicate twice in it, and return its name."""
    group = dist.new_group(list(members))
    assert group is not None
    for _ in range(2):
        dist.all_reduce(torch.ones(2), group=group)
    name: str = group.group_name
    return name


def launched(spool: Path) -> list[Row]:
    """Shut down and return the communications by start."""
    tracer.shutdown()
    rows = read_spans(only_folder(spool))
    return [row for row in rows if row.group_id and row.kind != "wait"]


def test_a_name_that_is_given_to_other_members_is_another_group(tmp_path: Path) -> None:
    tracer.install(spool=tmp_path, run="run")
    with world_of_three():
        first = communicate(0, 1)
    with world_of_three():
        second = communicate(0, 2)

    assert first == second
    ids = [hash_group(first, (0, 1)), hash_group(first, (0, 2))]
    rows = [(row.group_id, row.seq) for row in launched(tmp_path)]
    assert rows == [(ids[0], 0), (ids[0], 1), (ids[1], 0), (ids[1], 1)]


def test_the_same_members_under_the_same_name_continue_their_numbers(tmp_path: Path) -> None:
    tracer.install(spool=tmp_path, run="run")
    names = set()
    for _ in range(2):
        with world_of_three():
            names.add(communicate(0, 1))

    (name,) = names
    rows = [(row.group_id, row.seq) for row in launched(tmp_path)]
    assert rows == [(hash_group(name, (0, 1)), seq) for seq in range(4)]


@pytest.mark.parametrize(
    ("experts", "expected"),
    [(1, ("dp-comm", "dp-comm")), (3, ("dp-comm", "ep-comm"))],
)
def test_all_ranks_are_the_data_axis_and_the_experts_that_overlay_it(
    tmp_path: Path, experts: int, expected: tuple[str, str]
) -> None:
    """Torch reuses the default group for both, and the names of the axes are lost."""
    tracer.install(spool=tmp_path, run="run", layout=Layout(dp=3, ep=experts), coords=Coords())
    with world_of_three():
        dist.all_reduce(torch.ones(2))
        dist.all_to_all_single(torch.ones(3), torch.ones(3))

    assert tuple(row.kind for row in launched(tmp_path)) == expected


def test_objects_of_destroyed_groups_are_released(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    book = Groups(recorder, None)
    with world_of_three():
        for _ in range(20):
            group = dist.new_group([0, 1])
            met = book.find(group)
            assert met is not None
            assert book.find(group) is met
            dist.destroy_process_group(group)
            del group
        gc.collect()
        assert len(book._seen) == 0
    recorder.shutdown()
