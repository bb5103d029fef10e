"""Hostile files, created by the tests; none is in the repository."""

from __future__ import annotations

import gzip
import io
import os
import pickle  # noqa: TID251  # written, never loaded
import stat
import struct
import tarfile
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MANY_ROWS = 3 << 20
LONG_PAGE_ROWS = 8 << 20


class _RunsACommand:
    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Callable[..., int], tuple[str]]:
        return os.system, (self._command,)


def pickles(marker: Path) -> dict[str, bytes]:
    """Return pickles: one that creates ``marker``, and ones that take memory or do not end."""
    laughs = b"\x80\x04(l\x94" + b"".join(b"(" + b"h\x00" * 10 + b"l\x94" for _ in range(9)) + b"."
    return {
        "pickle-that-runs": pickle.dumps(_RunsACommand(f"touch {marker}")),
        "pickle-laughs": laughs,
        "pickle-long4": b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"\x01",
        "pickle-bytes-of-4-gib": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 32) + b"x",
        "pickle-without-stop": pickle.dumps([1, 2, 3])[:-1],
    }


def archives() -> dict[str, bytes]:
    """Return archives: bombs, and members outside the folder or of special types."""
    zeros = bytes(8 << 20)
    bomb, slip, tar = io.BytesIO(), io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as file:
        for number in range(4):
            file.writestr(f"{number}.parquet", zeros)
    with zipfile.ZipFile(slip, "w") as file:
        file.writestr("../../outside", b"x")
        link = zipfile.ZipInfo("link")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        file.writestr(link, "/etc/passwd")
    with tarfile.open(fileobj=tar, mode="w") as packed:
        for name, kind in (("../../outside", tarfile.SYMTYPE), ("disk", tarfile.BLKTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            packed.addfile(member)
    forged = bytearray(bomb.getvalue())
    forged[22:26] = struct.pack("<I", 1)  # the first member declares an inflated size of 1 byte
    return {
        "zip-bomb": bomb.getvalue(),
        "zip-with-forged-size": bytes(forged),
        "zip-slip": slip.getvalue(),
        "gzip-bomb": gzip.compress(zeros * 4, 1),
        "tar-links": tar.getvalue(),
    }


def parquets() -> dict[str, bytes]:
    """Return parquet files with the columns of a trace, with forged or extreme sizes."""
    valid = _written(2)
    long_page = _with_num_rows(
        _written(LONG_PAGE_ROWS, compression="zstd", data_page_size=1 << 30),
        LONG_PAGE_ROWS,
        declared=1000,
    )
    return {
        "parquet-of-2^40-rows": _with_num_rows(valid, 2, declared=1 << 40),
        "parquet-of-fewer-rows": _with_num_rows(valid, 2, declared=1),
        "parquet-of-negative-rows": _with_num_rows(valid, 2, declared=-5),
        "parquet-of-equal-rows": _written(MANY_ROWS),
        "parquet-page-bomb": long_page,
        "parquet-page-of-forged-size": _with_first_page(long_page, 2 << 20),
        "parquet-long-text": _written(1 << 18, optype="x" * (1 << 20)),
        "parquet-prefixes": _written(
            8, use_dictionary=False, column_encoding={"optype": "DELTA_BYTE_ARRAY"}
        ),
        "parquet-cut-short": valid[: len(valid) // 2],
        "parquet-footer-of-4-gib": valid[:-8] + b"\xff\xff\xff\xff" + b"PAR1",
        "parquet-deep": valid[:-8] + b"\x1c" * 60_000 + struct.pack("<I", 60_000) + b"PAR1",
    }


def arrow_file() -> bytes:
    """Return an Arrow file, which is not parquet."""
    sink = io.BytesIO()
    table = pa.table({"rank": [1]})
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _written(num_rows: int, *, optype: str = "gc", **options: Any) -> bytes:  # noqa: ANN401
    zero = pa.array(np.zeros(num_rows, np.int8))
    columns: dict[str, Any] = dict.fromkeys(
        ("dp_rank", "stage", "rank", "step", "seq_id", "mc", "mb_id"), zero
    )
    times = pa.array(np.zeros(num_rows, np.float32))
    codes = pa.array(np.zeros(num_rows, np.int32), pa.int32())
    text = pa.DictionaryArray.from_arrays(codes, pa.array([optype]))
    columns |= {"start_ts": times, "duration": times}
    columns["optype"] = text if options.get("use_dictionary", True) else text.cast(pa.string())
    if options.get("compression") == "zstd":  # one plain page of maximal length
        options["use_dictionary"] = ["optype"]
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, row_group_size=num_rows, **options)
    return sink.getvalue()


def _with_num_rows(content: bytes, num_rows: int, *, declared: int) -> bytes:
    """Return a file of ``num_rows`` rows whose footer declares another number."""
    length = int.from_bytes(content[-8:-4], "little")
    footer = content[-8 - length : -8]
    i64_field, row_groups = b"\x16", b"\x19\x1c"
    original = i64_field + _varint(2 * num_rows) + row_groups
    assert footer.count(original) == 1
    forged = _varint(2 * declared if declared >= 0 else -2 * declared - 1)
    footer = footer.replace(original, i64_field + forged + row_groups)
    return content[: -8 - length] + footer + struct.pack("<I", len(footer)) + b"PAR1"


def _with_first_page(content: bytes, num_bytes: int) -> bytes:
    """Return a file whose first page declares a wrong inflated size of ``num_bytes``."""
    header = b"PAR1\x15\x00\x15"  # after the magic: type DATA_PAGE, then its size
    forged = _varint(2 * num_bytes)
    assert content.startswith(header)
    return content[: len(header)] + forged + content[len(header) + len(forged) :]


def _varint(value: int) -> bytes:
    parts = []
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])
