"""JSON files of other programs: whole, or as the events of a trace of any size.

Of a trace each value is parsed and handed over before the next piece of the file is read, so that
the memory is that of the pieces and of what the caller keeps.
"""

from __future__ import annotations

import codecs
import gzip
import json
import os
import re
import zlib
from typing import IO, TYPE_CHECKING, Any, cast

from rankscope.tracer.spool import open_regular_file

from ..errors import NotATraceError, TraceError
from .foreign_formats import GZIP_MAGIC, describe_format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MAX_BYTES = 1 << 30
"""Of a decompressed file; its values take some ten times as much memory."""

PIECE_BYTES = 1 << 20

MAX_VALUE_CHARS = 64 << 20
"""Of one event, or of another member of the document: groups of a large job have some MB."""

MAX_RATIO = 100
"""Decompressed over compressed size; of a trace it is 10 to 40."""

MAX_PARSED_RATIO = 20
"""Memory of a parsed value over size of its text; of an event it is some 5."""

FREE_BYTES = 64 << 20
"""Memory that a small value may take whatever its ratio: lists of ranks alone have a high one."""

EVENTS = "traceEvents"
PHASE = '"ph"'
"""A member that each event has."""

SPACE = re.compile(r"[ \t\n\r]*")
SEPARATOR = re.compile(r"[ \t\n\r]*,[ \t\n\r]*(?=[^ \t\n\r])")
SCAN: Callable[[str, int], tuple[Any, int]] = vars(json.JSONDecoder(strict=False))["scan_once"]
"""Parses the value at a place of a text, and returns also its end."""


def open_unpacked(path: Path) -> tuple[IO[bytes], IO[bytes], int]:
    """Open a file that may be compressed by gzip, whatever its name.

    Returns:
        Its content, its bytes on disk, which may be the same, and their number.

    Raises:
        OSError: It can't be opened, or is no regular file.
    """
    packed = os.fdopen(open_regular_file(path), "rb")
    size = os.fstat(packed.fileno()).st_size
    is_gzip = packed.read(len(GZIP_MAGIC)) == GZIP_MAGIC
    packed.seek(0)
    return (cast("IO[bytes]", gzip.GzipFile(fileobj=packed)) if is_gzip else packed), packed, size


