"""What the command raises, and which exit status each failure has."""

from __future__ import annotations

from rankscope.analysis.trace.errors import AnalysisError, CycleError
from rankscope.collector.errors import CollectorError, StoreClosedError, StoreQueryError
from rankscope.tracer.spool import SpoolError
from rankscope.trainer.errors import ConfigError

from .terminal.lines import printable

FAILED = 1
"""Exit status: what was asked for could not be done, or did not come out."""

BAD_INPUT = 2
"""Exit status: the flags, the files or the environment must change first."""


class CommandError(Exception):
    """Base of what the command raises; the text is one plain line that says what to do."""

    exit_code = FAILED


class FailedError(CommandError):
    """What was asked for failed."""


class BadInputError(CommandError):
    """A flag, a file or the environment is not what the command needs."""

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
)
"""The first row that an error is an instance of says its exit status."""


def exit_code_of(error: Exception) -> int | None:
    """Return the exit status of an expected failure; None for an error that is a defect."""
    if isinstance(error, CommandError):
        return error.exit_code
    return next((code for kind, code in EXIT_CODES if isinstance(error, kind)), None)


def plain_line(error: Exception) -> str:
    """Return the error's text on one line; what can't be seen of it is escaped."""
    if isinstance(error, OSError) and error.strerror:
        place = f": {error.filename}" if error.filename else ""
        return printable(f"{error.strerror}{place}")
    return printable(" ".join(str(error).split()))
