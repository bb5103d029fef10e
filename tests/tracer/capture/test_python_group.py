"""Process groups written in Python, with which a job counts or changes its communication."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import HashStore
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

from rankscope import tracer
from rankscope.tracer.span import hash_group
from tests.support.tracer.reading import Row, dropped, only_folder, read_rows
from tests.support.tracer.torch_here import TORCH

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta
    from pathlib import Path

COUNTED = (
    *("allreduce", "broadcast", "allgather", "_allgather_base", "barrier", "send", "recv"),
    "alltoall_base",
)
backends = (f"counting{number}" for number in itertools.count())


class CountingGroup(dist.ProcessGroup):
    """Counts the calls and passes them to gloo."""

    def __init__(self, gloo: Any, rank: int, size: int) -> None:  # noqa: ANN401
        super().__init__(rank, size)  # type: ignore[call-arg] # its stub knows one way of two
        self.gloo = gloo
        self.counts: Counter[str] = Counter()

    @property
    def group_name(self) -> Any:  # noqa: ANN401
        """Return the name in torch's own table: a group without a backend in C++ has no other."""
        return dist.distributed_c10d._world.pg_names[self]


def counting(method: str) -> Any:  # noqa: ANN401
    """Return the override of ``method``."""

    def call(self: CountingGroup, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        self.counts[method] += 1
        return getattr(self.gloo, method)(*args, **kwargs)

    return call


for name in COUNTED:
    setattr(CountingGroup, name, counting(name))


def make(store: Any, rank: int, size: int, timeout: timedelta) -> CountingGroup:  # noqa: ANN401
    """Return a group as torch requests one from a backend."""
    return CountingGroup(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[CountingGroup]:
    """Create a default group of one that counts, while the tracer is installed."""
    backend = next(backends)
    dist.Backend.register_backend(backend, make, devices=["cpu"])
    tracer.install(spool=tmp_path, run="run")
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    group: Any = dist.group.WORLD
    yield group
    dist.destroy_process_group()
    tracer.shutdown()


def communications(spool: Path) -> list[Row]:
    """Shut down and return communications and waits, by start."""
    tracer.shutdown()
    folder = only_folder(spool)
    assert dropped(folder) == {}
    return [row for row in read_rows(folder) if row.group_id]


def test_each_call_of_a_counting_group_is_captured_once(
    world: CountingGroup, tmp_path: Path
) -> None:
    values = torch.ones(4)
    dist.all_reduce(values)
    later = dist.all_reduce(values, async_op=True)
    assert later is not None
    later.wait()
    dist.broadcast(values, 0)
    dist.all_gather([torch.empty(4)], values)
    dist.barrier()
    assert float(functional.all_reduce(values, "sum", world).sum()) == 4
    model = DistributedDataParallel(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    rows = communications(tmp_path)

    launched = [row for row in rows if row.kind != "wait"]
    names = Counter(row.name.replace("_", "") for row in launched)
    assert names == world.counts
    assert names["allreduce"] >= 4  # plain, asynchronous, functional, and DDP's gradients
    assert {row.group_id for row in rows} == {hash_group("0", (0,))}
    assert sorted(row.seq for row in launched) == list(range(len(launched)))
    assert sorted(row.seq for row in rows if row.kind == "wait") == list(range(len(launched)))
    assert [row.num_bytes for row in launched[:3]] == [16, 16, 16]
    is_async = [bool(row.flags & tracer.SpanFlag.ASYNC) for row in launched[:3]]
    # Before, an all-reduce does not say whether it is asynchronous.
    assert is_async == [TORCH < "2.8", True, False]


def test_calls_that_a_python_group_makes_of_another_group_are_not_recorded(
    world: CountingGroup, tmp_path: Path
) -> None:
    world.gloo = dist.new_group([0], backend="gloo")
    dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.ones(4), group=world.gloo)
    launched = [row for row in communications(tmp_path) if row.kind != "wait"]

    assert [(row.group_id, row.seq) for row in launched] == [
        (hash_group("0", (0,)), 0),
        (hash_group("1", (0,)), 0),
    ]


def test_a_call_through_cpp_ends_when_it_returns(world: CountingGroup, tmp_path: Path) -> None:
    values, taken = torch.ones(4), torch.empty(4)
    dist.all_to_all_single(
        taken, values
    )  # torch 2.13 calls a C++ method, which calls the Python one
    returned_ns = time.monotonic_ns()
    dist.all_reduce(values)
    rows = communications(tmp_path)

    assert world.counts == {"alltoall_base": 1, "allreduce": 1}
    assert [(row.name, row.seq) for row in rows] == [
        ("all_to_all_single", 0),
        ("wait all_to_all_single", 0),
        ("all_reduce", 1),
        ("wait all_reduce", 1),
    ]
    is_async = tracer.SpanFlag(0) if TORCH >= "2.8" else tracer.SpanFlag.ASYNC
    launched, wait = tracer.SpanFlag.HOST_CLOCK | is_async, tracer.SpanFlag.HOST_CLOCK
    assert [row.flags for row in rows] == [launched, wait] * 2
    assert all(row.end_ns <= returned_ns for row in rows[:2])


def test_a_work_with_its_own_wait_and_no_future_is_recorded(
    world: CountingGroup, tmp_path: Path
) -> None:
    class OwnWork(dist.Work):
        def wait(self, timeout: timedelta | None = None) -> bool:
            return True

        def get_future(self) -> Any:  # noqa: ANN401
            raise LookupError("none")

    class OwnGloo:
        @staticmethod
        def allreduce(*args: object) -> dist.Work:
            return OwnWork()

    world.gloo = OwnGloo()
    work = dist.all_reduce(torch.ones(4), async_op=True)
    assert work is not None
    assert work.wait() is True
    dist.all_reduce(torch.ones(4))
    rows = communications(tmp_path)

    assert [row.seq for row in rows if row.kind != "wait"] == [0, 1]
    assert [row.seq for row in rows if row.kind == "wait"] == [0, 1]


def test_an_error_of_a_python_group_reaches_the_job(world: CountingGroup, tmp_path: Path) -> None:
    class Failing:
        @staticmethod
        def allreduce(*args: object) -> dist.Work:
            raise raised

    raised = ArithmeticError("mine")
    world.gloo, gloo = Failing(), world.gloo
    with pytest.raises(ArithmeticError) as caught:
        dist.all_reduce(torch.ones(4))
    assert caught.value is raised
    assert raised.__context__ is None
    world.gloo = gloo
    dist.all_reduce(torch.ones(4))
    launched = [row for row in communications(tmp_path) if row.kind != "wait"]

    assert [bool(row.flags & tracer.SpanFlag.ERROR) for row in launched] == [True, False]


def test_shutdown_restores_the_class(tmp_path: Path) -> None:
    class OwnGroup(CountingGroup):
        def allreduce(self, *args: Any) -> Any:  # noqa: ANN401
            future: Any = torch.futures.Future()
            future.set_result(None)
            done: Any = _distributed_c10d  # missing in torch's stub
            return done._create_work_from_future(future)

    original = OwnGroup.allreduce
    backend = next(backends)
    dist.Backend.register_backend(
        backend, lambda store, rank, size, timeout: OwnGroup(None, rank, size), devices=["cpu"]
    )
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        tracer.install(spool=tmp_path, run="run")  # the group exists already
        dist.all_reduce(torch.ones(4))
        rows = communications(tmp_path)
    finally:
        dist.destroy_process_group()

    assert [row.name for row in rows] == ["all_reduce", "wait all_reduce"]
    assert OwnGroup.allreduce is original
