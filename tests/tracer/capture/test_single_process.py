"""Capture in one process: a gloo group of one, whose communications end at once."""

from __future__ import annotations

import gc
import json
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed import checkpoint
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers a backend
from torch.utils.data import dataloader

from rankscope import tracer
from rankscope.tracer.native.choice import ComputeSpan
from rankscope.tracer.span import COMM_KINDS, SpanKind
from rankscope.tracer.spool import DropReason
from tests.support.tracer.reading import (
    Row,
    dropped,
    missing_kinds,
    only_folder,
    read_rows,
    read_spans,
)
from tests.support.tracer.torch_here import since
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="module", autouse=True)
def _group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shut_down_and_read(spool: Path) -> list[Row]:
    tracer.shutdown()
    folder = only_folder(spool)
    return read_spans(folder)


@since("2.8", "no call is known to be synchronous")
def test_a_synchronous_call_is_a_communication_and_a_wait_within_it(tmp_path: Path) -> None:
    tracer.install(spool=tmp_path, run="run")
    dist.all_reduce(torch.ones(6))
    communication, wait = shut_down_and_read(tmp_path)

    assert (communication.name, wait.name, wait.kind) == ("all_reduce", "wait all_reduce", "wait")
    assert communication.num_bytes == 24
    assert communication.seq == wait.seq == 0
    assert communication.group_id == wait.group_id != 0
    assert communication.start_ns <= wait.start_ns <= wait.end_ns == communication.end_ns
    assert (communication.track, wait.track) == ("comm world", "main")


def test_errors_of_the_job_pass_through_unchanged(tmp_path: Path) -> None:
    def provoke() -> str:
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(2, dtype=torch.bool), op=dist.ReduceOp.AVG)
        return f"{type(caught.value)} {caught.value}".splitlines()[0]

    plain = provoke()
    tracer.install(spool=tmp_path, run="run")
    assert provoke() == plain
    shut_down_and_read(tmp_path)


def test_a_work_without_a_wait_keeps_no_memory_of_the_job_alive(tmp_path: Path) -> None:
    tracer.install(spool=tmp_path, run="run")
    values = torch.ones(6)
    storage = values.untyped_storage()._weak_ref()
    work = dist.all_reduce(values, async_op=True)
    del values, work
    dist.all_reduce(torch.ones(2))  # releases the work that was kept until torch had handed it out

    wait_until(lambda: bool(torch.UntypedStorage._expired(storage)))
    torch.UntypedStorage._free_weak_ref(storage)  # type: ignore[no-untyped-call]
    communications = [row for row in shut_down_and_read(tmp_path) if row.kind != "wait"]
    assert [row.seq for row in communications] == [0, 1]


def test_without_callbacks_a_collective_ends_with_its_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "rankscope.tracer.capture.works.CAN_CALL_BACK", False
    )  # as before torch 2.8
    left: list[object] = []
    monkeypatch.setattr(torch.futures.Future, "add_done_callback", left.append)
    tracer.install(spool=tmp_path, run="run")
    for _ in range(20):
        work = dist.all_reduce(torch.ones(100_000), async_op=True)
        assert work is not None
        work.wait()
    unwaited = dist.all_reduce(torch.ones(2), async_op=True)
    rows = shut_down_and_read(tmp_path)
    assert unwaited is not None
    unwaited.wait()

    assert left == []
    launched = {row.seq: row for row in rows if row.kind != "wait"}
    waits = {row.seq: row for row in rows if row.kind == "wait"}
    assert sorted(launched) == list(range(21))
    assert sorted(waits) == list(range(20))
    for seq, wait in waits.items():
        was_done_at_launch = launched[seq].end_ns <= wait.start_ns
        assert was_done_at_launch or launched[seq].end_ns == wait.end_ns


