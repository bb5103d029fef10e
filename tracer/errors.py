"""Tell the tracer's own errors from the job's."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from types import FunctionType, MethodType

PACKAGE_FOLDER = str(Path(__file__).parent)
LIBRARY = f"{Path(os.__file__).parent}{os.sep}"
INSTALLED = ("site-packages", "dist-packages")


def is_tracer_error(exc: BaseException) -> bool:
    """Return whether ``exc`` was raised by the tracer's own code, or by what that code calls.

    While the tracer's lines run, a signal handler of the job may run too and
    raise. Such an exception belongs to the job and must reach it. It is told
    by the handler's frame; where the handler is no plain function, or has been
    replaced since, by the innermost frame outside the standard library, which
    both sides call: a handler has one, outside this package.
    """
    traceback = exc.__traceback__
    file_name = PACKAGE_FOLDER
    handlers = _handlers()
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if id(code) in handlers:
            return False
        if not _in_library(code.co_filename):
            file_name = code.co_filename
        traceback = traceback.tb_next
    return file_name.startswith(PACKAGE_FOLDER) or "/torch/" in file_name


def _handlers() -> set[int]:
    """Return the ids of the code that signals run now.

    Torch has a handler of its own, which raises where a worker of a data loader has died.
    """
    codes = set()
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if type(handler) is MethodType:
            handler = handler.__func__
        if type(handler) is FunctionType:
            codes.add(id(handler.__code__))
    return codes


def _in_library(file_name: str) -> bool:
    if file_name.startswith("<frozen "):
        return True
    rest = file_name.removeprefix(LIBRARY)
    return rest != file_name and not any(place in rest for place in INSTALLED)


def print_notice(text: str) -> None:
    """Write a line to stderr; where the job has closed or lost its stderr, nobody is told."""
    line = f"rankscope: {text}\n"
    with contextlib.suppress(Exception):
        own = sys.__stderr__
        if own is None or sys.stderr is not own:
            sys.stderr.write(line)
            return
        # Past its buffer: what cannot be written, to a log on a full disk, would stay in it,
        # and a process that cannot empty it at its end exits with 120.
        os.write(own.fileno(), line.encode("utf-8", "replace"))
