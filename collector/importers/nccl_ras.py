"""Snapshots of NCCL's RAS (``ncclras --format json``): who has not called what others have.

RAS counts, of each communicator and rank, how many collectives of each kind were launched. It has
no sends and receives, no sizes, and not whether a collective has ended. So only a difference says
something: a rank that launched fewer than others has not called what they wait in, or will. In a
job that runs, counts differ too, so the ranks count as blocked for as long as no count changed from
one snapshot to the last.

The events are those of dumps of the flight recorder (`flight_recorder`).

Source: NCCL's ``src/ras/client_support.cc`` (``rasDumpCommsToJSON``, since 2.28) and
``src/include/nccl_common.h`` (the five functions that are counted), as of 2.30.7.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from rankscope.tracer.span import NONE, NS_PER_S

from ..errors import TraceError
from .event_stream import read_json
from .flight_recorder import Recorded
from .flight_recorder_dump import MAX_SEQ, Call, Dump, State
from .kineto_reader import MAX_RANKS, Group
from .spool_folder import make_group_id

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SOURCE = "nccl-ras"
"""In the data of its events."""

NAMES = {
    "AllGather": "all_gather",
    "AllReduce": "all_reduce",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "ReduceScatter": "reduce_scatter",
}
"""PyTorch's names of the functions that RAS counts."""

UNKNOWN_NAME = "collective"
"""Of a number that some rank's counts leave open."""


class _Process(NamedTuple):
    """A rank's process and device, by which it is known in all communicators."""

    host: str
    pid: int
    cuda_dev: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Communicator:
    """One communicator in one snapshot; ranks are its own."""

    hash: str
    size: int
    processes: dict[int, _Process]
    counts: dict[int, dict[str, int]]
    """Launched collectives by rank and function; of ranks that answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Snapshot:
    path: Path
    at: datetime
    """To a second, in the zone of the host that answered."""

    communicators: tuple[_Communicator, ...]

    @property
    def progress(self) -> dict[tuple[str, int], dict[str, int]]:
        """Return the counts by communicator and rank."""
        return {
            (each.hash, rank): counts
            for each in self.communicators
            for rank, counts in each.counts.items()
        }


def read_snapshots(files: Sequence[Path]) -> Recorded:
    """Read snapshots of one job, and return the last of them as dumps of its ranks.

    Global ranks are those of the communicator that has all processes, as PyTorch's default group.

    Args:
        files: One or more, in any order.

    Raises:
        TraceError: A file is no such snapshot, or no communicator has all processes.
    """
    snapshots = sorted((_read_snapshot(path) for path in files), key=lambda one: one.at)
    last = snapshots[-1]
    since = last.at
    for earlier in reversed(snapshots):
        if earlier.progress != last.progress:
            break
        since = earlier.at
    silent_ns = round((last.at - since).total_seconds()) * NS_PER_S
    written_ns = last.path.stat().st_mtime_ns
    world = _find_world(last)
    ranks = {process: rank for rank, process in world.processes.items()}
    answered = {ranks[each.processes[rank]] for each in last.communicators for rank in each.counts}
    dumps = {
        rank: Dump(
            path=last.path, rank=rank, members={}, newest_ns=written_ns - silent_ns,
            oldest_ns=written_ns - silent_ns,
        )
        for rank in sorted(answered)
    }  # fmt: skip
    recorded = Recorded(
        dumps=dumps, unread={}, left_out=[], world_size=world.size, silent_ns=silent_ns,
        source=SOURCE, hosts={rank: process.host for process, rank in ranks.items()},
    )  # fmt: skip
    for communicator in last.communicators:
        if communicator is world:
            _add(recorded, communicator, tuple(range(world.size)))
        elif len(communicator.processes) == communicator.size:
            found = (ranks[process] for _, process in sorted(communicator.processes.items()))
            _add(recorded, communicator, tuple(found))
    return recorded


def _add(recorded: Recorded, communicator: _Communicator, members: tuple[int, ...]) -> None:
    """Add a communicator as a group, with what each member has launched in it."""
    name = communicator.hash
    recorded.groups[name, members] = Group(
        name=name, axis="", members=members,
        group_id=make_group_id(f"{SOURCE} {name}", tuple(sorted(members))),
    )  # fmt: skip
    base = {
        function: min((counts[function] for counts in communicator.counts.values()), default=0)
        for function in NAMES
    }
    before = sum(base.values())
    ahead = {
        rank: [function for function in NAMES if counts[function] > base[function]]
        for rank, counts in communicator.counts.items()
    }
    is_known = all(len(functions) <= 1 for functions in ahead.values())
    for rank, counts in communicator.counts.items():
        dump = recorded.dumps[members[rank]]
        dump.members[name] = "", members
        called = sum(counts.values())
        # What all have launched may have ended. What some have not, none can have left.
        for seq in sorted({before, min(called, before + 1), called} - {0}):
            functions = ahead[rank] if seq > before else []
            dump.calls.append(
                Call(
                    group=name, description="", seq=seq, is_p2p=False, sides=None,
                    name=NAMES[functions[0]] if functions and is_known else UNKNOWN_NAME,
                    num_bytes=NONE, dtype="", is_certain=False, frames=(),
                    created_ns=dump.newest_ns,
                    state=State.ENDED if seq == before else State.LAUNCHED,
                )
            )  # fmt: skip


def _find_world(snapshot: _Snapshot) -> _Communicator:
    """Return the communicator of all processes. One that died long ago may have no address."""
    processes = {process for each in snapshot.communicators for process in each.processes.values()}
    for each in sorted(snapshot.communicators, key=lambda each: -each.size):
        if processes and processes == set(each.processes.values()):
            return each
    raise TraceError(
        snapshot.path,
        f"has no communicator of all {len(processes):,} processes, so their ranks are unknown: let"
        " the job call a collective of the default group, such as a barrier, at its begin",
    )


def _read_snapshot(path: Path) -> _Snapshot:
    document = read_json(path)
    try:
        return _Snapshot(
            path=path,
            at=datetime.strptime(document["timestamp"], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC),
            communicators=tuple(
                _read_communicator(path, each) for each in document["communicators"]
            ),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"is no output of `ncclras --format json` ({type(error).__name__}: {error})"
        raise TraceError(path, reason) from None


def _read_communicator(path: Path, document: dict[str, Any]) -> _Communicator:
    size = read_number(document["size"], MAX_RANKS + 1)
    answered, missing = document["ranks"], document["missing_ranks"]
    processes = {
        read_number(each["rank"], size): _Process(
            str(each["host"]), read_number(each["pid"], MAX_SEQ), int(each["cuda_dev"])
        )
        for each in (*answered, *missing)
        if each["pid"] != NONE
    }
    if (num := len(answered) + len(missing)) != size:
        raise TraceError(path, f"has a communicator of {size} ranks that lists {num}")
    return _Communicator(
        hash=str(document["hash"]),
        size=size,
        processes=processes,
        counts={
            read_number(each["rank"], size): {
                function: read_number(each["collective_counts"].get(function, 0), MAX_SEQ)
                for function in NAMES
            }
            for each in answered
            if each["pid"] != NONE
        },
    )


def read_number(value: object, end: int) -> int:
    """Return a value if it is a number from 0 and below ``end``.

    Raises:
        ValueError: It is anything else.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < end:
        raise ValueError(f"{value!r} is not a number from 0 to {end - 1}")
    return value
