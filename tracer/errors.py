"""Errors inside the tracer: whether they are the tracer's or the job's, and notices to the user.

Promise 1 (harmless): the tracer counts its own errors and raises the job's. The rooms of the
tracer share this module; it imports none of them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from types import FunctionType, MethodType

PACKAGE_FOLDER = str(Path(__file__).parent)
STDLIB_FOLDER = f"{Path(os.__file__).parent}{os.sep}"
SITE_FOLDERS = ("site-packages", "dist-packages")


def is_tracer_error(exc: BaseException) -> bool:
    """Return whether the tracer's code, or code that it called, raised ``exc``.

    A signal handler of the job may run while the tracer's code does. What it raises belongs to
    the job and must reach it. Such an exception has the handler's frame in its traceback. If the
    handler is not a plain function, or was replaced since, the innermost frame outside the
    standard library decides, which the tracer and handlers both call: a handler has such a frame
    outside this package.
    """
    traceback = exc.__traceback__
    file_name = PACKAGE_FOLDER
    handlers = _handler_code_ids()
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if id(code) in handlers:
            return False
        if not _is_in_stdlib(code.co_filename):
            file_name = code.co_filename
        traceback = traceback.tb_next
    return file_name.startswith(PACKAGE_FOLDER) or "/torch/" in file_name


def print_notice(text: str) -> None:
    """Write one line to stderr; do nothing if the job has closed or lost its stderr."""
    line = f"rankscope: {text}\n"
    with contextlib.suppress(Exception):
        stderr = sys.__stderr__
        if stderr is None or sys.stderr is not stderr:
            sys.stderr.write(line)
            return
        # Past the buffer: on a full disk unwritten text would stay in it, and a process that
        # cannot flush stderr at its end exits with status 120.
        os.write(stderr.fileno(), line.encode("utf-8", "replace"))


def _handler_code_ids() -> set[int]:
    """Return the ids of the code objects of the present signal handlers.

    Torch installs one too: it raises if a worker of a data loader has died.
    """
    codes = set()
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if type(handler) is MethodType:
            handler = handler.__func__
        if type(handler) is FunctionType:
            codes.add(id(handler.__code__))
    return codes


def _is_in_stdlib(file_name: str) -> bool:
    if file_name.startswith("<frozen "):
        return True
    rest = file_name.removeprefix(STDLIB_FOLDER)
    return rest != file_name and not any(folder in rest for folder in SITE_FOLDERS)
