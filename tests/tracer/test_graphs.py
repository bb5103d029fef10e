"""Spans by hand in compiled code break no graph, whoever is installed, or nobody."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.tracer.recording import run_script
from tracer.graphs import COMPILER_MODULE, CompilerWatch, leave_out_soon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MODEL = """
    @tracer.traced
    def double(x):
        with tracer.span("inner", kind=tracer.SpanKind.DATA, microbatch=1):
            return x * 2

    class Model(torch.nn.Module):
        @tracer.traced("whole")
        def forward(self, x):
            with tracer.span("outer"):
                return double(x).sum()

    def test(model):
        assert float(model(torch.ones(3))) == 6

    test(torch.compile(Model(), backend="eager", fullgraph=True))
"""


@pytest.mark.parametrize(
    ("begin", "environ"),
    [
        ("import torch, tracer", {}),
        ("import torch, tracer", {"RANKSCOPE_PURE_PYTHON": "1"}),
        ("import torch, tracer; tracer.install()", {"RANKSCOPE_DISABLE": "1"}),
        ("import torch._dynamo, tracer", {}),
        ("import tracer, torch; tracer.install(); tracer.shutdown()", {}),
        ("import torch, tracer, importlib; importlib.reload(sys.modules['tracer.current'])", {}),
    ],
)
def test_a_job_that_is_not_traced_has_whole_graphs(
    tmp_path: Path, begin: str, environ: dict[str, str]
) -> None:
    left = "    assert not [it for it in sys.meta_path if type(it).__name__ == 'CompilerWatch']"
    done = run_script(f"    import sys\n    {begin}\n{MODEL}\n{left}\n", tmp_path, **environ)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class Stub:
    """Stands where the compiler would be found, by a finder or as a loader."""

    def __init__(self, load: Callable[[Any], None]) -> None:
        self._load = load
        self.replaced: list[object] = []

    def find_spec(self, fullname: str, path: object, target: object = None) -> Any:  # noqa: ANN401
        if fullname == COMPILER_MODULE:
            return importlib.util.spec_from_loader(fullname, self)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: object) -> None:
        pass

    def exec_module(self, module: Any) -> None:  # noqa: ANN401
        self._load(module)
        module.substitute_in_graph = lambda span: lambda _: self.replaced.append(span)


class Fixed(Stub):
    """Takes no attribute."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        if name == "exec_module":
            raise AttributeError(name)
        super().__setattr__(name, value)


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Have the compiler not loaded, and whatever the test puts into the import system taken out."""
    import torch

    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, COMPILER_MODULE, raising=False)
    monkeypatch.setattr(torch, "_dynamo", None, raising=False)
    yield monkeypatch
    sys.modules.pop(COMPILER_MODULE, None)


def watches() -> list[object]:
    return [finder for finder in sys.meta_path if isinstance(finder, CompilerWatch)]


def span(name: str) -> None:
    """Stand for `tracer.span`."""


def another(name: str) -> None:
    """Stand for that of a module which was loaded again."""


def test_each_span_is_left_out_once_the_compiler_is_loaded(unloaded: pytest.MonkeyPatch) -> None:
    stub = Stub(lambda module: None)
    sys.meta_path.insert(0, stub)
    leave_out_soon(span)
    leave_out_soon(another)
    assert len(watches()) == 2
    assert importlib.util.find_spec("torch._no_such_module") is None
    assert importlib.util.find_spec(COMPILER_MODULE) is not None  # asked for, and not loaded
    assert len(watches()) == 2
    module: Any = importlib.import_module(COMPILER_MODULE)

    assert stub.replaced == [span, another] or stub.replaced == [another, span]
    assert watches() == []
    assert module.__spec__.loader is stub
    assert stub.exec_module == Stub.exec_module.__get__(stub)
    leave_out_soon(another)
    assert len(stub.replaced) == 2
    assert watches() == []


def test_a_compiler_that_cannot_be_loaded_says_so_and_may_come_later(
    unloaded: pytest.MonkeyPatch,
) -> None:
    problems = [RuntimeError("no compiler today")]

    def load(module: object) -> None:
        if problems:
            raise problems[0]

    stub = Stub(load)
    sys.meta_path.insert(0, stub)
    leave_out_soon(test_a_compiler_that_cannot_be_loaded_says_so_and_may_come_later)
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            importlib.import_module(COMPILER_MODULE)
        assert caught.value is problems[0]
        assert len(watches()) == 1
    problems.clear()
    importlib.import_module(COMPILER_MODULE)

    assert len(stub.replaced) == 1
    assert watches() == []


def test_a_loader_that_cannot_be_watched_loads_as_ever(unloaded: pytest.MonkeyPatch) -> None:
    stub = Fixed(lambda module: None)
    sys.meta_path.insert(0, stub)
    leave_out_soon(test_a_loader_that_cannot_be_watched_loads_as_ever)
    importlib.import_module(COMPILER_MODULE)

    assert stub.replaced == []


def test_where_there_is_no_compiler_it_is_said_as_ever(unloaded: pytest.MonkeyPatch) -> None:
    leave_out_soon(test_where_there_is_no_compiler_it_is_said_as_ever)
    unloaded.setattr(sys.modules["torch"], "__path__", [])
    with pytest.raises(ModuleNotFoundError, match=COMPILER_MODULE):
        importlib.import_module(COMPILER_MODULE)


def test_a_finder_of_long_ago_is_passed_over(unloaded: pytest.MonkeyPatch) -> None:
    stub: Any = Stub(lambda module: None)
    sys.meta_path[:] = [SimpleNamespace(), stub]
    spec = CompilerWatch(span).find_spec(COMPILER_MODULE, None)

    assert spec is not None
    assert spec.loader is stub


def test_a_compiler_that_refuses_hurts_nobody(unloaded: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise TypeError

    sys.modules[COMPILER_MODULE] = SimpleNamespace(substitute_in_graph=refuse)  # type: ignore[assignment]
    leave_out_soon(test_a_compiler_that_refuses_hurts_nobody)
    assert watches() == []
