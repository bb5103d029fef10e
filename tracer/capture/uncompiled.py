"""Keep the compiler away from the tracer's own functions.

Where `torch.compile` gives a function up halfway (a graph break inside a
``with``), it runs it plainly and compiles what that calls instead: our kernels
and hooks too, with graph breaks, recompilations and seconds that the job would
not have without us.
"""

from __future__ import annotations

import functools
import sys
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import PACKAGE_FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = "rankscope.tracer."
AROUND = tuple(PACKAGE + name for name in ("capture.", "integrations.", "decorator", "__main__"))
"""Modules whose functions call the job's; what those call is compiled as ever."""

ENGINE_MODULE = "torch._C._dynamo.eval_frame"


class Uncompiled:
    """Marks what Python runs of us as not to be compiled, each module once."""

    def __init__(self) -> None:
        """Prepare."""
        self._marked: set[str] = set()
        self._num_modules = 0

    def mark(self) -> None:
        """Mark the modules of ours that are loaded by now."""
        engine: Any = sys.modules.get(ENGINE_MODULE)
        if engine is None or self._num_modules == len(sys.modules):
            return  # nobody compiles, or none of ours has come since
        self._num_modules = len(sys.modules)
        for name, module in list(sys.modules.items()):
            if name in self._marked or not name.startswith(PACKAGE) or module is None:
                continue
            self._marked.add(name)
            for code in codes_of(module):
                _skip(engine, code, calls_the_job=name.startswith(AROUND))


def _skip(engine: Any, code: CodeType, *, calls_the_job: bool) -> None:  # noqa: ANN401 - untyped
    """Have the compiler run ``code`` as it stands, and what that calls unless it is the job's."""
    if hasattr(engine, "set_code_exec_strategy"):
        skip, default = engine._FrameAction.SKIP, engine._FrameAction.DEFAULT
        below = default if calls_the_job else skip
        engine.set_code_exec_strategy(code, engine._FrameExecStrategy(skip, below))
    elif hasattr(engine, "skip_code"):  # torch before 2.8: what it calls is marked by itself
        engine.skip_code(code)


def codes_of(module: ModuleType) -> Iterator[CodeType]:
    """Yield the code of every function that a module of ours defines, nested ones too."""
    for member in list(vars(module).values()):
        members = list(vars(member).values()) if isinstance(member, type) else [member]
        for one in members:
            yield from _nested(_code_of(one))


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
