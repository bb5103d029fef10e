"""Compilation by `torch.compile`: spans of it, and the tracer's functions in compiled code.

The compiler cannot look into a manual span, which is a compiled function already: it would break
the job's graph (an error with ``fullgraph=True``) even if nothing is traced. So a manual span in a
compiled graph is replaced by nothing. Functions that report a step must be called each time: they
break the graph if a tracer is installed, once and without a warning, which a job may have made an
error.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from time import monotonic_ns
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import PACKAGE_FOLDER
from ..record.current import span
from ..record.recorder import Recorder
from ..span import SpanKind
from .after_import import after_import
from .guard import Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..patches import Patches

COMPILER_MODULE = "torch._dynamo"

DYNAMO_MODULE = "torch._dynamo.callback"

PACKAGE = "rankscope.tracer."

CALLS_JOB = tuple(
    PACKAGE + name for name in ("capture.", "integrations.", "record.current", "__main__")
)
"""Modules of the tracer whose functions call functions of the job. Those are compiled as usual."""

ENGINE_MODULE = "torch._C._dynamo.eval_frame"

CALL_OUTSIDE = "the tracer's step functions cannot be compiled: call them outside of compiled code"


_replaced: set[object] = set()
"""Functions with a replacement in the compiler, which stays for the life of the process."""


class _ThreadState(threading.local):
    start_ns = 0


class Compilations:
    """Records the compilations that the compiler reports."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._guard = Guard(recorder, "compilation")
        self._thread_state = _ThreadState()
        self._uncompiled = CompilerExclusions()
        self._num_modules = 0

    def register(self) -> bool:
        """Register with the compiler if it is imported; always return False, to be called again."""
        if DYNAMO_MODULE not in sys.modules or not self._guard.active:
            return False
        try:
            handler = sys.modules[DYNAMO_MODULE].callback_handler
            is_registered = self.on_begin in handler.start_callbacks
            if is_registered and self._num_modules == len(sys.modules):
                return False
            self._num_modules = len(sys.modules)
            replace_span()
            self._uncompiled.mark()
            if not is_registered:
                handler.register_start_callback(self.on_begin)
                handler.register_end_callback(self.on_end)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self._guard.fail(problem)
        return False

    def stop(self) -> None:
        """Remove the callbacks."""
        handler = getattr(sys.modules.get(DYNAMO_MODULE), "callback_handler", None)
        if handler is not None and self.on_begin in handler.start_callbacks:
            handler.remove_start_callback(self.on_begin)
            handler.remove_end_callback(self.on_end)

    def on_begin(self, *about: Any) -> None:  # noqa: ANN401 - nothing before torch 2.7
        """Handle the begin of a compilation."""
        self._thread_state.start_ns = monotonic_ns()

    def on_end(self, *about: Any) -> None:  # noqa: ANN401
        """Handle the end of a compilation."""
        self._guard.call(self._record, about[0] if about else None)

    def _record(self, about: object) -> None:
        start_ns, self._thread_state.start_ns = self._thread_state.start_ns, 0
        if not start_ns:
            return
        end_ns = monotonic_ns()
        compile_id = str(getattr(about, "compile_id", "") or "")
        trigger = getattr(getattr(about, "callback_trigger", None), "name", "")
        name = "recompile" if is_recompile(compile_id) else "compile"
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


def is_recompile(compile_id: str) -> bool:
    """Return whether ``frame/count`` says that the frame was compiled before."""
    count = compile_id.rpartition("/")[2].partition("_")[0]
    return count.isdigit() and int(count) > 0


