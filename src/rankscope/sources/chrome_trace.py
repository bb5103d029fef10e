"""Spans in the Trace Event Format: one process per rank, one thread per track.

Source: "Trace Event Format" of the Chromium project; times in microseconds.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rankscope.tracer.span import NONE

if TYPE_CHECKING:
    from collections.abc import Callable


class ChromeTrace:
    """Writes spans block by block; `end` completes the document.

    Args:
        write: Takes the next part of the text.
    """

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._tracks: dict[int, dict[str, int]] = {}
        self._origin_ns: int | None = None
        self._is_first = True
        write('{"displayTimeUnit":"ms","traceEvents":[\n')

    def add(self, block: pa.Table) -> None:
        """Write the spans of a block; times count from the first span."""
        for row in plain_table(block).to_pylist():
            rank, track = row["rank"], row["track"]
            if rank not in self._tracks:
                self._tracks[rank] = {}
                self._put(_name_event("process_name", rank, 0, f"rank {rank}"))
            known = self._tracks[rank]
            if track not in known:
                known[track] = len(known)
                self._put(_name_event("thread_name", rank, known[track], track))
            if self._origin_ns is None:
                self._origin_ns = row["start_ns"]
            self._put(_span_event(row, tid=known[track], origin_ns=self._origin_ns))

    def end(self) -> None:
        """Complete the document."""
        self._write("\n]}\n")

    def _put(self, event: dict[str, Any]) -> None:
        self._write(("" if self._is_first else ",\n") + json.dumps(event, separators=(",", ":")))
        self._is_first = False


def _name_event(name: str, rank: int, tid: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank, "tid": tid, "args": {"name": text}}


def _span_event(row: dict[str, Any], *, tid: int, origin_ns: int) -> dict[str, Any]:
    """Return a span as a complete event; unknown quantities are left out."""
    args = {"step": row["step"], "epoch": row["epoch"]}
    for name in ("microbatch", "chunk", "seq", "src_rank", "dst_rank", "num_bytes"):
        if row[name] != NONE:
            args[name] = row[name]
    if row["group_id"]:
        args["group"] = f"{row['group_id']:016x}"
    return {
        "ph": "X", "name": row["name"], "cat": row["kind"], "pid": row["rank"], "tid": tid,
        "ts": (row["start_ns"] - origin_ns) / 1e3, "dur": row["duration_ns"] / 1e3, "args": args,
    }  # fmt: skip


def plain_table(block: pa.Table) -> pa.Table:
    """Return a table with its text columns as text, not as codes."""
    schema = [
        field.with_type(pa.string()) if pa.types.is_dictionary(field.type) else field
        for field in block.schema
    ]
    return block.cast(pa.schema(schema))
