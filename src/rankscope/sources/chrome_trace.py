"""Spans in the Trace Event Format: one process per rank, one thread per track.

Beside spans, a trace may have what Perfetto draws: the waiting part of a communication as a slice
inside of it, a flow from the member that arrived last to each one that waited for it, and counters.

Source: "Trace Event Format" of the Chromium project; times in microseconds.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from rankscope.tracer.span import NONE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from rankscope.analysis.readers.waits import WaitSplit

FIRST_TID = 1 << 20
"""Perfetto takes a thread whose number is that of a process for its main thread, as on Linux."""

FIRST_OTHER_PID = 1 << 24
"""Processes that are no rank: a rank's number is below."""

WAIT_CATEGORY = "waiting"
"""Of slices and flows, which is no kind of span."""


SHOWN_NUMBERS = (
    "microbatch", "chunk", "seq", "src_rank", "dst_rank", "num_bytes", "wait_ns", "last_rank",
)  # fmt: skip


class Counter(NamedTuple):
    """One value of a quantity."""

    owner: int | str
    """Rank, or the name of a process of its own."""

    name: str
    at_ns: int
    """Unix time."""

    value: float


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
        self._processes: dict[int | str, list[_Thread]] = {}
        self._pids: dict[str, int] = {}
        self._origin_ns: int | None = None
        self._rank_digits = 1
        self._next_tid = FIRST_TID
        self._next_flow = 1
        self._is_first = True
        write('{"displayTimeUnit":"ms","traceEvents":[\n')

    def add(
        self, block: pa.Table, *, split: WaitSplit | None = None, ranks: Collection[int] = ()
    ) -> None:
        """Write the spans of a block, which hold whole steps of all ranks.

        Args:
            split: Wait and transfer of the spans, in the order of the block: waiting becomes slices
                and flows. None: neither.
            ranks: Only the spans of these; empty: all.
        """
        rows = plain_table(block).to_pylist()
        if split is not None:
            waits = split.wait_ns.tolist(), split.last_rank.tolist(), split.instance.tolist()
            for row, wait_ns, last_rank, instance in zip(rows, *waits, strict=True):
                if wait_ns <= row["duration_ns"]:  # else the clocks of its members disagree
                    row |= {"wait_ns": wait_ns, "last_rank": last_rank, "instance": instance}
        rows = [row for row in rows if not ranks or row["rank"] in ranks]
        if rows and self._origin_ns is None:
            self._origin_ns = min(row["start_ns"] for row in rows)
            self._rank_digits = len(str(max(row["rank"] for row in rows)))
        rows.sort(key=lambda row: (row["rank"], row["start_ns"], -row["duration_ns"]))
        members: dict[tuple[int, int], dict[str, Any]] = {}
        for row in rows:
            thread = self._thread(row)
            row["tid"] = thread.tid
            event = _span_event(row, origin_ns=self._origin_ns or 0)
            self._put(event)
            if row.get("wait_ns", NONE) > 0:
                name, dur = f"waiting for rank {row['last_rank']}", _us(row["wait_ns"])
                wait = {"name": name, "cat": WAIT_CATEGORY, "dur": dur}
                self._put(event | wait | {"args": {"step": row["step"]}})
                thread.takes(row["start_ns"], row["wait_ns"])
            if row.get("instance", NONE) >= 0:
                members[row["instance"], row["rank"]] = row
        for row in rows:
            last = members.get((row.get("instance", NONE), row.get("last_rank", NONE)))
            if row.get("wait_ns", NONE) > 0 and last is not None and last["rank"] != row["rank"]:
                self._put_flow(last, row)

    def add_counters(self, counters: Iterable[Counter]) -> None:
        """Write values of quantities; those before the first span are left out."""
        for counter in counters:
            if self._origin_ns is None or counter.at_ns < self._origin_ns:
                continue
            self._put({
                "ph": "C", "name": counter.name, "pid": self._process(counter.owner),
                "ts": _us(counter.at_ns - self._origin_ns), "args": {"value": counter.value},
            })  # fmt: skip

    def end(self) -> None:
        """Complete the document."""
        self._write("\n]}\n")

    def _put_flow(self, last: dict[str, Any], row: dict[str, Any]) -> None:
        """Write an arrow from the last member, as it arrives, to the end of a wait for it."""
        arrived = _us(row["start_ns"] + row["wait_ns"] - (self._origin_ns or 0))
        flow = {"name": "waited for", "cat": WAIT_CATEGORY, "id": self._next_flow, "ts": arrived}
        self._next_flow += 1
        self._put({"ph": "s", "pid": last["rank"], "tid": last["tid"], **flow})
        self._put({"ph": "f", "bp": "e", "pid": row["rank"], "tid": row["tid"], **flow})

    def _process(self, owner: int | str) -> int:
        """Return the number of a process, which is named at its first use."""
        pid = owner
        if isinstance(pid, str):
            pid = self._pids.setdefault(pid, FIRST_OTHER_PID + len(self._pids))
        if owner not in self._processes:
            self._processes[owner] = []
            # Perfetto orders processes by name.
            is_rank = isinstance(owner, int)
            name = f"rank {owner:0{self._rank_digits}}" if is_rank else str(owner)
            self._put(_metadata("process_name", pid, 0, name))
        return pid

    def _thread(self, row: dict[str, Any]) -> _Thread:
        """Return the first thread of the span's track that has room for it."""
        rank, track = row["rank"], row["track"]
        self._process(rank)
        alike = [thread for thread in self._processes[rank] if thread.track == track]
        for thread in alike:
            if thread.takes(row["start_ns"], row["duration_ns"]):
                return thread
        thread = _Thread(self._next_tid, track, row["start_ns"], row["duration_ns"])
        self._next_tid += 1
        self._processes[rank].append(thread)
        name = f"{track} ({len(alike) + 1})" if alike else track
        self._put(_metadata("thread_name", rank, thread.tid, name))
        return thread

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


def _metadata(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _span_event(row: dict[str, Any], *, origin_ns: int) -> dict[str, Any]:
    """Return a span as a complete event; unknown quantities are left out."""
    args = {"step": row["step"], "epoch": row["epoch"]}
    for name in SHOWN_NUMBERS:
        if row.get(name, NONE) != NONE:
            args[name] = row[name]
    if row["group_id"]:
        args["group"] = f"{row['group_id']:016x}"
    if row.get("wait_ns", NONE) != NONE:
        args["transfer_ns"] = row["duration_ns"] - row["wait_ns"]
    return {
        "ph": "X", "name": row["name"], "cat": row["kind"], "pid": row["rank"], "tid": row["tid"],
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
