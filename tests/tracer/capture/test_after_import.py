"""Calls after the import of a module, and no change of the import itself."""

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
    """A finder and loader of the compiler."""

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
    """A loader that takes no attribute."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        if name == "exec_module":
            raise AttributeError(name)
        super().__setattr__(name, value)


@pytest.fixture
def not_imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Remove the compiler from the imported modules, and restore the import system afterwards."""
    import torch

    finders = [finder for finder in sys.meta_path if not isinstance(finder, ImportWatch)]
    monkeypatch.setattr(sys, "meta_path", finders)
    monkeypatch.setattr(torch, "_dynamo", None, raising=False)  # reads it first: torch imports it
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield monkeypatch
    sys.modules.pop(NAME, None)


def watches() -> list[object]:
    return [finder for finder in sys.meta_path if isinstance(finder, ImportWatch)]


def load_nothing(module: object) -> None:
    """Load nothing."""


def test_each_call_is_made_once_after_the_import(not_imported: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    stub = Stub(lambda module: calls.append("loading"))
    sys.meta_path.insert(0, stub)
    after_import(NAME, lambda: calls.append("one"))
    after_import(NAME, lambda: calls.append("two"))
    assert len(watches()) == 2
    assert importlib.util.find_spec("torch._no_such_module") is None
    assert importlib.util.find_spec(NAME) is not None  # found, but not loaded
    assert len(watches()) == 2
    module: Any = importlib.import_module(NAME)

    assert calls == ["loading", "one", "two"]
    assert watches() == []
    assert module.__spec__.loader is stub
    assert stub.exec_module == Stub.exec_module.__get__(stub)
    after_import(NAME, lambda: calls.append("later"))
    assert calls[3:] == ["later"]
    assert watches() == []


def test_a_failed_import_raises_and_a_later_one_makes_the_call(
    not_imported: pytest.MonkeyPatch,
) -> None:
    problems, calls = [RuntimeError("no compiler today")], [0]

    def load(module: object) -> None:
        if problems:
            raise problems[0]

    sys.meta_path.insert(0, Stub(load))
    after_import(NAME, lambda: calls.append(1))
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            importlib.import_module(NAME)
        assert caught.value is problems[0]
        assert len(watches()) == 1
    problems.clear()
    importlib.import_module(NAME)

    assert calls == [0, 1]
    assert watches() == []


def test_a_loader_that_takes_no_attribute_still_loads(not_imported: pytest.MonkeyPatch) -> None:
    calls = [0]
    sys.meta_path.insert(0, Fixed(lambda module: calls.append(1)))
    after_import(NAME, lambda: calls.append(2))
    importlib.import_module(NAME)

    assert calls == [0, 1]


def test_a_missing_module_raises_as_usual(not_imported: pytest.MonkeyPatch) -> None:
    after_import(NAME, lambda: None)
    not_imported.setattr(sys.modules["torch"], "__path__", [])
    with pytest.raises(ModuleNotFoundError, match=NAME):
        importlib.import_module(NAME)


def test_a_finder_without_find_spec_is_skipped(not_imported: pytest.MonkeyPatch) -> None:
    stub: Any = Stub(load_nothing)
    sys.meta_path[:] = [SimpleNamespace(), stub]
    spec = ImportWatch(NAME, lambda: None).find_spec(NAME, None)

    assert spec is not None
    assert spec.loader is stub


@pytest.mark.parametrize("is_loaded", [True, False])
def test_an_error_of_the_call_is_dropped(
    not_imported: pytest.MonkeyPatch, *, is_loaded: bool
) -> None:
    calls = [0]

    def refuse() -> None:
        calls.append(1)
        raise TypeError

    sys.meta_path.insert(0, Stub(load_nothing))
    if is_loaded:
        importlib.import_module(NAME)
    after_import(NAME, refuse)
    importlib.import_module(NAME)

    assert calls == [0, 1]
    assert watches() == []