def capture_compilations(
    recorder: Recorder, patches: Patches, on_function: Callable[[], None]
) -> Callable[[], None]:
    """Record each compilation from the first one on.

    The compiler is imported late, often by `torch.compile` itself, and ``torch._dynamo.reset``
    removes the callbacks. So they are registered again after `torch.compile` and at each step.

    Args:
        on_function: Called before `torch.compile` gets something that is no module.

    Returns:
        A function that removes the callbacks.
    """
    compilations = Compilations(recorder)
    register = compilations.register

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:  # noqa: A001, ANN401
            if not isinstance(args[0] if args else None, sys.modules["torch"].nn.Module):
                on_function()
            compiled = original(*args, **kwargs)
            register()
            return compiled

        return compile

    register()
    recorder.on_step_begin(register)
    patches.wrap(sys.modules["torch"], "compile", wrap)
    return compilations.stop


class CompilerExclusions:
    """Excludes the tracer's functions from compilation, each module once.

    If `torch.compile` gives up a function halfway (a graph break inside a ``with``), it runs that
    function uncompiled and compiles the functions that it calls: the tracer's kernels and hooks
    too. That would cost the job graph breaks, recompilations and seconds.
    """

    def __init__(self) -> None:
        self._marked: set[str] = set()

    def mark(self) -> None:
        """Exclude the modules of the tracer that are imported by now."""
        engine: Any = sys.modules.get(ENGINE_MODULE)
        if engine is None:
            return  # no compiler
        for name, module in list(sys.modules.items()):
            if name in self._marked or not name.startswith(PACKAGE) or module is None:
                continue
            self._marked.add(name)
            for code in iterate_code(module):
                _skip(engine, code, calls_the_job=name.startswith(CALLS_JOB))


def _skip(engine: Any, code: CodeType, *, calls_the_job: bool) -> None:  # noqa: ANN401 - untyped
    """Exclude ``code`` from compilation, and also what it calls unless that is the job's."""
    if hasattr(engine, "set_code_exec_strategy"):
        skip, default = engine._FrameAction.SKIP, engine._FrameAction.DEFAULT
        below = default if calls_the_job else skip
        engine.set_code_exec_strategy(code, engine._FrameExecStrategy(skip, below))
    elif hasattr(engine, "skip_code"):  # torch before 2.8: called functions are marked separately
        engine.skip_code(code)


def iterate_code(module: ModuleType) -> Iterator[CodeType]:
    """Yield the code of each function of a module of the tracer, nested ones too."""
    for member in list(vars(module).values()):
        members = list(vars(member).values()) if isinstance(member, type) else [member]
        for attribute in members:
            yield from _nested(_code_of(attribute))


def _code_of(member: object) -> CodeType | None:
    if isinstance(member, property):
        member = member.fget
    elif isinstance(member, functools.cached_property):
        member = member.func
    elif isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    member = getattr(member, "__wrapped__", member)
    return member.__code__ if isinstance(member, FunctionType) else None


def _nested(code: CodeType | None) -> Iterator[CodeType]:
    if code is None or not code.co_filename.startswith(PACKAGE_FOLDER):
        return
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def no_span(
    name: object, kind: object = None, microbatch: object = None, chunk: object = None
) -> contextlib.AbstractContextManager[None]:
    """Return the compiler's replacement of `tracer.span`, which compiles to nothing."""
    return contextlib.nullcontext()


def replace_span() -> None:
    """Register `no_span` with the compiler if it is imported; a second call does nothing."""
    replace = getattr(sys.modules.get(COMPILER_MODULE), "substitute_in_graph", None)
    if replace is not None and span not in _replaced:
        replace(span)(no_span)
        _replaced.add(span)


for method in (
    Recorder.begin_steps,
    Recorder.step,
    Recorder.microbatch,
    Recorder.event,
    Recorder.record_exception,
    Recorder.shutdown,
):  # as `torch.compiler.disable` does, without importing the compiler
    setattr(method, "_torchdynamo_disable", True)  # noqa: B010 - the type has no such attribute
    setattr(method, "_torchdynamo_disable_msg", CALL_OUTSIDE)  # noqa: B010


after_import(COMPILER_MODULE, replace_span)
