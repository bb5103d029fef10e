"""`tracer.traced` around whatever a job may put under it."""

from __future__ import annotations

import asyncio
import functools
import inspect
from typing import TYPE_CHECKING, Any, cast

import pytest

from rankscope import tracer
from tests.support.tracer.reading import dropped, read_spans

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def recorded(folder: Path) -> list[tuple[str, int]]:
    assert dropped(folder) == {}
    return sorted((row.name, int(row.flags)) for row in read_spans(folder))


def test_a_function_keeps_its_name_and_each_call_is_a_span(installed: Path) -> None:
    @tracer.traced
    def double(number: int) -> int:
        """Twice."""
        return number * 2

    @tracer.traced("own name")
    def fail() -> None:
        raise raised

    raised = ValueError("mine")
    assert double(4) == 8
    with pytest.raises(ValueError, match="mine") as caught:
        fail()

    assert caught.value is raised
    assert (double.__name__, double.__doc__) == ("double", "Twice.")
    name = f"{test_a_function_keeps_its_name_and_each_call_is_a_span.__name__}.<locals>.double"
    assert recorded(installed) == [("own name", 16 + 64), (name, 16)]


def test_the_span_of_an_async_function_lasts_as_long_as_it_does(installed: Path) -> None:
    went_on = asyncio.Event()

    @tracer.traced("waits")
    async def wait() -> int:
        await went_on.wait()
        with tracer.span("inside"):
            return 7

    async def both() -> int:
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        with tracer.span("meanwhile"):
            went_on.set()
        return await task

    assert inspect.iscoroutinefunction(wait)
    assert asyncio.run(both()) == 7
    waits, meanwhile, inside = (
        next(row for row in read_spans(installed) if row.name == name)
        for name in ("waits", "meanwhile", "inside")
    )
    assert waits.start_ns <= meanwhile.start_ns
    assert meanwhile.end_ns <= inside.start_ns
    assert inside.end_ns <= waits.end_ns


def test_methods_of_a_class_and_static_ones_stay_what_they_are(installed: Path) -> None:
    class Model:
        @tracer.traced("class")
        @classmethod
        def of_class(cls) -> str:
            return cls.__name__

        @tracer.traced("static")
        @staticmethod
        def static(number: int) -> int:
            return number

        number: Any = tracer.traced("property")(cast("Any", property(lambda self: 5)))

    assert (Model.of_class(), Model().of_class()) == ("Model", "Model")
    assert (Model.static(3), Model().static(3)) == (3, 3)
    assert Model().number == 5
    names = [name for name, _ in recorded(installed)]
    assert names == ["class", "class", "static", "static"]


class Hostile:
    """A callable of which nothing can be asked."""

    def _raise(self) -> Any:  # noqa: ANN401
        raise ArithmeticError

    __class__: Any = property(_raise)
    __dict__: Any = property(_raise)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        raise ArithmeticError(name)

    def __call__(self) -> int:
        return 6


@pytest.mark.parametrize("make", [Hostile, functools.partial(functools.partial, int, "6")])
def test_a_callable_of_which_nothing_can_be_asked_is_traced_all_the_same(
    installed: Path, make: Callable[[], Callable[[], int]]
) -> None:
    function = make()  # here, because pytest would ask
    assert tracer.traced(function)() == 6
    assert tracer.traced("own name")(function)() == 6

    assert recorded(installed) == [("own name", 16), ("traced", 16)]
