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


FIRST_TID = 1 << 20
"""Perfetto takes a thread whose number is that of a process for its main thread, as on Linux."""


class ChromeTrace:
    """Writes spans block by block; `end` completes the document.

    Perfetto drops events before time 0 and events of a thread that overlap without one being inside
    of the other (communications on one track may). So times count from the earliest span of the
    first block, and a track has as many threads as it needs.

    Args:
        write: Takes the next part of the text.
    """

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._processes: dict[int, list[_Thread]] = {}
        self._origin_ns: int | None = None
        self._rank_digits = 1
        self._next_tid = FIRST_TID
        self._is_first = True
        write('{"displayTimeUnit":"ms","traceEvents":[\n')

    def add(self, block: pa.Table) -> None:
        """Write the spans of a block, which hold whole steps of all ranks."""
        rows = plain_table(block).to_pylist()
        if rows and self._origin_ns is None:
            self._origin_ns = min(row["start_ns"] for row in rows)
            self._rank_digits = len(str(max(row["rank"] for row in rows)))
        rows.sort(key=lambda row: (row["rank"], row["start_ns"], -row["duration_ns"]))
        for row in rows:
            self._put(_span_event(row, tid=self._thread(row), origin_ns=self._origin_ns or 0))

    def end(self) -> None:
        """Complete the document."""
        self._write("\n]}\n")

    def _thread(self, row: dict[str, Any]) -> int:
        """Return the number of the first thread of the span's track that has room for it."""
        rank, track = row["rank"], row["track"]
        if rank not in self._processes:
            self._processes[rank] = []
            # Perfetto orders processes by name.
            name = f"rank {rank:0{self._rank_digits}}"
            self._put(_metadata("process_name", rank, 0, name=name))
        alike = [thread for thread in self._processes[rank] if thread.track == track]
        for thread in alike:
            if thread.takes(row["start_ns"], row["duration_ns"]):
                return thread.tid
        thread = _Thread(self._next_tid, track, row["start_ns"], row["duration_ns"])
        self._next_tid += 1
        self._processes[rank].append(thread)
        name = f"{track} ({len(alike) + 1})" if alike else track
        self._put(_metadata("thread_name", rank, thread.tid, name=name))
        return thread.tid

    def _put(self, event: dict[str, Any]) -> None:
        self._write(("" if self._is_first else ",\n") + json.dumps(event, separators=(",", ":")))
        self._is_first = False


class _Thread:
    """The spans of a track that are inside of each other or follow each other."""

    def __init__(self, tid: int, track: str, start_ns: int, duration_ns: int) -> None:
        self.tid, self.track = tid, track
        self._start_ns = start_ns
        self._ends_ns = [start_ns + duration_ns]
        """Ends of the spans in which the next one may be, the outermost first."""

    def takes(self, start_ns: int, duration_ns: int) -> bool:
        """Return whether the thread has room for a span, and add it."""
        if start_ns < self._start_ns:
            return False
        ends = self._ends_ns
        while ends and ends[-1] <= start_ns:
            ends.pop()
        if ends and start_ns + duration_ns > ends[-1]:
            return False
        ends.append(start_ns + duration_ns)
        self._start_ns = start_ns
        return True


def _metadata(what: str, rank: int, tid: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": tid, "args": args}


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
        "ts": _us(row["start_ns"] - origin_ns), "dur": _us(row["duration_ns"]), "args": args,
    }  # fmt: skip


def _us(time_ns: int) -> float:
    """Return microseconds that are whole nanoseconds again if a reader cuts their product off.

    Perfetto does: 1.003 * 1000 is a little less than 1003.
    """
    return (10 * time_ns + 2) / 1e4


def plain_table(block: pa.Table) -> pa.Table:
    """Return a table with its text columns as text, not as codes."""
    schema = [
        field.with_type(pa.string()) if pa.types.is_dictionary(field.type) else field
        for field in block.schema
    ]
    return block.cast(pa.schema(schema))
