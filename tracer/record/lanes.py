"""Which lane each thread writes to, and the spans that it has ready."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from ..native.choice import Finder, ready_span
from ..native.host_span import host_span
from ..span import NONE
from .lane import Lane

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..native.choice import ReadySpan
    from .interface import SpanContext
    from .process_file import ProcessFile
    from .sampling import Sampling
    from .segment_pool import SegmentSource

MAX_LANES = 64
"""Threads that record at once; further ones share the last lane."""

MAX_READY = 1024
"""Spans made once and kept, in all threads together: 2 MiB at most. Others are made each time."""


class _LaneHolder:
    """Gives a lane back when its thread's locals die, so that short threads cost no disk."""

    __slots__ = ("_finder", "_free", "lane")

    def __init__(self, lane: Lane, free: deque[Lane], finder: Finder) -> None:
        self.lane = lane
        self._free = free
        self._finder = finder

    def __del__(self) -> None:
        self._finder.forget()  # before another thread may have the lane
        self._free.append(self.lane)


class Lanes:
    """The lanes of a process."""

    def __init__(
        self,
        *,
        process: ProcessFile,
        source: SegmentSource,
        sampling: Sampling,
        wake: Callable[[], None],
    ) -> None:
        self._process = process
        self._source = source
        self._sampling = sampling
        self._wake = wake
        self._step = NONE
        self._lanes: list[Lane] = []
        self._numbers = itertools.count()
        self._free: deque[Lane] = deque()
        self._num_ready = itertools.count()
        # Of this very class: a subclass's attributes take twice the time.
        self.threads: Any = threading.local()
        """What each thread holds, missing before its first span: ``lane``, ``holder``, and
        ``ready``, its plain spans by name."""

        self.finder = Finder(self.threads)
        """Finds those."""

    def __iter__(self) -> Iterator[Lane]:
        return iter(list(self._lanes))

    def mine(self) -> Lane:
        """Return the calling thread's lane."""
        try:
            lane: Lane = self.threads.lane
        except AttributeError:
            return self._join()
        return lane

    def new(self, track: str) -> Lane:
        """Return a lane of its own, for whoever writes to ``track``."""
        lane = Lane(
            next(self._numbers),
            track_id=self._process.name_id(track),
            source=self._source,
            process=self._process,
            sampling=self._sampling,
            wake=self._wake,
        )
        lane.set_place(self._step, NONE, NONE)
        lane.begin_in(self._source.starter())
        self._lanes.append(lane)
        self._wake()  # others may begin at this moment too
        return lane

    def begin_step(self, step: int) -> None:
        """Let what begins from now on belong to ``step``, in all threads."""
        self._step = step
        for lane in self._lanes:
            lane.set_place(step, NONE, NONE)

    def span(self, head: int, name: str | None = None) -> SpanContext:
        """Return a span of the calling thread that is not in use: a ready one, if it can be.

        Args:
            head: `tracer.record.lane.head_word`.
            name: Under which `finder` shall find it; None: it shall not.
        """
        lane = self.mine()
        ready = lane.ready.get(head)
        if ready is None:
            ready = self._make_ready(lane, head, name)
        if ready is None or ready.start_ns is not None:
            return host_span(lane, head)
        return ready.span

    def _make_ready(self, lane: Lane, head: int, name: str | None) -> ReadySpan | None:
        # Threads that share a lane must not share spans: one might be in use by two.
        if "ready" not in self.threads.__dict__ or next(self._num_ready) >= MAX_READY:
            return None
        ready = lane.ready.setdefault(head, ready_span(lane, head))
        if name is not None:
            lane.ready_by_name[name] = ready
        return ready

    def _join(self) -> Lane:
        """Give the calling thread a lane: a free one, a new one, or the shared last one."""
        current = threading.current_thread()
        track = "main" if current is threading.main_thread() else current.name or "thread"
        try:
            lane = self._free.pop()
        except IndexError:
            lane = self.new(track) if len(self._lanes) < MAX_LANES else self._lanes[-1]
        else:
            lane.track_id = self._process.name_id(track)
            lane.depth = 0
            lane.set_place(self._step, NONE, NONE)
        is_shared = len(self._lanes) >= MAX_LANES and lane is self._lanes[-1]
        if not is_shared:
            self.threads.holder = _LaneHolder(lane, self._free, self.finder)
            self.threads.ready = lane.ready_by_name
        self.threads.lane = lane
        return lane