@since("2.8", "the fake backend coalesces nothing")
def test_all_coalesced_launches_share_one_work(tmp_path: Path) -> None:
    assert dist.Backend.FAKE in dist.Backend.backend_list  # a backend of `fake_pg`
    group = dist.new_group([0], backend="fake")
    tracer.install(spool=tmp_path, run="run")
    coalescing = dist.distributed_c10d._coalescing_manager(
        group, torch.device("cpu"), async_ops=True
    )
    with coalescing as manager:
        dist.broadcast(torch.ones(2), 0, group=group)
        dist.broadcast(torch.ones(4), 0, group=group)
    for work in manager.works:
        dist.Work.wait(work)  # the works of this backend have their own method
    dist.broadcast(torch.ones(8), 0, group=group)
    rows = shut_down_and_read(tmp_path)

    launched = [row for row in rows if row.kind != "wait"]
    waits = [row for row in rows if row.kind == "wait"]
    assert [(row.seq, row.num_bytes) for row in launched] == [(0, 8), (1, 16), (2, 32)]
    first, second, alone = launched
    assert first.interval_id == second.interval_id != 0
    assert alone.interval_id == 0
    assert [row.seq for row in waits] == [0, 1]


def test_a_group_unknown_to_torch_is_not_captured_but_counted(tmp_path: Path) -> None:
    tracer.install(spool=tmp_path, run="run")
    make: Any = dist.ProcessGroup  # torch's stub lacks this constructor
    group = make(0, 1)
    backend = dist.ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=10))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_group_name("custom")
    group.allreduce([torch.ones(2)]).wait()
    dist.all_reduce(torch.ones(2))
    rows = shut_down_and_read(tmp_path)

    assert [row.kind for row in rows] == ["other", "wait"]
    folder = only_folder(tmp_path)
    assert dropped(folder) == {DropReason.INTERNAL_ERROR: 1}
    assert "not capturing group 'custom'" in (folder / "events.jsonl").read_text()


def test_after_a_backward_that_raised_the_waits_of_the_next_are_recorded(tmp_path: Path) -> None:
    class Raises(torch.autograd.Function):
        armed = True

        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
            if Raises.armed:
                raise ArithmeticError("nan")
            return grads[0]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below, self.above = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            between: torch.Tensor = Raises.apply(self.below(x))  # type: ignore[no-untyped-call]
            out: torch.Tensor = self.above(between)
            return out

    ddp = DistributedDataParallel(Model(), bucket_cap_mb=0.0001)
    ddp(torch.ones(1, 8))  # so that the buckets follow the order of use
    tracer.install(spool=tmp_path, run="run")
    with pytest.raises(ArithmeticError):
        ddp(torch.ones(1, 8)).sum().backward()
    Raises.armed = False
    ddp = DistributedDataParallel(Model(), bucket_cap_mb=0.0001)
    for _ in range(2):
        ddp(torch.ones(1, 8)).sum().backward()
    rows = shut_down_and_read(tmp_path)

    reduced = [row.seq for row in rows if row.name == "all_reduce"]
    waited = {row.seq for row in rows if row.name == "wait all_reduce"}
    # The launches of the first backward have no wait, because it raised.
    assert waited
    assert set(reduced[-2:]) <= waited


def functions_of_torch() -> list[object]:
    return [
        *(dist.Work.wait, dist.batch_isend_irecv, dist.init_process_group, checkpoint.save),  # type: ignore[attr-defined]
        *(torch.save, torch.serialization.save, torch.compile, torch.autograd.backward),
        *(torch.autograd.graph._engine_run_backward, dataloader._BaseDataLoaderIter.__next__),
    ]


def test_shutdown_restores_torch(tmp_path: Path) -> None:
    before = functions_of_torch()
    tracer.install(spool=tmp_path, run="run")
    assert functions_of_torch() != before
    tracer.shutdown()
    dist.all_reduce(torch.ones(2))

    assert functions_of_torch() == before
    folder = only_folder(tmp_path)
    assert read_spans(folder) == []


