"""Which communications are under way, and who waits for them."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tracer.blame import is_ours
from tracer.capture.completion import Completions
from tracer.capture.group import GroupBook
from tracer.capture.launch import Instance, Launch
from tracer.capture.operation import Direction, Operation, num_bytes_of
from tracer.clock import monotonic_ns
from tracer.span import NONE, SpanFlag, SpanKind
from tracer.spool import DropReason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tracer.recorder import Recorder
    from tracer.topology import Layout

MAX_UNWAITED = 512
"""Launches remembered until somebody waits for them; older ones are let go."""

BLOCKED_NS = 50_000
"""A wait shorter than this found the work done: when it was done is then not known from it."""


class Communication:
    """Follows every communication of this process from launch to wait.

    No method raises an error of its own: the first one turns the capture off
    and is counted as `DropReason.INTERNAL_ERROR`.
    """

    def __init__(self, recorder: Recorder, layout: Layout | None) -> None:
        self.active = True
        self.completions = Completions()
        self._recorder = recorder
        self._groups = GroupBook(recorder, layout)
        self._unwaited: dict[int, Launch] = {}
        """By `id` of the work, which each launch keeps alive."""

        self._by_storage: dict[int, list[Launch]] = {}
        self._intervals = itertools.count(1)
        self._local = threading.local()

    # -- launch --------------------------------------------------------------

    def begin(self, operation: Operation, args: tuple[Any, ...]) -> Launch | None:
        """Note that this rank enters a communication now; None where nothing is captured."""
        if not self.active:
            return None
        try:
            return self._begin(operation, args)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self.fail(problem)
            return None

    def launched(
        self, launch: Launch, operation: Operation, args: tuple[Any, ...], out: object
    ) -> None:
        """Note what the launching call returned.

        Args:
            launch: What `begin` returned.
            operation: The operator.
            args: Its arguments.
            out: What it returned: a work, a tuple that ends in one, or nothing
                where it blocked until the end.
        """
        try:
            self._launched(launch, operation, args, out)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self.fail(problem)

    def failed(self, launch: Launch) -> None:
        """Note that the launching call raised."""
        try:
            launch.end(monotonic_ns(), SpanFlag.ERROR)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self.fail(problem)

    def next_interval(self) -> int:
        """Return a number for operations that one call issues together."""
        return next(self._intervals)

    def set_interval(self, interval_id: int) -> None:
        """Say to which interval launches of this thread belong; 0 to none."""
        self._local.interval_id = interval_id

    # -- wait ----------------------------------------------------------------

    def of_work(self, work: Any) -> Launch | None:  # noqa: ANN401 - a pybind class
        """Return the launch that nobody has yet waited for by ``work``."""
        launch = self._unwaited.get(id(work))
        return launch if launch is not None and launch.work is work else None

    def of_tensor(self, tensor: Any) -> list[Launch]:  # noqa: ANN401 - of any subclass
        """Return the launches that still write to the tensor's storage."""
        try:
            return list(self._by_storage.get(_storage(tensor), ()))
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self.fail(problem)
            return []

    def of_thread(self, since_ns: int) -> list[Launch]:
        """Return what this thread launched since then and has not waited for, oldest first."""
        mine = threading.get_ident()
        return [
            launch
            for launch in list(self._unwaited.values())
            if launch.thread_id == mine and launch.start_ns >= since_ns
        ]

    def follows(self, launch: Launch) -> bool:
        """Return whether nobody has yet waited for ``launch``."""
        return self._unwaited.get(id(launch.work)) is launch

    def waited(
        self, launch: Launch, start_ns: int, end_ns: int, *, error: BaseException | None = None
    ) -> None:
        """Note that this thread was blocked on ``launch`` over the interval."""
        try:
            self._forget(launch)
            flags = SpanFlag.NOTHING if error is None else SpanFlag.ERROR
            if end_ns - start_ns < BLOCKED_NS and SpanFlag.ASYNC in launch.flags:
                launch.end(end_ns, flags | SpanFlag.END_BOUND)
            else:
                launch.end(end_ns, flags)
            launch.end_wait(start_ns, end_ns, flags)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self.fail(problem)

    def waited_in_turn(self, launches: Iterable[Launch], start_ns: int, end_ns: int) -> None:
        """Note that a call of C++ waited for ``launches``, one after the other.

        Each wait lasts from the end of the one before until the communication
        was done; what the call did between two waits is counted to the later.
        """
        now_ns = start_ns
        for launch in launches:
            done_ns = end_ns if launch.end_ns is None else min(launch.end_ns, end_ns)
            until_ns = max(now_ns, done_ns)
            self.waited(launch, now_ns, until_ns)
            now_ns = until_ns

    # -- end -----------------------------------------------------------------

    def fail(self, problem: BaseException) -> None:
        """Turn the capture off after an error of its own; hand on one that is the job's."""
        if not is_ours(problem):
            raise problem
        self.active = False
        self._recorder.drop(DropReason.INTERNAL_ERROR)
        self._recorder.event(
            "tracer", "communication capture turned itself off", {"error": repr(problem)[:500]}
        )

    def close(self) -> None:
        """Write what never ended as open, and let go of everything."""
        self.active = False
        now_ns = monotonic_ns()
        for launch in list(self._unwaited.values()):
            launch.end(now_ns, SpanFlag.OPEN)
        self._unwaited.clear()
        self._by_storage.clear()

    # -- inside --------------------------------------------------------------

    def _begin(self, operation: Operation, args: tuple[Any, ...]) -> Launch:
        at = operation.group_position
        group = self._groups.find(dist.ProcessGroup.unbox(args[at]))
        kind, peers = group.kind, (NONE, NONE)
        if operation.direction is not Direction.GROUP:
            kind, peers = _peers(operation.direction, args[at + 1], group.members)
        if operation.direction is Direction.GROUP:
            seq = group.next_seq()
        else:
            seq = group.pair_seqs[peers]() if NONE not in peers else NONE
        interval_id = getattr(self._local, "interval_id", 0)
        launch = Launch(
            self._recorder,
            group,
            Instance(seq, *peers, num_bytes_of(args[:at]), interval_id),
            name=operation.name,
            kind=kind,
            flags=SpanFlag.HOST_CLOCK
            | (SpanFlag.ASYNC if _is_async(operation, args) else SpanFlag.NOTHING)
            | (SpanFlag.COALESCED if interval_id else SpanFlag.NOTHING),
        )
        launch.show()
        return launch

    def _launched(
        self,
        launch: Launch,
        operation: Operation,
        args: tuple[Any, ...],
        out: Any,  # noqa: ANN401
    ) -> None:
        boxed = out[-1] if isinstance(out, tuple) and out else out
        if boxed is None or isinstance(boxed, tuple):
            now_ns = monotonic_ns()
            launch.end(now_ns)
            launch.end_wait(launch.start_ns, now_ns)
            return
        launch.work = dist.Work.unbox(boxed)
        # Every operator takes what it writes first, and what it reads after.
        self._remember(launch, args[0])
        if SpanFlag.ASYNC in launch.flags and operation.direction is Direction.GROUP:
            self.completions.watch(launch.work, lambda end_ns: self._done(launch, end_ns))

    def _done(self, launch: Launch, end_ns: int) -> None:
        try:
            launch.end(end_ns)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self.fail(problem)

    def _remember(self, launch: Launch, written: Any) -> None:  # noqa: ANN401 - lists of tensors
        launch.storages = tuple(map(_storage, _flatten(written)))
        self._unwaited[id(launch.work)] = launch
        for storage in launch.storages:
            self._by_storage.setdefault(storage, []).append(launch)
        if len(self._unwaited) > MAX_UNWAITED:
            self._let_go(next(iter(self._unwaited.values())))

    def _let_go(self, launch: Launch) -> None:
        """Stop following a launch for which nobody waits."""
        self._forget(launch)
        launch.end(monotonic_ns(), SpanFlag.END_BOUND)

    def _forget(self, launch: Launch) -> None:
        self._unwaited.pop(id(launch.work), None)
        for storage in launch.storages:
            waiting = self._by_storage.get(storage)
            if waiting is not None and launch in waiting:
                waiting.remove(launch)
            if not waiting:
                self._by_storage.pop(storage, None)


def _is_async(operation: Operation, args: tuple[Any, ...]) -> bool:
    at = operation.async_position
    if at is None:
        return operation.direction is not Direction.GROUP
    return bool(args[at]) if at < len(args) else True


def _peers(
    direction: Direction,
    peer: int,
    members: tuple[int, ...],
) -> tuple[SpanKind, tuple[int, int]]:
    mine = dist.get_rank()
    if direction is Direction.SEND:
        return SpanKind.PP_SEND, (mine, members[peer])
    if direction is Direction.RECV:
        return SpanKind.PP_RECV, (members[peer], mine)
    return SpanKind.PP_RECV, (NONE, mine)


def _storage(tensor: Any) -> int:  # noqa: ANN401
    return int(tensor.untyped_storage()._cdata)


def _flatten(tensors: Any) -> list[Any]:  # noqa: ANN401
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    if isinstance(tensors, list | tuple):
        return [tensor for item in tensors for tensor in _flatten(item)]
    return []
