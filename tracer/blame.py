"""Tell the tracer's own errors from the job's."""

from __future__ import annotations

import os
from pathlib import Path

OURS = str(Path(__file__).parent)
LIBRARY = f"{Path(os.__file__).parent}{os.sep}"
INSTALLED = ("site-packages", "dist-packages")


def is_ours(exc: BaseException) -> bool:
    """Return whether ``exc`` was raised by the tracer's own code, or by what that code calls.

    While the tracer's lines run, a signal handler of the job may run too and
    raise. Such an exception belongs to the job and must reach it. It is told
    by its innermost frame outside the standard library, which both sides call:
    a handler has one, outside this package.
    """
    traceback = exc.__traceback__
    file_name = OURS
    while traceback is not None:
        called = traceback.tb_frame.f_code.co_filename
        if not _in_library(called):
            file_name = called
        traceback = traceback.tb_next
    return file_name.startswith(OURS) or "/torch/" in file_name


def _in_library(file_name: str) -> bool:
    if file_name.startswith("<frozen "):
        return True
    rest = file_name.removeprefix(LIBRARY)
    return rest != file_name and not any(place in rest for place in INSTALLED)
