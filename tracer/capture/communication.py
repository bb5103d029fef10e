"""Communications of this process, from launch to wait."""

from __future__ import annotations

import itertools
import threading
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..errors import is_tracer_error
from ..native.host_launch import ASYNC, END_BOUND, HOST_CLOCK, Heads, Instance
from ..record.steps import COMMUNICATION_KINDS
from ..span import NONE, SpanFlag, SpanKind
from ..spool import DropReason
from .group import CommGroup, Groups
from .guard import report_capture_failure
from .launch import DeviceLaunches, Launch, intern_heads
from .operation import Direction, Operation
from .works import Completions, PendingLaunches

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..record.recorder import Recorder
    from ..topology import Layout

COALESCED = int(SpanFlag.COALESCED)
ERROR = int(SpanFlag.ERROR)


class _Thread(threading.local):
    interval_id = 0
    in_batch = False
    """Whether the thread has begun a p2p batch. Nothing reports the end of a batch."""

    coalescing: list[Launch] | None = None
    is_nested = False
    """Whether launches are part of a communication that the thread has begun."""

    last_work: Any = None
    """Kept alive until the thread's next launch: torch has not yet handed the work to the job, and
    nothing else holds the Python object by which the job will wait."""

    blocks_on: Launch | None = None
    """The last launch by a Python process group whose caller waits for it at once."""


