"""Timing of a job: moments with dependencies, streams of a rank, communication."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import SpanFlag, SpanKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Moments:
    """Moments of a job. Each comes its own time after the last of those that it depends on."""

    def __init__(self) -> None:
        self.own_ns: list[int] = []
        self._before: list[int] = []
        self._after: list[int] = []

    def add(self, own_ns: float, *before: int | None) -> int:
        """Add a moment that comes ``own_ns`` after the last of ``before``."""
        moment = len(self.own_ns)
        self.own_ns.append(int(own_ns))
        for each in before:
            if each is not None:
                self.follow(each, moment)
        return moment

    def follow(self, before: int, after: int) -> None:
        """Make a moment come no earlier than another."""
        self._before.append(before)
        self._after.append(after)

    def solve(self) -> np.ndarray:
        """Return the time of each, ns from the start of the job.

        Raises:
            RuntimeError: The dependencies have a cycle.
        """
        num = len(self.own_ns)
        before, after = np.array(self._before), np.array(self._after)
        order = np.argsort(before, kind="stable")
        followers = after[order].tolist()
        first = np.searchsorted(before[order], np.arange(num + 1)).tolist()
        missing = np.bincount(after, minlength=num).tolist()
        begin = [0] * num
        own = self.own_ns
        ready = [moment for moment in range(num) if not missing[moment]]
        done = 0
        while ready:
            moment = ready.pop()
            done += 1
            at = begin[moment] = begin[moment] + own[moment]
            for place in range(first[moment], first[moment + 1]):
                other = followers[place]
                begin[other] = max(begin[other], at)
                missing[other] -= 1
                if not missing[other]:
                    ready.append(other)
        if done < num:
            raise RuntimeError(f"{num - done} of {num} moments wait for each other")
        return np.array(begin, dtype=np.int64)


@dataclass
class Record:
    """A span whose times are moments."""

    kind: SpanKind
    name: str
    step: int
    start: int
    end: int
    launch: int
    track: str
    flags: int = 0
    microbatch: int = -1
    chunk: int = -1
    depth: int = 0
    group_id: int = 0
    seq: int = -1
    src: int = -1
    dst: int = -1
    num_bytes: int = -1
    marks: list[int] | None = None
    """Marks of an asynchronous communication on a device: launch, the end before it on its stream,
    and begin and end of the wait for it."""


@dataclass
class Instance:
    """A communication, which ends for all members one transfer after the arrival."""

    done: int
    ends: dict[int, int] = field(default_factory=dict)


@dataclass
class Pending:
    """A communication that a rank has launched and not waited for."""

    record: Record
    end: int


@dataclass
class Rank:
    """A rank: a host thread, a compute stream and communication streams."""

    rank: int
    moments: Moments
    is_device: bool
    records: list[Record] = field(default_factory=list)
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    microbatches: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    host: int = -1
    stream: int = -1
    step: int = 0
    launch_cost_ns: float = 0.0
    as_bounds: bool = False
    """Whether only marks on the compute stream show asynchronous communication."""

    busy_until: dict[str, int] = field(default_factory=dict)
    _open: list[tuple[SpanKind, str, int, int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.host = self.stream = self.moments.add(0)

    @property
    def flags(self) -> int:
        """Clock flags of the spans of this rank."""
        known = SpanFlag.DEVICE_BEGIN_KNOWN | SpanFlag.DEVICE_END_KNOWN
        return int(known if self.is_device else SpanFlag.HOST_CLOCK)

    def launch(self) -> int:
        """Launch an operation, which takes some time of the host."""
        self.host = self.moments.add(self.launch_cost_ns, self.host)
        return self.host

    def host_time(self, own_ns: float) -> tuple[int, int]:
        """Run other work on the host; return its start and end."""
        start = self.host
        self.host = self.moments.add(own_ns, self.host)
        if not self.is_device:
            self.stream = self.host
        return start, self.host

    def _on_stream(self, own_ns: float, *before: int) -> int:
        self.stream = self.moments.add(own_ns, self.stream, *before)
        if not self.is_device:
            self.host = self.stream
        return self.stream

    def work(self, own_ns: float) -> None:
        """ComputeCapture."""
        self._on_stream(own_ns, self.launch())

    def begin(self, kind: SpanKind, name: str, microbatch: int = -1, chunk: int = -1) -> None:
        """Begin a compute span."""
        launched = self.launch()
        start = self._on_stream(0, launched)
        self._open.append((kind, name, microbatch, chunk, start, launched))

    def end(self) -> None:
        """End the innermost compute span."""
        kind, name, microbatch, chunk, start, launched = self._open.pop()
        self.records.append(
            Record(kind, name, self.step, start, self._on_stream(0, self.launch()), launched,
                   "compute", self.flags, microbatch, chunk, len(self._open))
        )  # fmt: skip

    def renumber(self, order: Sequence[int], ids: Mapping[int, int]) -> None:
        """Renumber the ranks: rank k becomes ``order[k]``.

        Args:
            order: New number by old number.
            ids: New group id by old group id.
        """
        self.rank = order[self.rank]
        for each in self.records:
            each.group_id = ids.get(each.group_id, each.group_id)
            if each.src >= 0:
                each.src, each.dst = order[each.src], order[each.dst]

    def sync_to(self, moment: int) -> None:
        """Make the host wait for a moment of the device."""
        self.host = self.moments.add(0, self.host, moment)

    def wait(self, pending: Pending, *, recorded: bool) -> None:
        """Block the stream until a communication has ended here."""
        before = self._on_stream(0, self.launch())
        after = self._on_stream(0, pending.end)
        if pending.record.marks is not None:
            pending.record.marks[2:] = [before, after]
        if recorded:
            done = pending.record
            self.records.append(
                Record(SpanKind.WAIT, "wait", self.step, before, after, before, "compute",
                       self.flags, group_id=done.group_id, seq=done.seq, src=done.src,
                       dst=done.dst, num_bytes=done.num_bytes, depth=len(self._open))
            )  # fmt: skip
