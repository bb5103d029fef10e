"""One dump of a flight recorder: the communications that a rank called, and what became of them.

PyTorch's ProcessGroupNCCL writes a pickle, torch 2.13 and newer also JSON, and torchcomms either.

Source: ``torch/csrc/distributed/c10d/TraceUtils.h`` (versions 1.0 to 1.4 of the format, torch 2.2
and 2.3), ``FlightRecorder.hpp`` and ``FlightRecorderDetail.hpp`` (versions 2.0 to 2.10), and
torchcomms' ``hooks/fr/FlightRecorder.cpp``.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from rankscope.tracer.span import NONE
from rankscope.tracer.spool import open_regular_file

from ..errors import TraceError
from .kineto_comm import ELEMENT_BYTES
from .kineto_events import MAX_NS
from .kineto_reader import MAX_MEMBERS, MAX_RANKS, WHOLE_JOB
from .plain_pickle import MAX_OPCODES, MAX_VALUES, PlainPickleError, load_plain_pickle

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_BYTES = 64 << 20
"""Of one file. A dump of the usual 2,000 communications has 1 to 2 MB."""

MAX_CALLS = 200_000
MAX_SEQ = 1 << 62
MAX_TEXT = 200
MAX_FRAMES = 64

RANK = re.compile(r"(\d{1,9})(?:\.(?:json|pickle|pkl|pt|bin))?$", re.IGNORECASE)
"""Rank at the end of a file's name, as PyTorch and torchcomms name their dumps."""

OPERATION = re.compile(r"(?:[\w-]{1,40}:)?(\w{1,80})(?: (\d{1,9})(?:->|<-)(\d{1,9}))?")
"""``nccl:all_reduce``, ``nccl:send 0->3``, ``nccl:recv 0<-3``: positions in the group."""

P2P = re.compile(r"\b(?:send|recv)\b")

COALESCED = "coalesced"
"""End of the name of the record of a whole batch. Records of its parts have no state."""

UNEVEN = "all_to_all"
"""A collective whose name begins so may have another size on each rank."""

UNNAMED = "unnamed"
UNKNOWN_DESCRIPTION = "undefined"
GLOO = "gloo:"
"""Its ``pg_status`` counts operations, and not collectives."""


class State(IntEnum):
    """Progress of a call."""

    LAUNCHED = 0
    """By the host. Whether its device has begun it is unknown, or it has not (`Dump.sees_begins`).
    """

    BEGUN = 1
    ENDED = 2


class Call(NamedTuple):
    """A communication that a rank has called."""

    group: str
    """Name of the process group."""

    description: str
    name: str
    seq: int
    """Number in the group. Collectives and p2p operations have numbers of their own."""

    is_p2p: bool
    sides: tuple[int, int] | None
    """Source and destination of a p2p operation, positions in the group; None if unknown."""

    num_bytes: int
    """That all members have alike; `NONE` if unknown."""

    dtype: str
    state: State
    is_certain: bool
    """Whether its end was observed on the device. Otherwise its record may only have been closed,
    as is done after a timeout, too."""

    created_ns: int
    frames: tuple[str, ...]
    """Innermost first: "train.py:70 main"; of calls that have not ended, and of the last one."""


@dataclass(slots=True, kw_only=True)
class Dump:
    """Content of the file of one rank."""

    path: Path
    rank: int
    members: dict[str, tuple[str, tuple[int, ...]]]
    """Description and members, by position, of each group by name, as far as they are known."""

    calls: list[Call] = field(default_factory=list)
    """In the order in which they were called, each batch one."""

    completed: dict[str, int] = field(default_factory=dict)
    """Number of the last collective that ended, by group, where the file has it."""

    oldest_ns: int = 0
    """Unix time of its oldest call; 0 if it has none."""

    newest_ns: int = 0
    """Unix time of its newest record; 0 if it has none."""

    sees_begins: bool = False
    """Whether it knows when a device has begun a communication."""

    is_whole: bool = False
    """Whether it has all calls since the process began."""

    is_counted_together: bool = False
    """Whether the calls of all groups are numbered together, as torchcomms does, which knows no
    state of a group."""


