"""`tracer.span` and `tracer.traced`, with and without the extension."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, cast

import pytest

from rankscope import tracer
from rankscope.tracer.native.choice import IS_COMPILED, fast_span, set_finder
from rankscope.tracer.record.current import current_tracer, set_current
from rankscope.tracer.record.interface import NOOP_SPAN, NOOP_TRACER
from rankscope.tracer.spool import DropReason
from tests.support.tracer.reading import dropped, only_folder, read_spans
from tests.support.tracer.recording import recorder_in, run_script
from tests.support.waiting import LONGEST_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


NUM_EACH = 100

WRONG: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = (
    ((), {}),
    (("x", None, None, None, None), {}),
    (("x",), {"name": "y"}),
    (("x",), {"when": 3}),
)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_the_module_function_has_a_signature_and_rejects_other_arguments(
    installed: Path, *, is_recorded: bool
) -> None:
    if not is_recorded:
        set_current(NOOP_TRACER)
    options = inspect.signature(tracer.span).parameters
    nothing = inspect.Parameter.empty
    assert {name: option.default for name, option in options.items()} == {
        "name": nothing,
        "kind": None,
        "microbatch": None,
        "chunk": None,
    }
    assert (inspect.getdoc(tracer.span) or "").startswith("Return a span of this thread")
    assert getattr(sys.modules[tracer.span.__module__], tracer.span.__name__) is tracer.span
    for values, named in WRONG:
        with pytest.raises(TypeError, match=r"span\(\)"):
            tracer.span(*values, **named)
    for span in (tracer.span("x"), tracer.span(name="x"), tracer.span("x", None, chunk=None)):
        with span:
            pass

    assert [row.name for row in read_spans(installed)] == ["x", "x", "x"] * is_recorded


def test_turning_recording_on_and_off_in_another_thread_breaks_no_span(installed: Path) -> None:
    recorder, is_over = current_tracer(), threading.Event()
    seen = {True: 0, False: 0}
    interval_s = sys.getswitchinterval()

    def turn() -> None:
        while not is_over.is_set():
            set_current(NOOP_TRACER)
            set_current(recorder)

    def is_met() -> bool:
        outer = tracer.span("x")
        with outer, tracer.span("y"):
            seen[outer is NOOP_SPAN] += 1
        return min(seen.values()) >= NUM_EACH

    thread = threading.Thread(target=turn)
    sys.setswitchinterval(1e-5)  # so that the other thread runs within a span
    thread.start()
    try:
        deadline_s = time.monotonic() + LONGEST_S
        while not is_met():
            assert time.monotonic() < deadline_s, seen
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval_s)

    rows = read_spans(installed)
    assert len(rows) >= NUM_EACH
    assert {(row.name, row.depth) for row in rows} <= {("x", 0), ("y", 0), ("y", 1)}
    assert DropReason.INTERNAL_ERROR not in dropped(installed)


@pytest.mark.skipif(not IS_COMPILED, reason="only the compiled function checks its arguments")
def test_fast_span_and_set_finder_reject_wrong_types() -> None:
    def span(name: str) -> None:
        pass

    for wrong in ((span, NOOP_SPAN, 3), (None, NOOP_SPAN, "span(name)")):
        with pytest.raises(TypeError):
            fast_span(*wrong)
    with pytest.raises(TypeError):
        set_finder(3)  # type: ignore[arg-type]


def test_a_reloaded_module_records_nothing_until_a_tracer_is_installed(tmp_path: Path) -> None:
    script = """
        import importlib
        import sys
        from rankscope import tracer
        tracer.install()
        old = tracer.span
        with old("once"):
            pass
        importlib.reload(sys.modules["rankscope.tracer.record.current"])
        for span in (old, sys.modules["rankscope.tracer.record.current"].span):
            with span("between"), span(name="between"):
                pass
        sys.modules["rankscope.tracer.record.current"].set_current(tracer.install(run="again"))
        with sys.modules["rankscope.tracer.record.current"].span("again"):
            pass
    """
    done = run_script(script, tmp_path)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    recorded = {
        run: [row.name for row in read_spans(only_folder(tmp_path / run))]
        for run in ("run", "again")
    }
    assert recorded == {"run": ["once"], "again": ["again"]}


def test_a_replaced_finder_is_freed(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    finder, _ = recorder.lanes.finder, recorder.lane()  # the lane refers to it too
    before = sys.getrefcount(finder)
    for _ in range(100):
        set_current(recorder)
        with tracer.span("x"), tracer.span("x"):
            pass
        set_current(NOOP_TRACER)
        with tracer.span("x"):
            pass

    assert sys.getrefcount(finder) == before
    recorder.shutdown()
    assert len(read_spans(tmp_path)) == 200


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


def test_the_span_of_an_async_function_lasts_as_long_as_the_function(installed: Path) -> None:
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


def test_class_methods_and_static_methods_remain_so(installed: Path) -> None:
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
    """A callable whose attributes all raise."""

    def _raise(self) -> Any:  # noqa: ANN401
        raise ArithmeticError

    __class__: Any = property(_raise)
    __dict__: Any = property(_raise)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        raise ArithmeticError(name)

    def __call__(self) -> int:
        return 6


@pytest.mark.parametrize("make", [Hostile, functools.partial(functools.partial, int, "6")])
def test_a_callable_whose_attributes_raise_is_traced_too(
    installed: Path, make: Callable[[], Callable[[], int]]
) -> None:
    function = make()  # here, because pytest reads attributes of parameters
    assert tracer.traced(function)() == 6
    assert tracer.traced("own name")(function)() == 6

    assert recorded(installed) == [("own name", 16), ("traced", 16)]
