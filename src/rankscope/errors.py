"""Errors of the command, and the exit status of each failure."""

from __future__ import annotations

from rankscope.analysis.trace.errors import AnalysisError, CycleError
from rankscope.collector.errors import CollectorError, StoreClosedError, StoreQueryError
from rankscope.tracer.spool import SpoolError
from rankscope.trainer.errors import ConfigError

from .terminal.lines import printable

FAILED = 1
"""Exit status: the command could not do its work, or the demo did not find its fault."""

BAD_INPUT = 2
"""Exit status: a flag, a file or the environment must be corrected first."""


class CommandError(Exception):
    """Base of the errors of the command. The text is one line that says what to do."""

    exit_code = FAILED


class FailedError(CommandError):
    """The command could not do its work."""


class BadInputError(CommandError):
    """A flag, a file or the environment must be corrected first."""

    exit_code = BAD_INPUT


EXIT_CODES: tuple[tuple[type[Exception], int], ...] = (
    (StoreQueryError, FAILED),
    (StoreClosedError, FAILED),
    (CycleError, FAILED),
    (CollectorError, BAD_INPUT),
    (AnalysisError, BAD_INPUT),
    (SpoolError, BAD_INPUT),
    (ConfigError, BAD_INPUT),
    (OSError, FAILED),
    (ImportError, FAILED),
)
"""The exit status of an error is that of the first row whose type matches."""


def find_exit_code(error: Exception) -> int | None:
    """Return the exit status of an expected failure; None for a defect of rankscope."""
    if isinstance(error, CommandError):
        return error.exit_code
    return next((code for kind, code in EXIT_CODES if isinstance(error, kind)), None)


def format_error(error: Exception) -> str:
    """Return the error's text on one line, with invisible characters escaped."""
    if isinstance(error, OSError) and error.strerror:
        place = f": {error.filename}" if error.filename else ""
        return printable(f"{error.strerror}{place}")
    return printable(" ".join(str(error).split()))
