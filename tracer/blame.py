"""Tell the tracer's own errors from the job's."""

from __future__ import annotations

from pathlib import Path

OURS = str(Path(__file__).parent)


def is_ours(exc: BaseException) -> bool:
    """Return whether ``exc`` was raised by the tracer's own code, or by what that code calls.

    While the tracer's lines run, a signal handler of the job may run too and
    raise. Such an exception belongs to the job and must reach it. It is told
    by its innermost Python frame: a handler has one, outside this package;
    what the tracer calls on its hot paths is C, which has none.
    """
    traceback = exc.__traceback__
    if traceback is None:
        return True
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    file_name = traceback.tb_frame.f_code.co_filename
    return file_name.startswith(OURS) or "/torch/" in file_name