def test_an_error_of_the_capture_turns_it_off_without_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(group: object) -> list[int]:
        raise RuntimeError("torch has changed")

    tracer.install(spool=tmp_path, run="run")
    monkeypatch.setattr(dist, "get_process_group_ranks", broken)
    # The raising frame is a test's; an error of torch would come from torch's folder.
    monkeypatch.setattr("rankscope.tracer.errors.PACKAGE_FOLDER", __file__)
    values = torch.ones(2)
    tracer.begin_steps()
    tracer.step()
    dist.all_reduce(values)
    tracer.step()
    dist.all_reduce(values)
    tracer.step()

    assert shut_down_and_read(tmp_path) == []
    folder = only_folder(tmp_path)
    assert dropped(folder) == {DropReason.INTERNAL_ERROR: 1}
    assert "turned itself off" in (folder / "events.jsonl").read_text()
    # From then on each step says what is missing, else it would look as if there were no waits.
    assert missing_kinds(folder) == [
        set(),
        {*COMM_KINDS, "other", "wait"},
        {*COMM_KINDS, "other", "wait"},
    ]


def test_if_torch_has_no_such_name_the_job_runs_and_an_event_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Read last, when the kernels are registered: they must be removed again.
    monkeypatch.delattr(dist.Work, "wait")
    tracer.install(spool=tmp_path, run="run")
    works = [dist.all_reduce(torch.ones(2), async_op=True) for _ in range(2)]
    assert len(works) == 2
    tracer.begin_steps()
    tracer.step()

    assert shut_down_and_read(tmp_path) == []
    folder = only_folder(tmp_path)
    assert dropped(folder) == {DropReason.INTERNAL_ERROR: 1}
    assert "no communication capture" in (folder / "events.jsonl").read_text()
    assert missing_kinds(folder) == [{*COMM_KINDS, "other", "wait"}]


@pytest.mark.parametrize("times", [1, 3])
def test_a_forward_that_cannot_be_recorded_is_missing_in_its_step_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    left = [times]

    def breaks(*arguments: Any) -> object:  # noqa: ANN401 - those of `ComputeSpan`
        left[0] -= 1
        if left[0] >= 0:
            raise RuntimeError("ours")
        return ComputeSpan(*arguments)

    model = nn.Linear(2, 2)
    tracer.install(spool=tmp_path, run="run", model=model)
    monkeypatch.setattr("rankscope.tracer.capture.forward_backward.ComputeSpan", breaks)
    monkeypatch.setattr("rankscope.tracer.errors.PACKAGE_FOLDER", __file__)
    tracer.begin_steps()
    for _ in range(4):
        model(torch.ones(2))
        tracer.step()

    spans = shut_down_and_read(tmp_path)
    folder = only_folder(tmp_path)
    assert [row.step for row in spans] == list(range(times, 4))
    assert missing_kinds(folder) == [{"forward"}] * times + [set()] * (4 - times)
    assert dropped(folder) == {DropReason.INTERNAL_ERROR: times}


def by_grad(model: nn.Module, out: torch.Tensor) -> None:
    parameters = list(model.parameters())
    for parameter, grad in zip(parameters, torch.autograd.grad(out, parameters), strict=True):
        parameter.grad = grad


def by_grad_in_a_span(model: nn.Module, out: torch.Tensor) -> None:
    with tracer.span("my backward", kind=SpanKind.BACKWARD):
        by_grad(model, out)


def by_backward(model: nn.Module, out: Any) -> None:  # noqa: ANN401
    out.backward()


