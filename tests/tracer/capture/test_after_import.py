"""The tracer learns when the compiler is loaded, and disturbs no import."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.tracer.capture.after_import import ImportWatch, after_import

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAME = "torch._dynamo"


class Stub:
    """Stands where the compiler would be found, by a finder or as a loader."""

    def __init__(self, load: Callable[[Any], None]) -> None:
        self._load = load

    def find_spec(self, fullname: str, path: object, target: object = None) -> Any:  # noqa: ANN401
        if fullname == NAME:
            return importlib.util.spec_from_loader(fullname, self)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: object) -> None:
        pass

    def exec_module(self, module: Any) -> None:  # noqa: ANN401
        self._load(module)


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
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    monkeypatch.setattr(torch, "_dynamo", None, raising=False)
    yield monkeypatch
    sys.modules.pop(NAME, None)


def watches() -> list[object]:
    return [finder for finder in sys.meta_path if isinstance(finder, ImportWatch)]


def nothing(module: object) -> None:
    """Load nothing."""


def test_all_who_ask_are_told_once_when_the_compiler_has_been_loaded(
    unloaded: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    stub = Stub(lambda module: told.append("loading"))
    sys.meta_path.insert(0, stub)
    after_import(NAME, lambda: told.append("one"))
    after_import(NAME, lambda: told.append("two"))
    assert len(watches()) == 2
    assert importlib.util.find_spec("torch._no_such_module") is None
    assert importlib.util.find_spec(NAME) is not None  # asked for, and not loaded
    assert len(watches()) == 2
    module: Any = importlib.import_module(NAME)

    assert told == ["loading", "one", "two"]
    assert watches() == []
    assert module.__spec__.loader is stub
    assert stub.exec_module == Stub.exec_module.__get__(stub)
    after_import(NAME, lambda: told.append("later"))
    assert told[3:] == ["later"]
    assert watches() == []


def test_a_compiler_that_cannot_be_loaded_says_so_and_may_come_later(
    unloaded: pytest.MonkeyPatch,
) -> None:
    problems, told = [RuntimeError("no compiler today")], [0]

    def load(module: object) -> None:
        if problems:
            raise problems[0]

    sys.meta_path.insert(0, Stub(load))
    after_import(NAME, lambda: told.append(1))
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            importlib.import_module(NAME)
        assert caught.value is problems[0]
        assert len(watches()) == 1
    problems.clear()
    importlib.import_module(NAME)

    assert told == [0, 1]
    assert watches() == []


def test_a_loader_that_cannot_be_watched_loads_as_ever(unloaded: pytest.MonkeyPatch) -> None:
    told = [0]
    sys.meta_path.insert(0, Fixed(lambda module: told.append(1)))
    after_import(NAME, lambda: told.append(2))
    importlib.import_module(NAME)

    assert told == [0, 1]


def test_where_there_is_no_compiler_it_is_said_as_ever(unloaded: pytest.MonkeyPatch) -> None:
    after_import(NAME, lambda: None)
    unloaded.setattr(sys.modules["torch"], "__path__", [])
    with pytest.raises(ModuleNotFoundError, match=NAME):
        importlib.import_module(NAME)


def test_a_finder_of_long_ago_is_passed_over(unloaded: pytest.MonkeyPatch) -> None:
    stub: Any = Stub(nothing)
    sys.meta_path[:] = [SimpleNamespace(), stub]
    spec = ImportWatch(NAME, lambda: None).find_spec(NAME, None)

    assert spec is not None
    assert spec.loader is stub


@pytest.mark.parametrize("is_loaded", [True, False])
def test_whoever_cannot_be_told_hurts_nobody(
    unloaded: pytest.MonkeyPatch, *, is_loaded: bool
) -> None:
    told = [0]

    def refuse() -> None:
        told.append(1)
        raise TypeError

    sys.meta_path.insert(0, Stub(nothing))
    if is_loaded:
        importlib.import_module(NAME)
    after_import(NAME, refuse)
    importlib.import_module(NAME)

    assert told == [0, 1]
    assert watches() == []
