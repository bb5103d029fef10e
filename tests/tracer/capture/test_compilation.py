"""Compiled code: neither the tracer nor its absence changes graphs, breaks or frames."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
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
from rankscope.tracer.capture.compilation import CALLS_JOB, ENGINE_MODULE, CompilerExclusions
from rankscope.tracer.spool import MICROBATCH, STEP, RecordType
from tests.support.tracer.reading import dropped, only_folder, read_rows, read_spans
from tests.support.tracer.recording import run_script
from tests.support.tracer.torch_here import TORCH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import CodeType

MODEL = """
    @tracer.traced
    def double(x):
        with tracer.span("inner", kind=tracer.SpanKind.DATA, microbatch=1):
            return x * 2

    class Model(torch.nn.Module):
        @tracer.traced("whole")
        def forward(self, x):
            with tracer.span("outer"):
                tracer.microbatch(index=0, tokens=3)
                tracer.event("note", "whole", value=1)
                tracer.step(tokens=3)
                return double(x).sum()

    def test(model):
        assert float(model(torch.ones(3))) == 6

    test(torch.compile(Model(), backend="eager", fullgraph=True))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("begin", "environ"),
    [
        ("import torch; from rankscope import tracer", {}),
        pytest.param(
            "import torch; from rankscope import tracer",
            {"RANKSCOPE_PURE_PYTHON": "1"},
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "import torch; from rankscope import tracer; tracer.install()",
            {"RANKSCOPE_DISABLE": "1"},
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "import torch._dynamo; from rankscope import tracer", {}, marks=pytest.mark.nightly
        ),
        pytest.param(
            "from rankscope import tracer; import torch; tracer.install(); tracer.shutdown()",
            {},
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_an_untraced_job_has_whole_graphs(
    tmp_path: Path, begin: str, environ: dict[str, str]
) -> None:
    left = "    assert not [it for it in sys.meta_path if type(it).__name__ == 'ImportWatch']"
    done = run_script(f"    import sys\n    {begin}\n{MODEL}\n{left}\n", tmp_path, **environ)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Path]:
    """Record into a folder by a tracer of this process, whose compiler is in its initial state."""
    torch._dynamo.reset()
    counters.clear()
    tracer.install(spool=tmp_path, run="run")
    tracer.begin_steps()
    yield tmp_path
    tracer.shutdown()
    torch._dynamo.reset()
    counters.clear()


def read_records(spool: Path) -> dict[str, list[Any]]:
    """Return the steps, micro-batches and events of the process."""
    folder = only_folder(spool)
    assert dropped(folder) == {}
    rows = read_rows(folder)
    steps = [row for row in rows if row.record == RecordType.STEP]
    batches = [row for row in rows if row.record == RecordType.MICROBATCH]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return {
        "steps": [(row.step, *STEP.unpack(row.second)[:2]) for row in steps],
        "batches": [
            (row.step, row.microbatch, *MICROBATCH.unpack(row.second)[:2]) for row in batches
        ],
        "events": [
            (event["kind"], event["text"], event["data"])
            for event in events
            if event["kind"] != "compilation"
        ],
    }


@pytest.mark.slow
def test_step_functions_in_compiled_code_are_called_each_time(spool: Path) -> None:
    @torch.compile(backend="eager")
    def compiled_step(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        tracer.microbatch(0, x.numel(), sum_squared_lengths=50)
        tracer.event("note", "it began", sizes=sizes)
        with tracer.span("inside"):
            loss = (x * 2).sum()
        tracer.microbatch(index=1, tokens=13)
        tracer.step(tokens=x.numel(), loss=loss)
        return loss

    losses = [float(compiled_step(torch.ones(num), [num, 1])) for num in (5, 7, 9)]
    with tracer.span("outside"):
        pass
    tracer.step()

    assert losses == [10, 14, 18]
    assert sum(counters["graph_break"].values()) > 0
    assert all("disable" in reason for reason in counters["graph_break"])
    reported = read_records(spool)
    assert reported["steps"][:3] == [(0, 5, 10), (1, 7, 14), (2, 9, 18)]
    assert len(reported["steps"]) == 4
    assert reported["batches"] == [
        row for step, num in enumerate((5, 7, 9)) for row in ((step, 0, num, 50), (step, 1, 13, -1))
    ]
    assert reported["events"] == [("note", "it began", {"sizes": [num, 1]}) for num in (5, 7, 9)]
    names = {row.name for row in read_spans(only_folder(spool))}
    assert "outside" in names
    assert "inside" not in names


def test_a_job_that_was_compiled_before_it_is_traced_reports_from_then_on(tmp_path: Path) -> None:
    torch._dynamo.reset()

    @torch.compile(backend="eager")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        tracer.step(tokens=4)
        return x + 1

    for is_traced in (False, True, False):
        if is_traced:
            tracer.install(spool=tmp_path, run="run")
            tracer.begin_steps()
        assert [float(compiled(torch.ones(1))) for _ in range(3)] == [2, 2, 2]
        tracer.shutdown()

    assert [row[:2] for row in read_records(tmp_path)["steps"]] == [(0, 4), (1, 4), (2, 4)]


@pytest.fixture
def _group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()
    counters.clear()


class Opaque:
    """A context that the compiler cannot follow: the function that enters it runs uncompiled."""

    def __enter__(self) -> None:
        torch._dynamo.graph_break()

    def __exit__(self, *about: object) -> None:
        torch._dynamo.graph_break()


def compile_with_graph_break() -> Callable[[torch.Tensor], torch.Tensor]:
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
    """Train for three steps; return the reasons of graph breaks and the number of graphs."""
    torch._dynamo.reset()
    counters.clear()
    step = compile_with_graph_break()
    for _ in range(3):
        step(torch.ones(2, 4))
    reasons = [reason.partition(" object at ")[0] for reason in counters["graph_break"]]
    return reasons, counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.usefixtures("_group_of_one")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # a warning of torch 2.10
def test_after_a_graph_break_no_function_of_the_tracer_is_compiled(tmp_path: Path) -> None:
    untraced = compiler_saw()
    tracer.install(spool=tmp_path, run="run")
    tracer.begin_steps()
    traced = compiler_saw()
    tracer.shutdown()

    assert traced == untraced
    folder = only_folder(tmp_path)
    assert dropped(folder) == {}
    communications = [row for row in read_spans(folder) if row.group_id and row.kind != "wait"]
    # One plain call, one functional call, and the backward of the latter (since torch 2.13), in
    # three steps.
    assert [row.seq for row in communications] == list(range(9 if TORCH >= "2.13" else 6))


def test_an_older_compiler_skips_each_function_of_the_tracer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skipped: list[CodeType] = []
    older = SimpleNamespace(skip_code=skipped.append)  # as before torch 2.8
    monkeypatch.setitem(sys.modules, ENGINE_MODULE, older)
    uncompiled = CompilerExclusions()
    uncompiled.mark()
    num_skipped = len(skipped)
    uncompiled.mark()

    assert len(skipped) == num_skipped > 100
    assert {"kernel", "wait", "backward", "before", "after"} <= {code.co_name for code in skipped}
    assert all("/tracer/" in code.co_filename for code in skipped)


def test_each_module_that_calls_functions_of_the_job_exists() -> None:
    assert all(find_spec(name.removesuffix(".")) is not None for name in CALLS_JOB)


def test_manual_spans_in_compiled_code_break_no_graph(tmp_path: Path) -> None:
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

    assert dropped(only_folder(tmp_path)) == {}  # recompiled since, because a tracer is installed
    names = [row.name for row in read_spans(only_folder(tmp_path))]
    assert "outside" in names
    assert not {"outer", "inner"} & set(names)
