"""Compress an answer for a client that asks for it."""

from __future__ import annotations

from typing import Literal

import pyarrow as pa

Codec = Literal["lz4", "zstd", "gzip"]

CODECS: tuple[Codec, ...] = ("lz4", "zstd", "gzip")
"""The cheapest first: the cores serve ingest too. HTTP and Arrow call them alike; lz4 is the
frame format in both."""


def codec_for(accepted: str) -> Codec | None:
    """Return the cheapest codec of an ``Accept-Encoding`` header; None where none is ours."""
    offered = {part.partition(";")[0].strip().lower() for part in accepted.split(",")}
    return next((codec for codec in CODECS if codec in offered), None)


def compressed(data: memoryview, codec: Codec) -> memoryview:
    """Return the data as one compressed stream."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(data)
    return memoryview(sink.getvalue())
