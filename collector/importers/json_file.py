"""A JSON file of another program, read with limits of its size and of the memory it takes."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from typing import TYPE_CHECKING, Any

from rankscope.tracer.spool import open_regular_file

from ..errors import TraceError

if TYPE_CHECKING:
    from pathlib import Path

MAX_BYTES = 1 << 30
"""Of a decompressed file; its values take some ten times as much memory."""

MAX_RATIO = 100
"""Decompressed over compressed size; of a trace it is 10 to 20."""

MAX_PARSED_RATIO = 20
"""Memory of the parsed values over size of the text; of a trace it is some 5."""

GZIP_MAGIC = b"\x1f\x8b"
FREE_BYTES = 64 << 20
"""Memory that a small file may take whatever its ratio."""


def read_json(path: Path) -> Any:  # noqa: ANN401  # of any JSON type
    """Return the document of a file, which may be compressed by gzip.

    Raises:
        TraceError: It can't be read, is no JSON, or is larger than the limits.
    """
    try:
        with os.fdopen(open_regular_file(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            most = min(MAX_BYTES, MAX_RATIO * size)
            is_packed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
            file.seek(0)
            with gzip.GzipFile(fileobj=file) if is_packed else file as source:
                text = b"" if size > most else source.read(most + 1)
        if max(size, len(text)) > most:
            raise TraceError(path, f"has more than {most:,} bytes: trace fewer steps")
        if _parsed_bytes(text) > max(MAX_PARSED_RATIO * len(text), FREE_BYTES):
            raise TraceError(path, "has more values than a trace of its size")
        return json.loads(text)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise TraceError(path, f"is no JSON file that can be read ({error})") from None


def _parsed_bytes(text: bytes) -> int:
    """Return about how much memory the values of a JSON text take."""
    in_objects, in_lists, values = (text.count(sign) for sign in (b"{", b"[", b","))
    return 2 * len(text) + 250 * in_objects + 90 * in_lists + 40 * values
