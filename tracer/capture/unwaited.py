"""What was launched and nobody has waited for yet, by work, by tensor and by thread."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tracer.capture.launch import Launch

MAX_UNWAITED = 512
"""Launches remembered until somebody waits for them; older ones are let go."""


class _Entry(NamedTuple):
    launch: Launch
    work_keys: list[int]
    storages: tuple[int, ...]


class Unwaited:
    """Remembers launches without keeping the job's works or memory alive.

    Of a work it holds a weak reference, and of a tensor the storage's address, kept from
    being given to another by a weak reference too. Each method may be called by any thread.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        """By `id` of the launch, oldest first; taking one out is what claims it."""

        self._by_work: dict[int, tuple[weakref.ref[Any], tuple[Launch, ...]]] = {}
        self._by_storage: dict[int, list[Launch]] = {}

    def add(self, launch: Launch, written: object) -> None:
        """Remember a launch.

        Args:
            launch: What was launched.
            written: What it writes to, tensors nested in lists; None: nobody can wait
                for it by a tensor.
        """
        storages = () if written is None else tuple(_weak_storages(written))
        self._entries[id(launch)] = _Entry(launch, [], storages)
        for storage in storages:
            self._by_storage.setdefault(storage, []).append(launch)

    def bind(self, work: Any, launches: Iterable[Launch]) -> None:  # noqa: ANN401 - a pybind class
        """Say that whoever waits for ``work`` waits for all of ``launches``."""
        bound = tuple(launches)
        self._by_work[id(work)] = (weakref.ref(work), bound)
        for launch in bound:
            entry = self._entries.get(id(launch))
            if entry is not None:
                entry.work_keys.append(id(work))

    def of_work(self, work: Any) -> list[Launch]:  # noqa: ANN401 - a pybind class
        """Return the launches that nobody has yet waited for by ``work``, oldest first."""
        known = self._by_work.get(id(work))
        if known is None or known[0]() is not work:
            return []
        return [launch for launch in known[1] if id(launch) in self._entries]

    def of_tensor(self, tensor: Any) -> list[Launch]:  # noqa: ANN401 - of any subclass
        """Return the launches that still write to the tensor's storage, oldest first."""
        if not self._by_storage:
            return []
        with contextlib.suppress(NotImplementedError, RuntimeError):
            return list(self._by_storage.get(tensor.untyped_storage()._cdata, ()))
        return []

    def of_thread(self, thread_id: int, since_ns: int) -> list[Launch]:
        """Return what a thread launched since then, oldest first."""
        if not self._entries:
            return []
        return [
            entry.launch
            for entry in list(self._entries.values())
            if entry.launch.thread_id == thread_id and entry.launch.start_ns >= since_ns
        ]

    def take(self, launch: Launch) -> bool:
        """Forget a launch; False where somebody else has done so before."""
        entry = self._entries.pop(id(launch), None)
        if entry is None:
            return False
        for key in entry.work_keys:
            known = self._by_work.get(key)
            if (
                known is not None
                and launch in known[1]
                and not any(id(one) in self._entries for one in known[1])
            ):
                self._by_work.pop(key, None)
        for storage in entry.storages:
            self._forget_storage(storage, launch)
        return True

    def take_excess(self) -> list[Launch]:
        """Forget and return the oldest launches beyond `MAX_UNWAITED`."""
        excess = len(self._entries) - MAX_UNWAITED
        if excess <= 0:
            return []
        oldest = [entry.launch for entry in list(self._entries.values())[:excess]]
        return [launch for launch in oldest if self.take(launch)]

    def take_all(self) -> list[Launch]:
        """Forget and return everything."""
        everything = [entry.launch for entry in list(self._entries.values())]
        return [launch for launch in everything if self.take(launch)]

    def _forget_storage(self, storage: int, launch: Launch) -> None:
        waiting = self._by_storage.get(storage)
        if waiting is not None:
            with contextlib.suppress(ValueError):
                waiting.remove(launch)
            if not waiting:
                self._by_storage.pop(storage, None)
        torch.UntypedStorage._free_weak_ref(storage)  # type: ignore[no-untyped-call]


def _weak_storages(written: object) -> list[int]:
    """Return the storages' addresses, each with a weak reference that the caller must free."""
    if isinstance(written, torch.Tensor):
        try:
            return [cast("int", written.untyped_storage()._weak_ref())]
        except (NotImplementedError, RuntimeError):
            # A sparse tensor has no storage of its own; `wait_tensor` cannot take it either.
            return []
    if isinstance(written, (list, tuple)):
        return [storage for item in written for storage in _weak_storages(item)]
    return []
