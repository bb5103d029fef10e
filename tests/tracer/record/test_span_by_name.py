"""`tracer.span` itself, asked for by a name alone or otherwise, compiled and not."""

from __future__ import annotations

import inspect
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from rankscope import tracer
from rankscope.tracer.native.choice import IS_COMPILED, find_with, quick_span
from rankscope.tracer.record.current import current_tracer, set_current
from rankscope.tracer.record.noop import NOOP_SPAN, NOOP_TRACER
from rankscope.tracer.spool import DropReason
from tests.support.tracer.reading import dropped, only_folder, read_spans
from tests.support.tracer.recording import LONGEST_S, recorder_in, run_script

if TYPE_CHECKING:
    from pathlib import Path


NUM_EACH = 100

WRONG: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = (
    ((), {}),
    (("x", None, None, None, None), {}),
    (("x",), {"name": "y"}),
    (("x",), {"when": 3}),
)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_the_module_s_function_tells_what_it_takes_and_refuses_the_rest(
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


def test_a_thread_that_turns_recording_on_and_off_disturbs_no_span(installed: Path) -> None:
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
    sys.setswitchinterval(1e-5)  # so that it gets its turn within a span
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


@pytest.mark.skipif(not IS_COMPILED, reason="of the compiled function alone")
def test_what_is_no_function_and_what_finds_nothing_are_refused() -> None:
    def span(name: str) -> None:
        pass

    for wrong in ((span, NOOP_SPAN, 3), (None, NOOP_SPAN, "span(name)")):
        with pytest.raises(TypeError):
            quick_span(*wrong)
    with pytest.raises(TypeError):
        find_with(3)  # type: ignore[arg-type]


def test_a_module_that_is_loaded_again_records_nothing_and_then_what_it_is_told_to(
    tmp_path: Path,
) -> None:
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


def test_a_finder_that_is_asked_no_more_is_let_go(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    finder, _ = recorder.lanes.finder, recorder.lane()  # which holds it too
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