def find_rank(path: Path) -> int:
    """Return the rank that a file's name ends with; `NONE` if it ends with none."""
    found = RANK.search(path.name)
    return NONE if found is None or int(found[1]) >= MAX_RANKS else int(found[1])


def read_dump(path: Path, rank: int) -> Dump:
    """Read the file of one rank.

    Raises:
        TraceError: It is no dump of a flight recorder, or is too large.
    """
    document = _load(path)
    entries = document.get("entries", [])
    if not {"version", "entries", "pg_config"} & document.keys() or not isinstance(entries, list):
        raise TraceError(path, "is no dump of a flight recorder: it has no entries and no version")
    if len(entries) > MAX_CALLS:
        raise TraceError(path, f"has {len(entries):,} entries, more than {MAX_CALLS:,}")
    try:
        is_old = _complete_old(document, rank)
        dump = Dump(path=path, rank=rank, members=_read_groups(document.get("pg_config") or {}))
        status = document.get("pg_status", {"": {}})
        dump.is_counted_together = not status or is_old
        is_closed_at_end = not status or any(
            str(entry["profiling_name"]).startswith(GLOO) for entry in entries
        )
        records = [_Record.read(entry, is_closed_at_end=is_closed_at_end) for entry in entries]
        for index, record in enumerate(records):
            if record.call.state < State.ENDED or index == len(records) - 1:
                frames = tuple(
                    f"{frame['filename']}:{frame['line']} {frame['name']}"[-MAX_TEXT:]
                    for frame in islice(entries[index].get("frames") or (), MAX_FRAMES)
                )
                records[index] = record._replace(call=record.call._replace(frames=frames))
        _read_status(dump, {} if is_closed_at_end else status, records)
    except (TypeError, KeyError, ValueError, AttributeError, IndexError, OverflowError) as error:
        reason = f"has another content than a flight recorder writes ({error!r:.200})"
        raise TraceError(path, reason) from None
    first_last = [record.record_id for record in (records[:1] + records[-1:])]
    dump.is_whole = bool(records) and first_last == [0, len(records) - 1]
    dump.oldest_ns = min((record.call.created_ns for record in records), default=0)
    dump.newest_ns = max((record.newest_ns for record in records), default=0)
    dump.calls = list(_join_batches(records))
    return dump


