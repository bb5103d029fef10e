"""What was launched and nobody has waited for yet, by work, by tensor and by thread."""

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
"""Launches remembered until somebody waits for them; older ones are let go."""

POLL_S = 0.001

UNWIND_S = 0.1
"""What a thread may take, on a busy machine, from the end of a callback to the end of its C++."""

CAN_CALL_BACK = torch.torch_version.TorchVersion(torch.__version__) >= "2.8"
"""Whether a callback may be left with a work whose group the job may destroy.

Before, torch destroyed a group by a thread that held the interpreter's lock and waited for the
group's threads (pytorch/pytorch#154976), of which one may wait for that lock, to call us back.
"""


class PendingLaunches:
    """Remembers launches without keeping the job's works or memory alive.

    Of a work it holds a weak reference, and of a tensor the storage's address, kept from
    being given to another by a weak reference too. Each method may be called by any thread.
    """

    def __init__(self) -> None:
        self.entries: dict[int, tuple[Launch, list[int], Sequence[int]]] = {}
        """Launch, keys of its works and addresses of its storages, by `id` of the launch,
        oldest first; taking one out is what claims it."""

        self._by_work: dict[int, tuple[weakref.ref[Any], Sequence[Launch]]] = {}
        self._by_storage: dict[int, list[Launch]] = {}

    def add(self, launch: Launch, written: object) -> list[Launch]:
        """Remember a launch.

        Args:
            launch: What was launched.
            written: What it writes to, tensors nested in lists; None: nobody can wait
                for it by a tensor.

        Returns:
            The oldest launches beyond `MAX_UNWAITED`, forgotten.
        """
        storages = () if written is None else _weak_storages(written)
        self.entries[id(launch)] = (launch, [], storages)
        for storage in storages:
            self._by_storage.setdefault(storage, []).append(launch)
        return self._take_excess() if len(self.entries) > MAX_UNWAITED else []

    def bind(self, work: Any, launches: Sequence[Launch]) -> None:  # noqa: ANN401 - a pybind class
        """Say that whoever waits for ``work`` waits for all of ``launches``."""
        self._by_work[id(work)] = (weakref.ref(work), launches)
        for launch in launches:
            entry = self.entries.get(id(launch))
            if entry is not None:
                entry[1].append(id(work))

    def find_by_work(self, work: Any) -> Sequence[Launch]:  # noqa: ANN401 - a pybind class
        """Return the launches that nobody has yet waited for by ``work``, oldest first."""
        known = self._by_work.get(id(work))
        if known is None or known[0]() is not work:
            return []
        launches = known[1]
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
        """Return what a thread launched since then, oldest first."""
        return [
            launch
            for launch, _, _ in list(self.entries.values())
            if launch.thread_id == thread_id and launch.start_ns >= since_ns
        ]

    def take(self, launch: Launch) -> bool:
        """Forget a launch; False where somebody else has done so before."""
        entry = self.entries.pop(id(launch), None)
        if entry is None:
            return False
        _, work_keys, storages = entry
        for key in work_keys:
            known = self._by_work.get(key)
            if known is not None and launch in known[1]:
                bound = known[1]
                if len(bound) == 1 or not any(id(one) in self.entries for one in bound):
                    self._by_work.pop(key, None)
        for storage in storages:
            self._forget_storage(storage, launch)
        return True

    def take_all(self) -> list[Launch]:
        """Forget and return everything."""
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
    """Callbacks that wait on the backend's threads."""

    def __init__(self) -> None:
        self._pending: dict[int, Any] = {}

    def watch(
        self,
        work: Any,  # noqa: ANN401 - a pybind class
        note: Callable[[int], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """Call ``note`` with the moment (monotonic) at which ``work`` is done.

        It is called on the backend's thread, or here and now where the work is
        done already. A failed work is done too. Where its backend has no futures
        nobody calls it; nor later, where none may be called back (`CAN_CALL_BACK`).

        Args:
            work: A work.
            note: What to call.
            fail: Told what ``note`` raises on the backend's thread; here it passes.
        """
        key = id(work)

        def done(_: Any) -> None:  # noqa: ANN401
            now_ns = monotonic_ns()
            try:
                note(now_ns)
            except Exception as problem:  # noqa: BLE001 - promise 1: harmless
                fail(problem)
            finally:
                # Last: whoever drains must not end the interpreter under our feet.
                self._pending.pop(key, None)

        try:
            future = work.get_future()
        except Exception as problem:
            # A backend need not have futures. A method of the job's own class may raise what
            # it likes: nobody asked it but us.
            if type(work).get_future is dist.Work.get_future and not is_tracer_error(problem):
                raise
            return
        if future.done():
            # Not by the callback: what a signal handler of the job raises in one is lost.
            note(monotonic_ns())
            return
        if not CAN_CALL_BACK:
            return
        self._pending[key] = work
        future.add_done_callback(done)

    def drain(self) -> None:
        """Wait until every callback has run; for the very end of the process only.

        A callback that finds the interpreter gone would abort the process. It
        takes no longer than without us: gloo's process group waits for the same
        works when it is destroyed, which is what comes next.
        """
        if not self._pending:
            return
        while self._pending:
            time.sleep(POLL_S)
        # The backend's thread still has to take our function apart, for which it needs the GIL.
        time.sleep(UNWIND_S)
