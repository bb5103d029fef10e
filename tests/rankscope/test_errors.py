from __future__ import annotations

from pathlib import Path

import pytest

from rankscope.analysis.trace.errors import CycleError, UnknownRunError
from rankscope.collector.errors import StoreHeldError, StoreQueryError
from rankscope.errors import BadInputError, FailedError, find_exit_code, format_error
from rankscope.tracer.spool import SpoolVersionError
from rankscope.trainer.errors import FaultSpecError


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadInputError("x"), 2),
        (FailedError("x"), 1),
        (UnknownRunError("x", ()), 2),
        (CycleError(3), 1),
        (StoreHeldError(Path("/x"), holder_pid=1, holder_url=None), 2),
        (StoreQueryError("x"), 1),
        (SpoolVersionError(Path("/x"), 9), 2),
        (FaultSpecError("x", "y"), 2),
        (PermissionError(13, "Permission denied", "/x"), 1),
        (ValueError("a defect"), None),
    ],
)
def test_each_failure_has_an_exit_status(error: Exception, code: int | None) -> None:
    assert find_exit_code(error) == code


def test_the_text_of_a_failure_is_one_line() -> None:
    assert format_error(FailedError("first\n  second")) == "first second"
    assert format_error(PermissionError(13, "Permission denied", "/x")) == "Permission denied: /x"


def test_a_file_name_cannot_add_a_line_or_colour_the_terminal() -> None:
    name = "/x\r\n\x1b[31mrankscope: all is well"

    assert format_error(BadInputError(name)) == r"/x \x1b[31mrankscope: all is well"
    assert format_error(PermissionError(13, "Denied", name)) == (
        r"Denied: /x\r\n\x1b[31mrankscope: all is well"
    )