class Communication:
    """Follows each communication of this process from launch to wait.

    No method raises an error of its own: the first one turns the capture off and is counted as
    `DropReason.INTERNAL_ERROR`.
    """

    def __init__(self, recorder: Recorder, layout: Layout | None) -> None:
        self.active = True
        self.completions = Completions()
        self._recorder = recorder
        self.groups = Groups(recorder, layout)
        """Those in which this rank has communicated."""

        self._pending = PendingLaunches()
        self._on_device = DeviceLaunches(recorder)
        self._heads: dict[tuple[str, SpanKind], Heads] = {}
        """By name of the operation and kind of the group."""

        self._intervals = itertools.count(1)
        self.thread = _Thread()

    # -- launch --------------------------------------------------------------

    def begin(self, operation: Operation, args: tuple[Any, ...]) -> Launch | None:
        """Begin a communication that this rank enters now; return None if it is not captured."""
        thread = self.thread
        if not self.active or thread.is_nested:
            return None
        try:
            at = operation.group_position
            process_group = dist.ProcessGroup.unbox(args[at])
            group = self.groups.find(process_group)
            if group is None:
                self._recorder.drop(DropReason.INTERNAL_ERROR)
                return None
            flags = HOST_CLOCK | ASYNC if operation.is_async(args) else HOST_CLOCK
            if thread.interval_id:
                flags |= COALESCED
            recorder = self._recorder
            launch = Launch(
                recorder,
                group,
                recorder.lanes.current(),
                _make_instance(operation, args, group, thread.interval_id),
                self._heads.get((operation.name, group.kind))
                or self._intern_heads(operation, group),
                flags,
            )
            self._on_device.enter(launch, process_group, args[:at])
            launch.show()
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self.fail(problem)
            return None
        else:
            return launch

    def launched(
        self,
        launch: Launch,
        operation: Operation,
        args: tuple[Any, ...],
        out: Any,  # noqa: ANN401 - as the operator has it
    ) -> None:
        """Record what the launching call returned.

        Args:
            out: Result of the operator: a work, a tuple that ends in one, or nothing if the call
                blocked until the end.
        """
        try:
            boxed = out[-1] if isinstance(out, tuple) and out else out
            work = None if boxed is None or isinstance(boxed, tuple) else dist.Work.unbox(boxed)
            thread = self.thread
            if work is None and thread.coalescing is None:
                self._returned((launch,))
                return
            is_async = launch.flags & ASYNC
            # The first argument of every operator is what it writes. Only a work that the job will
            # wait for later can be waited for by its tensor.
            for old in self._pending.add(launch, args[0] if is_async else None):
                old.end(monotonic_ns(), END_BOUND)
            if thread.coalescing is not None:
                thread.coalescing.append(launch)
            if work is None:
                return
            self._pending.bind(work, (launch,))
            thread.last_work = work
            # A work of NCCL reports completion too early, and runs callbacks on streams that may be
            # the job's.
            if is_async and operation.direction is Direction.GROUP and not launch.on_device:
                self.completions.watch(work, launch.end, self.fail)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self.fail(problem)

    def failed(self, launch: Launch) -> None:
        """Record that the launching call raised."""
        try:
            launch.end(monotonic_ns(), ERROR)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self.fail(problem)

    # -- what was captured so far --------------------------------------------

    def operation_names(self) -> set[str]:
        """Return the names of the operations that this rank has launched, as in torch."""
        return {name for name, _ in list(self._heads)}

    def set_axes(self, axes: Mapping[frozenset[int], str]) -> None:
        """Give the groups of these members, if they belong to no axis yet, the kind of an axis."""
        for group in self.groups:
            axis = axes.get(frozenset(group.members))
            if axis is not None and group.kind is SpanKind.OTHER:
                self.groups.set_axis(group, axis)

    # -- batches and coalescing ----------------------------------------------

    def begin_batch(self) -> None:
        """Give the p2p launches of this thread one interval from now on."""
        self.thread.interval_id = next(self._intervals)
        self.thread.in_batch = True

    def end_batch(self) -> None:
        """Give each launch of this thread its own interval again."""
        self.thread.interval_id = 0
        self.thread.in_batch = False

    def begin_coalescing(self) -> None:
        """Collect the launches of this thread, which will share one work."""
        self.thread.coalescing = []
        if not self.thread.in_batch:
            self.thread.interval_id = next(self._intervals)

    def end_coalescing(self, work: Any) -> None:  # noqa: ANN401 - a pybind class
        """Bind the launches since `begin_coalescing` to their work.

        Args:
            work: None if the call that ended the coalescing waited itself.
        """
        self.end_batch()
        launches, self.thread.coalescing = self.thread.coalescing, None
        if not launches:
            return
        try:
            if work is None:
                self._returned(launches)
            else:
                self._pending.bind(work, launches)
                self.thread.last_work = work
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self.fail(problem)

    # -- wait ----------------------------------------------------------------

    def find_by_work(self, work: Any) -> Sequence[Launch]:  # noqa: ANN401 - a pybind class
        """Return the launches of ``work`` that nothing has waited for yet."""
        try:
            launches = self._pending.find_by_work(work)
            blocks_on = self.thread.blocks_on
            if blocks_on is None:
                return launches
            self.thread.blocks_on = None
            # C++ (`all_to_all_single`) gives the caller another work than the method returned.
            return launches or ((blocks_on,) if id(blocks_on) in self._pending.entries else ())
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self.fail(problem)
            return ()

    def find_by_tensor(self, tensor: Any) -> Sequence[Launch]:  # noqa: ANN401 - of any subclass
        """Return the launches that still write to the tensor's storage."""
        try:
            return self._pending.find_by_tensor(tensor)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self.fail(problem)
            return ()

    def find_by_thread(self, thread_id: int, since_ns: int) -> Sequence[Launch]:
        """Return the launches of a thread since ``since_ns`` without a wait yet, oldest first."""
        if not self._pending.entries:
            return ()
        try:
            return self._pending.find_by_thread(thread_id, since_ns)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self.fail(problem)
            return ()

    def wait_begins(self, launches: Sequence[Launch]) -> None:
        """Note that this thread (on a device: its stream) is about to wait for all ``launches``."""
        try:
            for number, launch in enumerate(launches):
                if launch.on_device:
                    launch.reach_wait(first=number == 0, alone=len(launches) == 1)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self.fail(problem)

    def record_work_wait(
        self,
        work: Any,  # noqa: ANN401 - a pybind class
        launches: Sequence[Launch],
        start_ns: int,
        *,
        error: BaseException | None = None,
    ) -> None:
        """Record that ``work.wait()`` was called at ``start_ns`` and has returned or raised."""
        end_ns = monotonic_ns()
        try:
            if error is None:
                for launch in launches:
                    if launch.seq == NONE:
                        _set_source(launch, work)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self.fail(problem)
        self.record_waits(launches, start_ns, end_ns, error=error)

    def record_waits(
        self,
        launches: Sequence[Launch],
        start_ns: int,
        end_ns: int,
        *,
        error: BaseException | None = None,
    ) -> None:
        """Record that this thread was blocked over the interval, on one launch after the other.

        Launches that something has waited for meanwhile are skipped. Each wait lasts from the end
        of the previous one until the communication completed. Time that the thread spent between
        two waits counts to the later one.
        """
        flags = 0 if error is None else ERROR
        now_ns = start_ns
        try:
            lane = self._recorder.lanes.current()
            for launch in filter(self._pending.take, launches):
                now_ns = max(now_ns, launch.start_ns)
                done_ns = end_ns if launch.end_ns is None else min(launch.end_ns, end_ns)
                until_ns = max(now_ns, done_ns)
                if launch.on_device and not flags:
                    launch.pass_wait()
                else:
                    launch.waited_on_host(lane, now_ns, until_ns, flags)
                now_ns = until_ns
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self.fail(problem)

    # -- end -----------------------------------------------------------------

    def fail(self, problem: BaseException) -> None:
        """Turn the capture off after an error of its own; raise an error of the job."""
        if not is_tracer_error(problem):
            raise problem
        self.active = False
        text = "communication capture turned itself off"
        report_capture_failure(self._recorder, text, problem, COMMUNICATION_KINDS)

    def close(self) -> None:
        """Record launches that did not end as open, and release everything."""
        self.active = False
        now_ns = monotonic_ns()
        for launch in self._pending.take_all():
            launch.end(now_ns, SpanFlag.OPEN)
        self.thread = _Thread()

    # -- internal ------------------------------------------------------------

    def _intern_heads(self, operation: Operation, group: CommGroup) -> Heads:
        collective = self.groups.kind_of(operation.name, group)
        kinds = {Direction.GROUP: collective, Direction.SEND: group.send_kind}
        kind = kinds.get(operation.direction, group.recv_kind)
        heads = self._heads[operation.name, group.kind] = intern_heads(
            self._recorder, operation.name, kind
        )
        return heads

    def _returned(self, launches: Sequence[Launch]) -> None:
        """Record launches whose call returned without a work: the call itself waited."""
        now_ns = monotonic_ns()
        lane = self._recorder.lanes.current()
        for launch in launches:
            self._pending.take(launch)
            if launch.on_device:
                launch.returned_on_device()
            else:
                launch.returned_on_host(lane, now_ns)


def _make_instance(
    operation: Operation, args: tuple[Any, ...], group: CommGroup, interval_id: int
) -> Instance:
    num_bytes = operation.num_bytes(args, group.size)
    if operation.direction is Direction.GROUP:
        return group.next_seq(), NONE, NONE, num_bytes, interval_id
    src, dst = _pair(operation.direction, args[operation.group_position + 1], group)
    seq = NONE if src == NONE else group.pair_seqs[src, dst]()
    return seq, src, dst, num_bytes, interval_id


def _pair(direction: Direction, peer: int, group: CommGroup) -> tuple[int, int]:
    """Return source and destination as global ranks; `NONE` for a source not yet known."""
    if direction is Direction.SEND:
        return group.rank, group.members[peer]
    if direction is Direction.RECV:
        return group.members[peer], group.rank
    return NONE, group.rank


def _set_source(launch: Launch, work: Any) -> None:  # noqa: ANN401 - a pybind class
    """Give a receive from any source its source and number, which its work knows now."""
    source = work._source_rank()
    if 0 <= source < launch.group.size:
        src = launch.group.members[source]
        launch.set_source(src, launch.group.pair_seqs[src, launch.group.rank]())
