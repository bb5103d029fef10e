"""The interface of device timing, and the timing of a process without a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable


NCCL = "nccl"
"""CUDA's `DeviceBackend.comm_backend`."""


class DeviceTimer(Protocol):
    """Device timing as the captures use it. No method raises or waits.

    Marks and pending items are types of `tracer.device`, opaque here.
    """

    @property
    def comm_backend(self) -> str:
        """See `DeviceBackend.comm_backend`."""

    @property
    def active(self) -> bool:
        """True while marks are taken; once False, always False."""

    def device_of(self, objects: Iterable[object]) -> int | None:
        """Return the device of the first tensor among ``objects``; None if it is not timed."""

    @property
    def side_calls(self) -> dict[tuple[int, int], list[Any]]:
        """By device and handle of a stream on which nothing computes: the last communication there
        in a list, which is empty once a computing stream has waited for it.
        """

    def mark(self, device: int, stream: Any = None) -> Any | None:  # noqa: ANN401
        """Mark the position of a stream, by default the current one; return None, counted, if that
        is impossible.
        """

    def begin_compute(self, mark: Any) -> None:  # noqa: ANN401
        """Note that a span of compute has begun at a mark."""

    def end_compute(self, mark: Any) -> None:  # noqa: ANN401
        """Note that the span of compute that began at a mark is left."""

    def computes_on(self, device: int, stream: int) -> bool:
        """Return whether compute has begun on the stream with this handle, or nowhere yet."""

    def num_open(self, device: int) -> int:
        """Return the number of spans of compute that are open on the device."""

    def push(self, pending: Any) -> None:  # noqa: ANN401
        """Queue a pending item, which is written once the device has reached its marks."""

    def release(self, mark: Any) -> None:  # noqa: ANN401
        """Release a mark that is no longer needed."""

    def track_id(self, mark: Any) -> int:  # noqa: ANN401
        """Return the track of a mark's stream."""

    def lose(self) -> None:
        """Count a span whose device times will never be known."""


class NoDeviceTiming:
    """Device timing of a process without a device: takes no marks."""

    __slots__ = ()

    active = False
    side_calls: ClassVar[dict[tuple[int, int], list[Any]]] = {}
    comm_backend = NCCL
    """Works of this backend are not recorded, because the host does not see their ends."""

    def device_of(self, objects: Iterable[object]) -> None:
        """Return None."""

    def mark(self, device: int, stream: Any = None) -> None:  # noqa: ANN401
        """Return None."""

    def begin_compute(self, mark: Any) -> None:  # noqa: ANN401
        """Do nothing."""

    def end_compute(self, mark: Any) -> None:  # noqa: ANN401
        """Do nothing."""

    def computes_on(self, device: int, stream: int) -> bool:
        """Return True."""
        return True

    def num_open(self, device: int) -> int:
        """Return 0."""
        return 0

    def push(self, pending: Any) -> None:  # noqa: ANN401
        """Discard an item that came after the timing ended."""
        pending.lose()

    def release(self, mark: Any) -> None:  # noqa: ANN401
        """Do nothing."""

    def track_id(self, mark: Any) -> int:  # noqa: ANN401
        """Return 0, the track of `OTHER_NAME`."""
        return 0

    def lose(self) -> None:
        """Do nothing."""


NO_DEVICE_TIMING = NoDeviceTiming()