@pytest.mark.parametrize(
    ("differentiate", "missing", "num_reported"),
    [(by_grad, {"backward"}, 1), (by_grad_in_a_span, set(), 0), (by_backward, set(), 0)],
)
def test_a_step_without_a_recorded_backward_says_so(
    tmp_path: Path,
    differentiate: Callable[[nn.Module, torch.Tensor], None],
    missing: set[str],
    num_reported: int,
) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracer.install(spool=tmp_path, run="run", model=model)
    tracer.begin_steps()
    for _ in range(3):
        differentiate(model, model(torch.ones(1, 2)).sum())
        optimizer.step()
        tracer.step()
    model(torch.ones(1, 2))  # a step of evaluation needs no backward
    tracer.step()
    tracer.shutdown()

    folder = only_folder(tmp_path)
    assert missing_kinds(folder) == [missing] * 3 + [set()]
    file = folder / "events.jsonl"
    events = file.read_text() if file.exists() else ""
    assert events.count("no backward was recorded") == num_reported


def test_a_backward_inside_the_root_forward_is_part_of_it(tmp_path: Path) -> None:
    class Trains(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: Any = super().forward(x).sum()
            out.backward()
            return out  # type: ignore[no-any-return]

    model = Trains(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracer.install(spool=tmp_path, run="run", model=model)
    tracer.begin_steps()
    model(torch.ones(1, 2))
    optimizer.step()
    tracer.step()
    tracer.shutdown()

    assert missing_kinds(only_folder(tmp_path)) == [set()]


def test_an_optimizer_inside_another_counts_once(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([weight], lr=0.1)

    class Outer(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            inner.step()

    weight.grad = torch.ones(2)
    tracer.install(spool=tmp_path, run="run")
    Outer([weight], lr=0.1).step()
    inner.step()

    assert [row.kind for row in shut_down_and_read(tmp_path)] == ["optimizer", "optimizer"]


def test_a_closure_is_no_part_of_the_optimizer_step(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> float:
        loss = model(torch.ones(2, 3)).sum()
        loss.backward()
        return float(loss.detach())

    def fail() -> float:
        closure()
        raise ArithmeticError("nan")

    tracer.install(spool=tmp_path, run="run", model=model)
    tracer.begin_steps()
    with pytest.raises(ArithmeticError):
        optimizer.step(fail)
    closure()  # of no optimizer
    tracer.step()
    optimizer.step(closure)
    rows = shut_down_and_read(tmp_path)

    inside = ["forward", "backward", "optimizer"]
    assert [row.kind for row in rows if row.step == 1] == inside
    assert all(row.depth == 0 for row in rows if row.step == 1)
    assert [row.kind for row in rows if row.step == 0][-2:] == ["forward", "backward"]


def test_after_an_optimizer_step_that_raised_the_next_is_recorded(tmp_path: Path) -> None:
    class Fails(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            raise ArithmeticError("nan")

    weight = nn.Parameter(torch.ones(2))
    failing, sound = Fails([weight], lr=0.1), torch.optim.SGD([weight], lr=0.1)
    tracer.install(spool=tmp_path, run="run")
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            failing.step()
    sound.step()
    with tracer.span("after"):
        pass
    rows = shut_down_and_read(tmp_path)

    assert [(row.name, row.depth) for row in rows] == [("optimizer", 0), ("after", 0)]


def test_a_step_whose_optimizer_the_scaler_skips_is_a_step_and_an_event(tmp_path: Path) -> None:
    tracer.install(spool=tmp_path, run="run", count_steps=True)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight])
    scaler = torch.amp.GradScaler("cpu")
    for factor in (1.0, float("inf"), float("nan"), 1.0):
        scaler.scale((weight * factor).sum()).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    rows = shut_down_and_read(tmp_path)

    assert [row.step for row in rows if row.kind == "backward"] == [0, 1, 2, 3]
    lines = (only_folder(tmp_path) / "events.jsonl").read_text().splitlines()
    events = map(json.loads, lines)
    skipped = [each["data"] for each in events if each["kind"] == "optimizer-skipped"]
    assert skipped == [{"step": 1, "num_skipped": 1}, {"step": 2, "num_skipped": 2}]


@pytest.mark.slow
def test_a_long_garbage_collection_is_a_span(tmp_path: Path) -> None:
    tracer.install(spool=tmp_path, run="run")
    kept = [[number] for number in range(400_000)]  # objects that a full collection visits
    gc.collect()
    tracer.shutdown()
    del kept
    folder = only_folder(tmp_path)
    pauses = [row for row in read_rows(folder) if row.kind == "gc"]

    assert "gc generation 2" in {row.name for row in pauses}
    assert all(row.duration_ns >= 1_000_000 for row in pauses)


def launch_in_backward(works: list[dist.Work]) -> torch.Tensor:
    class Reduces(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
            works.append(dist.all_reduce(grads[0].clone(), async_op=True))
            return grads[0]

    reduced: torch.Tensor = Reduces.apply(torch.ones(8, requires_grad=True))  # type: ignore[no-untyped-call]
    return reduced


def launch_in_hook(works: list[dist.Work]) -> torch.Tensor:
    """Reduce a gradient as soon as it is there, as jobs do that overlap without DDP."""
    weight = torch.ones(8, requires_grad=True)

    def reduce(parameter: torch.Tensor) -> None:
        works.append(dist.all_reduce(parameter.grad, async_op=True))

    weight.register_post_accumulate_grad_hook(reduce)  # type: ignore[no-untyped-call]
    return weight * 2


@pytest.mark.parametrize("launch", [launch_in_backward, launch_in_hook])
def test_what_python_launches_in_a_backward_waits_where_it_calls_wait(
    tmp_path: Path, launch: Callable[[list[dist.Work]], torch.Tensor]
) -> None:
    works: list[dist.Work] = []
    tracer.install(spool=tmp_path, run="run")

    launch(works).sum().backward()  # type: ignore[no-untyped-call]
    ended_ns = time.monotonic_ns()
    works[0].wait()
    rows = shut_down_and_read(tmp_path)

    (wait,) = (row for row in rows if row.name == "wait all_reduce")
    assert wait.start_ns >= ended_ns


def test_a_hook_of_the_job_for_ddp_is_waited_for_in_the_backward(tmp_path: Path) -> None:
    def halve(_state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  # DDP reads types, not their names
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0] / 2)

    tracer.install(spool=tmp_path, run="run")
    ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
    ddp.register_comm_hook(None, halve)
    begun_ns = time.monotonic_ns()
    ddp(torch.ones(2, 4)).sum().backward()
    ended_ns = time.monotonic_ns()
    rows = shut_down_and_read(tmp_path)

    (wait,) = (row for row in rows if row.name == "wait all_reduce")
    assert begun_ns <= wait.start_ns <= ended_ns


def test_a_launch_of_an_engine_thread_without_python_frames_is_recorded(tmp_path: Path) -> None:
    """Autograd runs a device's nodes on threads of its own, as it does backwards nested this deep.

    On the CPU only the latter can be tried.
    """

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, depth: int) -> torch.Tensor:  # noqa: ANN401
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ANN401
            with torch.enable_grad():
                if ctx.depth:
                    backward_at(ctx.depth - 1)
                else:
                    ddp(torch.ones(1, 8)).sum().backward()
            return *grads, None

    def backward_at(depth: int) -> None:
        x = torch.ones(1, requires_grad=True)
        Nested.apply(x, depth).sum().backward()  # type: ignore[no-untyped-call]

    is_bottom = []
    model = nn.Linear(8, 8)
    model.weight.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
        lambda _: is_bottom.append(sys._getframe().f_back is None)
    )
    ddp = DistributedDataParallel(model)
    tracer.install(spool=tmp_path, run="run")
    depths = range(57, 64)  # torch's limit is 60
    for depth in depths:
        backward_at(depth)
    rows = shut_down_and_read(tmp_path)

    assert True in is_bottom
    assert [row.name for row in rows if row.name == "all_reduce"] == len(depths) * ["all_reduce"]