class EventStream:
    """The events of a trace, and the other members of its document.

    Args:
        path: A file of JSON, which may be compressed by gzip.
        show: Called with the share of the file that was read, from time to time.
    """

    def __init__(self, path: Path, *, show: Callable[[float], object] = lambda _: None) -> None:
        self.members: dict[str, Any] = {}
        """All but the events, complete after the last event."""

        self.has_events = False
        self._path = path
        self._show = show
        self._text = ""
        self._at = 0
        self._is_whole = False
        self._num_bytes = 0
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")

    def __iter__(self) -> Iterator[Any]:
        """Yield each event, of any JSON type.

        Raises:
            NotATraceError: It is no JSON object.
            TraceError: It can't be read, or not within the limits.
        """
        try:
            self._file, self._packed, self._size = open_unpacked(self._path)
        except OSError as error:
            raise TraceError(self._path, f"can't be read ({error})") from None
        with self._packed:
            if self._next_char() != "{":
                reason = describe_format(self._path) or (
                    f"is no JSON object of torch.profiler: it begins with {self._text[:16]!r}"
                )
                raise NotATraceError(self._path, reason)
            self._at += 1
            while self._next_char() == '"':
                key = self._value()
                self._expect(":")
                if key == EVENTS and self._next_char() == "[":
                    self.has_events = True
                    yield from self._elements()
                else:
                    self.members[key] = self._value()
                if self._next_char() == ",":
                    self._at += 1
            self._expect("}")

    def _elements(self) -> Iterator[Any]:
        self._at += 1
        while self._next_char() != "]":
            yield from self._elements_of_piece()
            self._read_on()
            yield self._value()
            if self._next_char() == ",":
                self._at += 1
            elif self._next_char() != "]":
                raise self._error("there is no comma after an event")
        self._at += 1

    def _elements_of_piece(self) -> Iterator[Any]:
        """Yield the elements that are whole in this piece, up to the last: most take this path.

        The last is not tried: an error of the scanner counts the lines of the whole piece.
        """
        text, at = self._text, self._at
        last = text.rfind("{", at, max(text.rfind(PHASE, at), at))
        try:
            while at < last or last <= self._at:
                value, end = SCAN(text, at)
                separator = SEPARATOR.match(text, end)
                if separator is None:
                    break
                at = separator.end()
                yield value
        except (StopIteration, ValueError, RecursionError):
            pass  # `_value` finds out why, once it has more of the text
        self._at = at

    def _value(self) -> Any:  # noqa: ANN401  # of any JSON type
        """Return the value at this place, and move behind it."""
        self._next_char()
        while True:
            try:
                value, end = SCAN(self._text, self._at)
            except (StopIteration, ValueError) as error:
                if not self._read_on():
                    reason = "it is cut off" if isinstance(error, StopIteration) else str(error)
                    raise self._error(reason) from None
            except RecursionError:
                raise self._error("it is nested too deeply") from None
            else:
                if end < len(self._text) or not self._read_on():  # a number may go on
                    self._at = end
                    return value

    def _next_char(self) -> str:
        """Move to the next character that is no space, and return it; "" at the end."""
        while True:
            self._at = SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_on():
                return ""

    def _expect(self, char: str) -> None:
        if self._next_char() != char:
            raise self._error(f"{char!r} is missing" if self._text[self._at :] else "it is cut off")
        self._at += 1

    def _read_on(self) -> bool:
        """Append a further piece, as long as the text that is not yet parsed; False at the end."""
        if self._is_whole:
            return False
        rest = self._text[self._at :]
        if len(rest) > MAX_VALUE_CHARS:
            raise self._error(f"a value has more than {MAX_VALUE_CHARS:,} characters")
        if len(rest) > PIECE_BYTES and _parsed_bytes(rest) > max(
            MAX_PARSED_RATIO * len(rest), FREE_BYTES
        ):
            raise TraceError(
                self._path,
                "has more values than a trace of its size: it is not from torch.profiler",
            )
        try:
            piece = self._file.read(max(PIECE_BYTES, len(rest)))
            share = self._packed.tell() / max(self._size, 1)
        except (OSError, EOFError, zlib.error) as error:
            raise self._error(str(error)) from None
        self._num_bytes += len(piece)
        if self._file is not self._packed and self._num_bytes > MAX_RATIO * self._size:
            most = MAX_RATIO * self._size
            raise TraceError(self._path, f"has more than {most:,} bytes when it is unpacked")
        self._is_whole = not piece
        self._text, self._at = rest + self._decoder.decode(piece, final=not piece), 0
        self._show(min(share, 1.0))
        return True

    def _error(self, reason: str) -> TraceError:
        return TraceError(
            self._path,
            f"is no JSON file that can be read ({reason}): was the job killed while it wrote?",
        )


def read_json(path: Path) -> Any:  # noqa: ANN401  # of any JSON type
    """Return the document of a file, which may be compressed by gzip.

    Raises:
        TraceError: It can't be read, is no JSON, or is larger than the limits.
    """
    try:
        file, packed, size = open_unpacked(path)
        with packed, file:
            most = min(MAX_BYTES, MAX_RATIO * size)
            content = b"" if size > most else file.read(most + 1)
        if max(size, len(content)) > most:
            raise TraceError(path, f"has more than {most:,} bytes: trace fewer steps")
        text = content.decode(json.detect_encoding(content), "surrogatepass")
        if _parsed_bytes(text) > max(MAX_PARSED_RATIO * len(text), FREE_BYTES):
            raise TraceError(path, "has more values than a trace of its size")
        return json.loads(text)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise TraceError(path, f"is no JSON file that can be read ({error})") from None


def _parsed_bytes(text: str) -> int:
    """Return about how much memory the values of a JSON text take."""
    in_objects, in_lists, values = (text.count(sign) for sign in "{[,")
    return 2 * len(text) + 250 * in_objects + 90 * in_lists + 40 * values
