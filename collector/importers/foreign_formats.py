"""Formats of other programs that an importer may be given, by the first bytes of a file."""

from __future__ import annotations

import os
import zlib
from typing import TYPE_CHECKING, NamedTuple

from rankscope.tracer.spool import open_regular_file

if TYPE_CHECKING:
    from pathlib import Path

BEGIN_BYTES = 4096
GZIP_MAGIC = b"\x1f\x8b"


class ForeignFormat(NamedTuple):
    """A format, how its files begin, and what its user can do."""

    name: str
    advice: str
    magic: tuple[bytes, ...] = ()
    """Any of these begins the file, after spaces."""

    contains: tuple[bytes, ...] = ()
    """Any of these is in the first `BEGIN_BYTES`."""

    suffixes: tuple[str, ...] = ()


PROFILE_AGAIN = (
    "it is not read: trace with torch.profiler (export_chrome_trace) or with rankscope's tracer"
)
FOREIGN_FORMATS = (
    ForeignFormat(
        "a pointer of Git LFS", "get the file itself with git lfs pull",
        magic=(b"version https://git-lfs",),
    ),
    ForeignFormat("a parquet file", "import it with --format bytedance", magic=(b"PAR1",)),
    ForeignFormat(
        "a report of Nsight Systems", PROFILE_AGAIN, suffixes=(".nsys-rep", ".qdrep", ".qdstrm"),
    ),
    ForeignFormat("a database of rocpd or RPD", PROFILE_AGAIN, suffixes=(".rpd", "_results.db")),
    ForeignFormat(
        "an SQLite database, as Nsight Systems exports", PROFILE_AGAIN,
        magic=(b"SQLite format 3\0",),
    ),
    ForeignFormat(
        "an xplane protobuf of JAX or TensorFlow", PROFILE_AGAIN,
        suffixes=(".xplane.pb", ".xplane.pb.gz"),
    ),
    ForeignFormat(
        "a protobuf of Perfetto", PROFILE_AGAIN,
        suffixes=(".pftrace", ".perfetto-trace", ".perfetto"),
    ),
    ForeignFormat(
        "a Chakra execution trace", "it has no times of the device: import the profile beside it",
        contains=(b"-chakra.", b"\"ctrl_deps\""), suffixes=(".et",),
    ),
    ForeignFormat(
        "a file of rocprofv3", PROFILE_AGAIN, contains=(b"rocprofiler-sdk-tool", b"\"Agent_Id\""),
    ),
    ForeignFormat(
        "a pickle",
        "pickles run code when they are loaded and are not. If it is a dump of the Flight Recorder,"
        " import it with --format flight-recorder",
        magic=tuple(bytes((0x80, protocol)) for protocol in range(2, 6)),
    ),
    ForeignFormat(
        "a ZIP archive, as torch.save writes", "unpack it if it has traces",
        magic=(b"PK\x03\x04",),
    ),
    ForeignFormat(
        "compressed", "decompress it: gzip is read, zstd, xz and bzip2 are not",
        magic=(b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\0", b"BZh"),
    ),
    ForeignFormat("an Arrow file", PROFILE_AGAIN, magic=(b"ARROW1",)),
    ForeignFormat("a page of HTML", "give the trace that it was made of", magic=(b"<",)),
    ForeignFormat(
        "a list of Chrome events",
        "torch.profiler writes an object with traceEvents. If the events are forwards and backwards"
        " of a framework, import it with --format chrome",
        magic=(b"[",),
    ),
)  # fmt: skip
"""The first that fits is named.

Source: https://parquet.apache.org/docs/file-format; https://www.sqlite.org/fileformat.html; PEP
3154 (pickle); RFC 8878 (zstd); https://tukaani.org/xz/xz-file-format.txt; PKWARE's APPNOTE (ZIP);
https://github.com/mlcommons/chakra (schema); the JSON of rocprofiler-sdk."""


def describe_format(path: Path) -> str:
    """Return what a file is that is no trace of `torch.profiler`, and what can be done.

    Returns:
        A part of a sentence; "" if it is of none of `FOREIGN_FORMATS`.

    Raises:
        OSError: It can't be read.
    """
    with os.fdopen(open_regular_file(path), "rb") as file:
        begin = file.read(BEGIN_BYTES)
    packing = "packed as gzip, " if begin.startswith(GZIP_MAGIC) else ""
    if packing:
        begin = _unpack(begin)
    if not begin.strip():
        return f"is {packing}empty: was the job killed before it wrote?"
    for each in FOREIGN_FORMATS:
        if (
            begin.lstrip().startswith(each.magic)
            or any(part in begin for part in each.contains)
            or path.name.endswith(each.suffixes)
        ):
            return f"is {packing}{each.name}: {each.advice}"
    return ""


def _unpack(begin: bytes) -> bytes:
    """Return the first bytes of what is packed; none of a broken one."""
    try:
        return zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(begin, BEGIN_BYTES)
    except zlib.error:
        return b""
