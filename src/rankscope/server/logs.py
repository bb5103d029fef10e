"""Log of a server: one line for each event, as text or as JSON.

Text from outside cannot break a line, colour a terminal or expose a secret: invisible characters
are escaped, and tokens and passwords are masked.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import traceback
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TextIO

from ..terminal import lines as terminal
from ..terminal.lines import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

SECRETS = (
    (re.compile(r"(?i)((?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}"), r"\1***"),
    # The id of a token is not secret, and shows which token to revoke.
    (re.compile(r"(rst_[0-9a-f]{12})_[A-Za-z0-9_-]+"), r"\1_***"),
    (re.compile(r"(?i)([?&](?:token|password)=)[^&\s\"']+"), r"\1***"),
    (re.compile(r"(://[^/\s:@]*:)[^/\s@]+@"), r"\1***@"),
)
MESSAGE = "message"
LOGGED = "logged"
UNREACHABLE = "store-unreachable"
UNREACHABLE_PAUSE_S = 60.0
DRIVER = "clickhouse_connect."
CONNECTIONS = "urllib3."
DRIVER_FAILED = "Unexpected Http Driver Exception"
"""Message that the driver of the store logs before it raises an error, which the caller logs."""

RETRYING = "Retrying"


class Log:
    """A log of events.

    Args:
        stream: Destination. None: the current stderr at each line.
        as_json: Whether each line is a JSON document instead of text.
        secrets: Texts that are masked wherever they occur.
    """

    def __init__(
        self, stream: TextIO | None = None, *, as_json: bool = False, secrets: Iterable[str] = ()
    ) -> None:
        self._stream = stream
        self.as_json = as_json
        """Whether each line is a JSON document."""
        self._secrets = tuple(secret for secret in secrets if secret)

    def hide(self, secret: str) -> None:
        """Mask a text from now on."""
        self._secrets = (*self._secrets, secret)

    def write_event(self, event: str, fields: Mapping[str, object]) -> None:
        """Write an event with those of its fields that are not None."""
        known = {name: self._safe(value) for name, value in fields.items() if value is not None}
        if self.as_json:
            at = datetime.now(UTC).isoformat(timespec="milliseconds")
            self._write(json.dumps({"at": at, "event": event, **known}))
        else:
            words = [f"{name}={_quoted(value)}" for name, value in known.items()]
            self._write(f"rankscope: {' '.join([event, *words])}")

    def write_line(self, line: str) -> None:
        """Write a line of text."""
        if self.as_json:
            self.write_event(MESSAGE, {"text": line})
        else:
            self._write(f"rankscope: {self._safe(line)}")

    def _safe(self, value: object) -> object:
        if isinstance(value, bool | int | float):
            return value
        text = str(value)
        for secret in self._secrets:
            text = text.replace(secret, "***")
        for form, instead in SECRETS:
            text = form.sub(instead, text)
        return printable(text)

    def _write(self, line: str) -> None:
        stream = self._stream or sys.stderr
        stream.write(line + "\n")
        stream.flush()


class LogHandler(logging.Handler):
    """Handler that passes the log records of libraries, tracebacks included, to the log.

    If the store's server cannot be reached, its driver logs two lines for each attempt, one of
    them with the whole address. One event per minute with the number of attempts replaces them.

    Args:
        monotonic_s: Clock for that minute.
    """

    def __init__(self, log: Log, *, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._log = log
        self._monotonic_s = monotonic_s
        self._num_failed = 0
        self._next_s: float | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record as one event."""
        try:
            if record.name.startswith(CONNECTIONS) and str(record.msg).startswith(RETRYING):
                return
            if record.name.startswith(DRIVER) and record.msg == DRIVER_FAILED:
                self._count_failure()
                return
            fields: dict[str, object] = {
                "level": record.levelname.lower(),
                "logger": record.name,
                "text": record.getMessage(),
            }
            if record.exc_info and record.exc_info[1] is not None:
                # Type and place only: the text of an error may contain data from a request.
                fields["error"] = type(record.exc_info[1]).__name__
                frames = traceback.extract_tb(record.exc_info[2])
                fields["where"] = " < ".join(
                    f"{frame.filename}:{frame.lineno}" for frame in reversed(frames[-6:])
                )
            self._log.write_event(LOGGED, fields)
        except Exception:  # noqa: BLE001  # a failing log must not end the program
            self.handleError(record)

    def _count_failure(self) -> None:
        # The handler holds its lock while it emits, so no other thread counts at the same time.
        self._num_failed += 1
        now_s = self._monotonic_s()
        if self._next_s is None or now_s >= self._next_s:
            self._log.write_event(UNREACHABLE, {"failed_tries": self._num_failed})
            self._num_failed, self._next_s = 0, now_s + UNREACHABLE_PAUSE_S


@contextmanager
def log_lines(log: Log) -> Iterator[Log]:
    """Send the lines of `say` and the records of libraries to the log until the block ends."""
    handler = LogHandler(log)
    root = logging.getLogger()
    root.addHandler(handler)
    before = terminal.redirect_lines(log.write_line)
    try:
        yield log
    finally:
        terminal.redirect_lines(before)
        root.removeHandler(handler)


def _quoted(value: object) -> str:
    text = str(value)
    is_plain = text and not any(letter in ' "=' for letter in text)
    return text if is_plain else json.dumps(text, ensure_ascii=False)
