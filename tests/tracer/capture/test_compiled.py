"""What a compiler makes of a job must not depend on the tracer: its graphs, breaks and frames."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch._dynamo.utils import counters
from torch.distributed import _functional_collectives as functional

from rankscope import tracer
from rankscope.tracer.capture.compilation import ENGINE_MODULE, Uncompiled
from tests.support.tracer.reading import dropped, only_folder, read_spans
from tests.support.tracer.torch_here import TORCH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import CodeType


@pytest.fixture(autouse=True)
def _group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()
    counters.clear()


class Opaque:
    """A context that no compiler follows: the function that enters it is run as it stands."""

    def __enter__(self) -> None:
        torch._dynamo.graph_break()

    def __exit__(self, *about: object) -> None:
        torch._dynamo.graph_break()


def given_up_halfway() -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a compiled function that communicates and trains after its graph broke."""
    torch.manual_seed(3)
    model = nn.Linear(4, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        with Opaque():
            hidden = model(x)
            total = torch.ones(3)
            work = dist.all_reduce(total, async_op=True)
            assert work is not None
            work.wait()
            world = dist.distributed_c10d._get_default_group()
            loss: torch.Tensor = functional.all_reduce(hidden, "sum", world).sum()
            loss.backward()  # type: ignore[no-untyped-call]
        return loss

    compiled: Any = torch.compile(step, backend="eager")
    return compiled  # type: ignore[no-any-return]


def compiler_saw() -> tuple[list[str], Any]:
    """Train for three steps; return why graphs broke, and how many graphs there are."""
    torch._dynamo.reset()
    counters.clear()
    step = given_up_halfway()
    for _ in range(3):
        step(torch.ones(2, 4))
    reasons = [reason.partition(" object at ")[0] for reason in counters["graph_break"]]
    return reasons, counters["stats"]["unique_graphs"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch 2.10's own
def test_a_function_that_is_given_up_halfway_has_nothing_of_ours_compiled(tmp_path: Path) -> None:
    untraced = compiler_saw()
    tracer.install(spool=tmp_path, run="run")
    tracer.begin_steps()
    traced = compiler_saw()
    tracer.shutdown()

    assert traced == untraced
    folder = only_folder(tmp_path)
    assert dropped(folder) == {}
    communications = [row for row in read_spans(folder) if row.group_id and row.kind != "wait"]
    # One by hand, one functional, and that one's backward (a later torch's), in three steps.
    assert [row.seq for row in communications] == list(range(9 if TORCH >= "2.13" else 6))


def test_an_older_compiler_is_told_of_each_function_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skipped: list[CodeType] = []
    older = SimpleNamespace(skip_code=skipped.append)  # as it was before torch 2.8
    monkeypatch.setitem(sys.modules, ENGINE_MODULE, older)
    uncompiled = Uncompiled()
    uncompiled.mark()
    num_skipped = len(skipped)
    uncompiled.mark()

    assert len(skipped) == num_skipped > 100
    assert {"kernel", "wait", "backward", "before", "after"} <= {code.co_name for code in skipped}
    assert all("/tracer/" in code.co_filename for code in skipped)


def test_spans_by_hand_in_what_is_compiled_break_no_graph(tmp_path: Path) -> None:
    @tracer.traced
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        with tracer.span("outer"), tracer.span("inner", kind=tracer.SpanKind.DATA, microbatch=1):
            return double(x).sum()

    tracer.install(spool=tmp_path, run="run")
    tracer.begin_steps()
    assert float(compiled(torch.ones(3))) == 6
    with tracer.span("outside"):
        pass
    tracer.shutdown()

    assert dropped(only_folder(tmp_path)) == {}  # the tracer was installed here before
    names = [row.name for row in read_spans(only_folder(tmp_path))]
    assert "outside" in names
    assert not {"outer", "inner"} & set(names)
