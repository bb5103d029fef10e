"""One communication from its launch to its end, and to the place where it is waited for."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

from tracer.clock import monotonic_ns
from tracer.lane import head_word
from tracer.span import KIND_CODES, SpanFlag, SpanKind
from tracer.spool import COMM, HAS_COMM, RecordType

if TYPE_CHECKING:
    from tracer.capture.group import CommGroup
    from tracer.lane import Lane
    from tracer.recorder import Recorder
    from tracer.segment import OpenEntry

WAIT_CODE = KIND_CODES[SpanKind.WAIT]


class Instance(NamedTuple):
    """Which of its group's communications this is; in the order of `tracer.spool.COMM`."""

    seq: int
    src_rank: int
    """Global; `NONE` for a collective."""

    dst_rank: int
    num_bytes: int
    interval_id: int
    """Shared by operations that one call issued; 0 for none."""


class Launch:
    """A communication that this rank has entered."""

    __slots__ = (
        "_instance",
        "_open",
        "_place",
        "_recorder",
        "_second",
        "_tickets",
        "end_ns",
        "flags",
        "group",
        "kind",
        "name",
        "seq",
        "start_ns",
        "thread_id",
    )

    def __init__(
        self,
        recorder: Recorder,
        group: CommGroup,
        instance: Instance,
        *,
        name: str,
        kind: SpanKind,
        flags: SpanFlag,
    ) -> None:
        lane = recorder.lane()
        self._recorder = recorder
        self.name = name
        self.kind = KIND_CODES[kind]
        self.flags = flags
        self.group = group
        self.seq = instance.seq
        self.end_ns: int | None = None
        self._instance = instance
        self.thread_id = threading.get_ident()
        self._place = lane.place_on(group.track_id)
        self._second = COMM.pack(group.group_id, *instance)
        # Whoever takes the ticket writes the record: the completion callback and the
        # waiting thread may both come, and `list.pop` gives it to one of them.
        self._tickets = [None]
        self._open: OpenEntry | None = None
        self.start_ns = monotonic_ns()

    def show(self) -> None:
        """Put the communication into the open table."""
        self._open = self._recorder.comm_lane.open(
            self.start_ns,
            head_word(
                RecordType.SPAN,
                kind=self.kind,
                flags=0,
                name_id=self._recorder.name_id(self.name),
            ),
            (self.group.group_id, self.seq),
        )

    def came_from(self, src_rank: int, seq: int) -> None:
        """Say from whom a receive from any source came, and which of that pair's it is.

        Args:
            src_rank: Global.
            seq: In the ordered pair.
        """
        self.seq = seq
        self._instance = self._instance._replace(seq=seq, src_rank=src_rank)
        self._second = COMM.pack(self.group.group_id, *self._instance)

    def end(self, end_ns: int, flags: SpanFlag = SpanFlag.NOTHING) -> None:
        """Write the communication's span, once; a second call does nothing."""
        try:
            self._tickets.pop()
        except IndexError:
            return
        self.end_ns = end_ns
        self._append(
            self._recorder.comm_lane,
            kind=self.kind,
            name=self.name,
            interval=(self.start_ns, end_ns),
            place=self._place,
            flags=self.flags | flags,
            launch_ns=self.start_ns,
            depth=0,
        )
        if self._open is not None:
            self._open.close()

    def end_wait(self, start_ns: int, end_ns: int, flags: SpanFlag = SpanFlag.NOTHING) -> None:
        """Write a span of the calling thread, which was blocked on this communication."""
        lane = self._recorder.lane()
        self._append(
            lane,
            kind=WAIT_CODE,
            name=f"wait {self.name}",
            interval=(start_ns, end_ns),
            place=lane.place,
            flags=SpanFlag.HOST_CLOCK | flags,
            launch_ns=start_ns,
            depth=lane.depth,
        )

    @property
    def ended(self) -> bool:
        """Whether the communication's span is written."""
        return not self._tickets

    def _append(  # noqa: PLR0913 - a record has this many fields
        self,
        lane: Lane,
        *,
        kind: int,
        name: str,
        interval: tuple[int, int],
        place: bytes,
        flags: SpanFlag,
        launch_ns: int,
        depth: int,
    ) -> None:
        head = head_word(
            RecordType.SPAN,
            kind=kind,
            flags=int(flags) | HAS_COMM,
            name_id=self._recorder.name_id(name),
        )
        lane.append(
            head,
            interval[0],
            interval[1] - interval[0],
            place,
            launch_ns,
            depth,
            self._second,
        )
