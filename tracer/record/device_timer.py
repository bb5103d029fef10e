"""The interface of device timing, and the timing of a process without a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

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

    def mark(self, device: int) -> Any | None:  # noqa: ANN401
        """Mark the position of the current stream; return None, counted, if that is impossible."""

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
    comm_backend = NCCL
    """Works of this backend are not recorded, because the host does not see their ends."""

    def device_of(self, objects: Iterable[object]) -> None:
        """Return None."""

    def mark(self, device: int) -> None:
        """Return None."""

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
