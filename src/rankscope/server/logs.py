"""What the server says while it runs: one line an event, for a person or for a program.

Nothing that came from outside can break a line, colour a terminal or show a secret: what is
not printable is written as its escape, and what looks like a token is masked.
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
    # A token of the file: its id is no secret and says which one to revoke.
    (re.compile(r"(rst_[0-9a-f]{12})_[A-Za-z0-9_-]+"), r"\1_***"),
    (re.compile(r"(?i)([?&](?:token|password)=)[^&\s\"']+"), r"\1***"),
    (re.compile(r"(://[^/\s:@]*:)[^/\s@]+@"), r"\1***@"),
)
MESSAGE = "message"
LOGGED = "logged"
UNREACHABLE = "store-unreachable"
UNREACHABLE_EVERY_S = 60.0
DRIVER = "clickhouse_connect."
CONNECTIONS = "urllib3."
DRIVER_FAILED = "Unexpected Http Driver Exception"
"""What the store's driver logs, without more, before it raises; the one that asked tells why."""

RETRYING = "Retrying"


class Log:
    """Writes events.

    Args:
        stream: Where to; None: stderr as it is at each line.
        as_json: Whether as JSON documents, one a line; else as text.
        secrets: Texts that are never written, whatever they stand in.
    """

    def __init__(
        self, stream: TextIO | None = None, *, as_json: bool = False, secrets: Iterable[str] = ()
    ) -> None:
        self._stream = stream
        self.as_json = as_json
        """Whether a program reads it."""
        self._secrets = tuple(secret for secret in secrets if secret)

    def hide(self, secret: str) -> None:
        """Never write a text from now on."""
        self._secrets = (*self._secrets, secret)

    def tell(self, event: str, fields: Mapping[str, object]) -> None:
        """Write an event with its fields; those that are None are left out."""
        known = {name: self._safe(value) for name, value in fields.items() if value is not None}
        if self.as_json:
            at = datetime.now(UTC).isoformat(timespec="milliseconds")
            self._write(json.dumps({"at": at, "event": event, **known}))
        else:
            words = [f"{name}={_word(value)}" for name, value in known.items()]
            self._write(f"rankscope: {' '.join([event, *words])}")

    def say(self, line: str) -> None:
        """Write a plain line for a person."""
        if self.as_json:
            self.tell(MESSAGE, {"text": line})
        else:
            self._write(f"rankscope: {self._safe(line)}")

    def _safe(self, value: object) -> object:
        if isinstance(value, bool | int | float):
            return value
        return printable(self._masked(str(value)))

    def _masked(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        for form, instead in SECRETS:
            text = form.sub(instead, text)
        return text

    def _write(self, line: str) -> None:
        stream = self._stream or sys.stderr
        stream.write(line + "\n")
        stream.flush()


class LogHandler(logging.Handler):
    """Brings what libraries log, tracebacks too, into the one log.

    While the store's server is away, its driver logs two lines for each try, one of them with the
    whole address; one event a minute says how many tries failed instead.

    Args:
        log: Takes it.
        monotonic_s: Clock for that minute.
    """

    def __init__(self, log: Log, *, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._log = log
        self._monotonic_s = monotonic_s
        self._num_failed = 0
        self._next_s: float | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Tell a record as one event."""
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
                # Where it failed and as what; an error's text may hold whatever was sent.
                fields["error"] = type(record.exc_info[1]).__name__
                frames = traceback.extract_tb(record.exc_info[2])
                fields["where"] = " < ".join(
                    f"{frame.filename}:{frame.lineno}" for frame in reversed(frames[-6:])
                )
            self._log.tell(LOGGED, fields)
        except Exception:  # noqa: BLE001  # a log that fails must not end what it tells of
            self.handleError(record)

    def _count_failure(self) -> None:
        # A handler's lock is held while it emits, so no other thread counts meanwhile.
        self._num_failed += 1
        now_s = self._monotonic_s()
        if self._next_s is None or now_s >= self._next_s:
            self._log.tell(UNREACHABLE, {"failed_tries": self._num_failed})
            self._num_failed, self._next_s = 0, now_s + UNREACHABLE_EVERY_S


@contextmanager
def logged_to(log: Log) -> Iterator[Log]:
    """Send everything that is said in this process to ``log`` while the block runs."""
    handler = LogHandler(log)
    root = logging.getLogger()
    root.addHandler(handler)
    before = terminal.said_by(log.say)
    try:
        yield log
    finally:
        terminal.said_by(before)
        root.removeHandler(handler)


def _word(value: object) -> str:
    text = str(value)
    is_plain = text and not any(letter in ' "=' for letter in text)
    return text if is_plain else json.dumps(text, ensure_ascii=False)
