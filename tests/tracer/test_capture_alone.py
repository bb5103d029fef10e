"""Capture in one process: a gloo group of one, whose communications end at once."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

import tracer
from tests.tracer.reading import Row, dropped, process_folders, read_rows, read_spans
from tracer.spool import DropReason

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module", autouse=True)
def _group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def spans_after_goodbye(spool: Path) -> list[Row]:
    tracer.shutdown()
    (folder,) = process_folders(spool).values()
    return read_spans(folder)


def test_a_synchronous_call_is_a_communication_and_a_wait_within_it(tmp_path: Path) -> None:
    tracer.install(spool=tmp_path, run="run")
    dist.all_reduce(torch.ones(6))
    communication, wait = spans_after_goodbye(tmp_path)

    assert (communication.name, wait.name, wait.kind) == ("all_reduce", "wait all_reduce", "wait")
    assert communication.num_bytes == 24
    assert communication.seq == wait.seq == 0
    assert communication.group_id == wait.group_id != 0
    assert communication.start_ns <= wait.start_ns <= wait.end_ns == communication.end_ns
    assert (communication.track, wait.track) == ("comm world", "main")


def test_the_job_s_own_errors_pass_through_unchanged(tmp_path: Path) -> None:
    def provoke() -> str:
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(2, dtype=torch.bool), op=dist.ReduceOp.AVG)
        return f"{type(caught.value)} {caught.value}".splitlines()[0]

    plain = provoke()
    tracer.install(spool=tmp_path, run="run")
    assert provoke() == plain
    spans_after_goodbye(tmp_path)


def test_after_goodbye_torch_is_as_it_was(tmp_path: Path) -> None:
    before = (dist.Work.wait, dist.batch_isend_irecv, torch.autograd.backward)
    tracer.install(spool=tmp_path, run="run")
    assert dist.Work.wait is not before[0]
    tracer.shutdown()
    dist.all_reduce(torch.ones(2))

    assert (dist.Work.wait, dist.batch_isend_irecv, torch.autograd.backward) == before
    (folder,) = process_folders(tmp_path).values()
    assert read_spans(folder) == []


def test_an_error_of_the_capture_turns_it_off_and_leaves_the_job_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(group: object) -> list[int]:
        raise RuntimeError("torch has changed")

    tracer.install(spool=tmp_path, run="run")
    monkeypatch.setattr(dist, "get_process_group_ranks", broken)
    # The frame that raises is a test's; as torch's own it would lie below torch's folder.
    monkeypatch.setattr("tracer.blame.OURS", __file__)
    values = torch.ones(2)
    dist.all_reduce(values)
    dist.all_reduce(values)

    assert spans_after_goodbye(tmp_path) == []
    (folder,) = process_folders(tmp_path).values()
    assert dropped(folder) == {DropReason.INTERNAL_ERROR: 1}
    assert "turned itself off" in (folder / "events.jsonl").read_text()


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

    assert [row.kind for row in spans_after_goodbye(tmp_path)] == ["optimizer", "optimizer"]


def test_an_optimizer_step_that_raises_leaves_the_next_one_whole(tmp_path: Path) -> None:
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
    rows = spans_after_goodbye(tmp_path)

    assert [(row.name, row.depth) for row in rows] == [("optimizer", 0), ("after", 0)]


def test_forward_and_backward_of_the_root_module_are_spans(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    tracer.install(spool=tmp_path, run="run", model=model)
    tracer.begin_steps()
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
    with torch.no_grad():
        model(torch.ones(2, 3))
    tracer.step()
    rows = spans_after_goodbye(tmp_path)

    assert [(row.kind, row.microbatch, row.step) for row in rows] == [
        ("forward", 0, 0),
        ("backward", 0, 0),
        ("forward", 1, 0),
        ("backward", 1, 0),
        ("forward", -1, 0),
    ]


def test_a_long_collection_of_garbage_is_a_span(tmp_path: Path) -> None:
    tracer.install(spool=tmp_path, run="run")
    kept = [[number] for number in range(400_000)]  # what a full collection must look at
    gc.collect()
    tracer.shutdown()
    del kept
    (folder,) = process_folders(tmp_path).values()
    pauses = [row for row in read_rows(folder) if row.kind == "gc"]

    assert "gc generation 2" in {row.name for row in pauses}
    assert all(row.duration_ns >= 1_000_000 for row in pauses)
