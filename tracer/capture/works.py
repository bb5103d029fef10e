"""Works of torch that are in flight: which launches they belong to, and when they complete."""

from __future__ import annotations

import contextlib
import time
import weakref
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..errors import is_tracer_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .launch import Launch

MAX_UNWAITED = 512
"""Launches kept until something waits for them; the oldest beyond this are ended and forgotten."""

POLL_S = 0.001

UNWIND_S = 0.1
"""Longest time, on a busy machine, from the end of a callback to the end of the C++ around it."""

CAN_CALL_BACK = torch.torch_version.TorchVersion(torch.__version__) >= "2.8"
"""Whether a callback may be attached to a work whose group the job may destroy.

Before 2.8, torch destroyed a group in a thread that held the interpreter's lock and waited for
the group's threads (pytorch/pytorch#154976). One of these may wait for that lock to run the
callback."""


class PendingLaunches:
    """Launches that nothing has waited for yet, without keeping the job's works or memory alive.

    A work is held by a weak reference. A tensor is known by the address of its storage, and a weak
    reference keeps that address from being reused. Any thread may call any method.
    """

    def __init__(self) -> None:
        self.entries: dict[int, tuple[Launch, list[int], Sequence[int]]] = {}
        """Launch, keys of its works and addresses of its storages, by `id` of the launch, oldest
        first. The thread that removes an entry records its end."""

        self._by_work: dict[int, tuple[weakref.ref[Any], Sequence[Launch]]] = {}
        self._by_storage: dict[int, list[Launch]] = {}

    def add(self, launch: Launch, written: object) -> list[Launch]:
        """Add a launch.

        Args:
            written: The tensors that it writes, nested in lists; None if nothing can wait for it by
                a tensor.

        Returns:
            The oldest launches beyond `MAX_UNWAITED`, which are forgotten.
        """
        storages = () if written is None else _weak_storages(written)
        self.entries[id(launch)] = (launch, [], storages)
        for storage in storages:
            self._by_storage.setdefault(storage, []).append(launch)
        return self._take_excess() if len(self.entries) > MAX_UNWAITED else []

    def bind(self, work: Any, launches: Sequence[Launch]) -> None:  # noqa: ANN401 - a pybind class
        """Make a wait for ``work`` a wait for all of ``launches``."""
        self._by_work[id(work)] = (weakref.ref(work), launches)
        for launch in launches:
            entry = self.entries.get(id(launch))
            if entry is not None:
                entry[1].append(id(work))

    def find_by_work(self, work: Any) -> Sequence[Launch]:  # noqa: ANN401 - a pybind class
        """Return the launches of ``work`` that nothing has waited for yet, oldest first."""
        entry = self._by_work.get(id(work))
        if entry is None or entry[0]() is not work:
            return []
        launches = entry[1]
        if len(launches) == 1 and id(launches[0]) in self.entries:
            return launches
        return [launch for launch in launches if id(launch) in self.entries]

    def find_by_tensor(self, tensor: Any) -> list[Launch]:  # noqa: ANN401 - of any subclass
        """Return the launches that still write to the tensor's storage, oldest first."""
        if not self._by_storage:
            return []
        with contextlib.suppress(NotImplementedError, RuntimeError):
            return list(self._by_storage.get(tensor.untyped_storage()._cdata, ()))
        return []

    def find_by_thread(self, thread_id: int, since_ns: int) -> list[Launch]:
        """Return the launches of a thread since ``since_ns``, oldest first."""
        return [
            launch
            for launch, _, _ in list(self.entries.values())
            if launch.thread_id == thread_id and launch.start_ns >= since_ns
        ]

    def take(self, launch: Launch) -> bool:
        """Remove a launch; return False if another thread has removed it before."""
        entry = self.entries.pop(id(launch), None)
        if entry is None:
            return False
        _, work_keys, storages = entry
        for key in work_keys:
            bound_to = self._by_work.get(key)
            if bound_to is not None and launch in bound_to[1]:
                bound = bound_to[1]
                if len(bound) == 1 or not any(id(one) in self.entries for one in bound):
                    self._by_work.pop(key, None)
        for storage in storages:
            self._forget_storage(storage, launch)
        return True

    def take_all(self) -> list[Launch]:
        """Remove and return all launches."""
        return [launch for launch, _, _ in list(self.entries.values()) if self.take(launch)]

    def _take_excess(self) -> list[Launch]:
        oldest = list(self.entries.values())[: len(self.entries) - MAX_UNWAITED]
        return [launch for launch, _, _ in oldest if self.take(launch)]

    def _forget_storage(self, storage: int, launch: Launch) -> None:
        waiting = self._by_storage.get(storage)
        if waiting is not None:
            if launch in waiting:
                waiting.remove(launch)
            if not waiting:
                self._by_storage.pop(storage, None)
        torch.UntypedStorage._free_weak_ref(storage)  # type: ignore[no-untyped-call]


def _weak_storages(written: object) -> list[int]:
    """Return the storages' addresses, each with a weak reference that the caller must free."""
    while type(written) is list and len(written) == 1:  # nearly always: one tensor in a list
        written = written[0]
    if isinstance(written, torch.Tensor):
        try:
            return [written.untyped_storage()._weak_ref()]  # type: ignore[list-item]
        except (NotImplementedError, RuntimeError):
            # A sparse tensor has no storage of its own; `wait_tensor` cannot take it either.
            return []
    if isinstance(written, (list, tuple)):
        return [storage for item in written for storage in _weak_storages(item)]
    return []


class Completions:
    """Callbacks by which the backend's threads report that a work completed."""

    def __init__(self) -> None:
        self._pending: dict[int, Any] = {}

    def watch(
        self,
        work: Any,  # noqa: ANN401 - a pybind class
        note: Callable[[int], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """Call ``note`` with the time (monotonic) at which ``work`` completed.

        The call is made on a thread of the backend, or at once on this thread if the work has
        completed. A failed work counts as complete. ``note`` is never called if the backend has no
        futures, nor later than now if callbacks are not safe (`CAN_CALL_BACK`).

        Args:
            fail: Called with an exception that ``note`` raises on the backend's thread. On this
                thread the exception propagates.
        """
        key = id(work)

        def done(_: Any) -> None:  # noqa: ANN401
            now_ns = monotonic_ns()
            try:
                note(now_ns)
            except Exception as problem:  # noqa: BLE001 - promise 1: harmless
                fail(problem)
            finally:
                # Last: `drain` must not let the interpreter end while this runs.
                self._pending.pop(key, None)

        try:
            future = work.get_future()
        except Exception as problem:
            # A backend need not have futures. The method of a class of the job may raise anything,
            # and only the tracer called it.
            if type(work).get_future is dist.Work.get_future and not is_tracer_error(problem):
                raise
            return
        if future.done():
            # Without the callback, in which an exception of a signal handler of the job would be
            # lost.
            note(monotonic_ns())
            return
        if not CAN_CALL_BACK:
            return
        self._pending[key] = work
        future.add_done_callback(done)

    def drain(self) -> None:
        """Wait until every callback has run. To be called at the very end of the process only.

        A callback that runs after the interpreter has ended would abort the process. The wait does
        not delay the end: gloo's process group waits for the same works when it is destroyed next.
        """
        if not self._pending:
            return
        while self._pending:
            time.sleep(POLL_S)
        # The backend's thread still has to release the callback, for which it needs the GIL.
        time.sleep(UNWIND_S)
