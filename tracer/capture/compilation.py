"""Compilations by `torch.compile`: a span and an event each. No graph break is added."""

from __future__ import annotations

import functools
import sys
import threading
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from ..span import SpanKind
from .compiled_graphs import tell_compiler
from .guard import Guard
from .uncompiled import Uncompiled

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..patches import Patches
    from ..record.recorder import Recorder

DYNAMO_MODULE = "torch._dynamo.callback"


class _Begun(threading.local):
    start_ns = 0


class Compilations:
    """Hears from the compiler when a compilation begins and ends."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._guard = Guard(recorder, "compilation")
        self._begun = _Begun()
        self._uncompiled = Uncompiled()

    def ask(self) -> bool:
        """Ask the compiler to tell us, where it is loaded; always False: to be called again."""
        if DYNAMO_MODULE not in sys.modules or not self._guard.active:
            return False
        try:
            tell_compiler()
            self._uncompiled.mark()
            handler = sys.modules[DYNAMO_MODULE].callback_handler
            if self.begins not in handler.start_callbacks:
                handler.register_start_callback(self.begins)
                handler.register_end_callback(self.ends)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self._guard.fail(problem)
        return False

    def stop(self) -> None:
        """Ask no more."""
        handler = getattr(sys.modules.get(DYNAMO_MODULE), "callback_handler", None)
        if handler is not None and self.begins in handler.start_callbacks:
            handler.remove_start_callback(self.begins)
            handler.remove_end_callback(self.ends)

    def begins(self, *about: Any) -> None:  # noqa: ANN401 - nothing before torch 2.7
        """Hear that a compilation begins."""
        self._begun.start_ns = monotonic_ns()

    def ends(self, *about: Any) -> None:  # noqa: ANN401
        """Hear that it has ended."""
        self._guard.call(self._note, about[0] if about else None)

    def _note(self, about: object) -> None:
        start_ns, self._begun.start_ns = self._begun.start_ns, 0
        if not start_ns:
            return
        end_ns = monotonic_ns()
        compile_id = str(getattr(about, "compile_id", "") or "")
        trigger = getattr(getattr(about, "callback_trigger", None), "name", "")
        name = "recompile" if is_again(compile_id) else "compile"
        self._recorder.append_span(name, SpanKind.HOST, start_ns, end_ns)
        self._recorder.event(
            "compilation",
            f"{name} {compile_id}".strip(),
            {
                "compile_id": compile_id,
                "trigger": trigger.lower(),
                "duration_ns": end_ns - start_ns,
                "step": self._recorder.step_number,
            },
        )


def is_again(compile_id: str) -> bool:
    """Return whether ``frame/count`` says that the frame was compiled before."""
    count = compile_id.rpartition("/")[2].partition("_")[0]
    return count.isdigit() and int(count) > 0


def capture_compilations(recorder: Recorder, patches: Patches) -> Callable[[], None]:
    """Record each compilation from the first on.

    The compiler is loaded late, often by `torch.compile` itself, and
    ``torch._dynamo.reset`` forgets who listens: so we ask again there and at
    each step.

    Returns:
        A function that takes the callbacks off again.
    """
    compilations = Compilations(recorder)
    ask = compilations.ask

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:  # noqa: A001, ANN401
            compiled = original(*args, **kwargs)
            ask()
            return compiled

        return compile

    ask()
    recorder.on_step_begin(ask)
    patches.wrap(sys.modules["torch"], "compile", wrap)
    return compilations.stop
