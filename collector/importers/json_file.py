"""A JSON file of another program, read with limits of its size and of the memory it takes."""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any

from ..errors import TraceError
from .event_stream import FREE_BYTES, MAX_PARSED_RATIO, MAX_RATIO, open_unpacked, parsed_bytes

if TYPE_CHECKING:
    from pathlib import Path

MAX_BYTES = 1 << 30
"""Of a decompressed file; its values take some ten times as much memory."""


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
        if parsed_bytes(text) > max(MAX_PARSED_RATIO * len(text), FREE_BYTES):
            raise TraceError(path, "has more values than a trace of its size")
        return json.loads(text)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise TraceError(path, f"is no JSON file that can be read ({error})") from None
