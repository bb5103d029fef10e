"""Device timing as the captures use it, here that of a process without a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


NCCL = "nccl"
"""CUDA's `DeviceBackend.comm_backend`."""


class DeviceTimer:
    """Times nothing. `tracer.device.timing.DeviceTiming` replaces it once a device is used.

    No method raises or waits. Marks and pending items are types of `tracer.device`, opaque here.
    """

    __slots__ = ("active", "comm_backend", "side_calls")

    def __init__(self) -> None:
        self.active = False
        """Whether marks are taken; once False, always False."""

        self.comm_backend = NCCL
        """See `DeviceBackend.comm_backend`. Without a device, works of this backend are not
        recorded, because the host does not see their ends."""

        self.side_calls: dict[tuple[int, int], list[Any]] = {}
        """By device and handle of a stream on which nothing computes: the last communication there
        in a list, which is empty once a computing stream has waited for it."""

    def device_of(self, objects: Iterable[object]) -> int | None:
        """Return the device of the first tensor among ``objects``; None if it is not timed."""
        return None

    def mark(self, device: int, stream: Any = None) -> Any | None:  # noqa: ANN401
        """Mark the position of a stream, by default the current one; return None, counted, if that
        is impossible.
        """
        return None

    def begin_compute(self, mark: Any) -> None:  # noqa: ANN401
        """Note that a span of compute has begun at a mark."""

    def end_compute(self, mark: Any) -> None:  # noqa: ANN401
        """Note that the span of compute that began at a mark is left."""

    def computes_on(self, device: int, stream: int) -> bool:
        """Return whether compute has begun on the stream with this handle, or nowhere yet."""
        return True

    def num_open(self, device: int) -> int:
        """Return the number of spans of compute that are open on the device."""
        return 0

    def push(self, pending: Any) -> None:  # noqa: ANN401
        """Queue a pending item, which is written once the device has reached its marks."""
        pending.lose()  # it came after the timing ended

    def release(self, mark: Any) -> None:  # noqa: ANN401
        """Release a mark that is no longer needed."""

    def track_id(self, mark: Any) -> int:  # noqa: ANN401
        """Return the track of a mark's stream; 0, that of `OTHER_NAME`, without a device."""
        return 0

    def lose(self) -> None:
        """Count a span whose device times will never be known."""


NO_DEVICE_TIMING = DeviceTimer()