def _load(path: Path) -> dict[str, Any]:
    try:
        with os.fdopen(open_regular_file(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = b"" if size > MAX_BYTES else file.read(size)
        if size > MAX_BYTES:
            raise TraceError(path, f"has {size:,} bytes, more than {MAX_BYTES:,}")
        if not data.lstrip().startswith(b"{"):
            document = load_plain_pickle(data)
        elif data.count(b"[") + data.count(b"{") > MAX_VALUES or data.count(b",") > MAX_OPCODES:
            raise TraceError(path, "has more values than a dump")
        else:
            document = json.loads(data)
    except PlainPickleError as error:
        raise TraceError(path, f"is no dump of a flight recorder: {error}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(path, f"cannot be read ({error!s:.200})") from None
    if not isinstance(document, dict):
        raise TraceError(path, "is no dump of a flight recorder: it is no dictionary")
    return document


def _complete_old(document: dict[str, Any], rank: int) -> bool:
    """Bring a dump of torch 2.2 or 2.3 (versions 1.0 to 1.4) into the form of later ones.

    They count collectives and p2p operations of a group together (``seq_id``), and a group has the
    number that it has in its process. That of the default group is 0; others are joined by their
    members if the file has these (1.4), and are of this rank alone if not.

    Returns:
        Whether it is such a dump and has p2p operations.
    """
    entries = document.get("entries", [])
    if not any("seq_id" in entry for entry in entries):
        return False
    groups = document["pg_config"] = _name_groups(document.get("pg_config") or {})
    batches = {
        (entry["pg_id"], entry["seq_id"])
        for entry in entries
        if entry["profiling_name"].endswith(COALESCED)
    }
    before: dict[int, dict[str, Any]] = {}
    for index, entry in enumerate(entries):
        number, seq = entry["pg_id"], entry["seq_id"]
        about = groups.get(str(number), {"name": f"{number} of rank {rank}", "desc": ""})
        last = before.get(number, {})
        in_batch = last.get("seq_id") == seq and last["is_p2p"] and (number, seq) in batches
        entry["process_group"] = about["name"], about["desc"]
        entry["profiling_name"] = entry["profiling_name"] or UNNAMED
        is_whole = entry["profiling_name"].endswith(COALESCED)
        entry["is_p2p"] = in_batch if is_whole else bool(P2P.search(entry["profiling_name"]))
        entry["collective_seq_id"] = seq
        entry["p2p_seq_id"] = last["p2p_seq_id"] if in_batch else index
        before[number] = entry
    return any(entry["is_p2p"] for entry in entries)


def _name_groups(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return groups by their number in the process, with a name that is the same on all members.

    Several groups of the same members were made in the same order on all of them.
    """
    count: Counter[str] = Counter()
    groups: dict[str, dict[str, Any]] = {"0": {"name": "0", "desc": WHOLE_JOB}}
    for number, ranks in sorted(config.items(), key=lambda item: int(item[0])):
        text = str(ranks)[: MAX_TEXT // 2]
        count[text] += 1
        name = text if count[text] == 1 else f"{text} {count[text]}"
        is_default = number == "0"
        description = WHOLE_JOB if is_default else ""
        groups[number] = {"name": "0" if is_default else name, "desc": description, "ranks": ranks}
    return groups


def _read_groups(config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return description and members of each group; gloo writes neither."""
    groups = {}
    num_members = 0
    for name, about in config.items():
        ranks = about.get("ranks", "[]")
        text = ranks if isinstance(ranks, str) else json.dumps(ranks)
        members = tuple(map(int, text.strip("[]() ").split(","))) if text.strip("[]() ") else ()
        num_members += len(members)
        if num_members > MAX_MEMBERS or len(set(members)) < len(members):
            raise ValueError(f"members of group {name[:64]!r}")
        if members and not 0 <= min(members) <= max(members) < MAX_RANKS:
            raise ValueError(f"members of group {name[:64]!r}")
        if members:
            groups[str(about.get("name", name))[:MAX_TEXT]] = str(about.get("desc") or ""), members
    return groups


class _Record(NamedTuple):
    """An entry of a file, before the parts of batches are joined."""

    call: Call
    record_id: int
    pg_id: str
    newest_ns: int
    is_begun: bool

    @classmethod
    def read(cls, entry: dict[str, Any], *, is_closed_at_end: bool) -> _Record:
        """Read an entry.

        Args:
            is_closed_at_end: Whether a record is closed (``retired``) when its call has ended. Gloo
                and torchcomms do so, and observe no end on a device. A watchdog of NCCL closes the
                record of a call that timed out, too.

        Raises:
            ValueError: A number is out of range. Other errors come from values of another type.
        """
        operation = OPERATION.fullmatch(entry["profiling_name"])
        if operation is None:
            raise ValueError(f"operation {entry['profiling_name'][:MAX_TEXT]!r}")
        name, first, second = operation.groups()
        group, description = entry["process_group"]
        has_p2p_number = bool(entry.get("is_p2p"))
        is_p2p = has_p2p_number or first is not None or name in {"send", "recv"}
        seq = int(entry["p2p_seq_id" if has_p2p_number else "collective_seq_id"])
        times = [
            int(entry.get(key) or 0)
            for key in (
                "time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns"
            )
        ]  # fmt: skip
        if not (0 <= seq < MAX_SEQ and all(0 <= time < MAX_NS for time in times)):
            raise ValueError(f"seq {seq} or times {times}")
        has_ended = entry["state"] == "completed"
        is_begun = entry["state"] == "started" or times[1] > 0
        state = State.BEGUN if is_begun else State.LAUNCHED
        sides = None if first is None else (int(first), int(second))
        call = Call(
            group=sys.intern(str(group)[:MAX_TEXT]),
            description=sys.intern(
                "" if description == UNKNOWN_DESCRIPTION else str(description)[:MAX_TEXT]
            ),
            name=sys.intern(name),
            seq=seq,
            is_p2p=is_p2p,
            sides=sides[::-1] if sides and name == "recv" else sides,
            num_bytes=_num_bytes(name, entry),
            dtype=_dtype(entry),
            state=State.ENDED if has_ended or (is_closed_at_end and entry["retired"]) else state,
            is_certain=has_ended,
            created_ns=times[0],
            frames=(),
        )
        return cls(
            call=call,
            record_id=int(entry.get("record_id", NONE)),
            pg_id=str(entry.get("pg_id", "")),
            newest_ns=max(times),
            is_begun=is_begun,
        )


def _num_bytes(name: str, entry: dict[str, Any]) -> int:
    """Return the bytes that all members of a call have alike; `NONE` if none are."""
    if name.startswith(UNEVEN):
        return NONE
    sizes = []
    for side in ("input", "output"):
        shapes, dtypes = entry.get(f"{side}_sizes") or [], entry.get(f"{side}_dtypes") or []
        widths = [ELEMENT_BYTES.get(dtype, 0) for dtype in dtypes]
        if not all(widths) or len(widths) not in {1, len(shapes)}:
            return NONE
        widths = widths * len(shapes) if len(widths) == 1 else widths
        sizes.append(sum(map(int.__mul__, map(math.prod, shapes), widths)))
    if name.startswith(("gather", "scatter")):  # the root alone has the whole
        return sizes[0 if name.startswith("gather") else 1]
    return min(max(sizes), MAX_SEQ)


def _dtype(entry: dict[str, Any]) -> str:
    """Return the type of the elements; "" if there are several or none."""
    names = {*(entry.get("input_dtypes") or ()), *(entry.get("output_dtypes") or ())}
    return sys.intern(str(names.pop())[:MAX_TEXT]) if len(names) == 1 else ""


def _read_status(dump: Dump, status: dict[str, Any], records: list[_Record]) -> None:
    """Read the last collective that has ended in each group, and whether begins are known.

    In a group with p2p operations, that may be the number of one of these.
    """
    num_by_group = {record.pg_id: record.call.group for record in records}
    p2p = {record.call.group for record in records if record.call.is_p2p}
    for pg_id, group in num_by_group.items():
        last = int(status.get(pg_id, {}).get("last_completed_collective", NONE))
        if last >= 0 and group not in p2p:
            dump.completed[group] = last
    started = (int(each.get("last_started_collective", NONE)) for each in status.values())
    dump.sees_begins = any(record.is_begun for record in records) or any(
        number >= 0 for number in started
    )


def _join_batches(records: list[_Record]) -> Iterator[Call]:
    """Yield the calls, of a batch of collectives the batch alone, and of p2p operations each.

    The parts of a batch have its number, and only the record of the whole has a state. If the file
    leaves out what has ended, parts without the whole are of a batch that has. The first batch of a
    ring that has overwritten its first records may lack parts, so its size is unknown.
    """
    parts: dict[tuple[str, bool, int], list[Call]] = {}
    for record in records:
        call = record.call
        parts.setdefault((call.group, call.is_p2p, call.seq), []).append(call)
    is_cut = bool(records) and records[0].record_id != 0
    for index, calls in enumerate(parts.values()):
        if len(calls) == 1:
            yield calls[0]
            continue
        whole = next((call for call in calls if call.name.endswith(COALESCED)), None)
        state = State.ENDED if whole is None else whole.state
        own = [call for call in calls if call is not whole]
        is_certain = whole is None or whole.is_certain
        if calls[0].is_p2p:
            yield from (call._replace(state=state, is_certain=is_certain) for call in own)
            continue
        sizes = [NONE] if is_cut and not index else [call.num_bytes for call in own]
        dtypes = {call.dtype for call in own}
        yield (whole or own[0])._replace(
            name=COALESCED if whole is None else whole.name,
            state=state,
            is_certain=is_certain,
            num_bytes=sum(sizes) if min(sizes) >= 0 else NONE,
            dtype=dtypes.pop() if len(dtypes) == 1 else "",
        )
