"""Device timing where there is none, so that no caller asks whether there is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable


NCCL = "nccl"
"""CUDA's `DeviceBackend.comm_backend`."""


class DeviceTimer(Protocol):
    """What the captures ask of the device timing. No method raises or waits.

    Its marks and what is pending are types of `tracer.device`, opaque here.
    """

    @property
    def comm_backend(self) -> str:
        """As `DeviceBackend.comm_backend`."""
        ...

    @property
    def active(self) -> bool:
        """Whether marks are taken; once False it stays so."""
        ...

    def device_of(self, objects: Iterable[object]) -> int | None:
        """Return the device of the first tensor among ``objects`` where its work is timed."""
        ...

    def mark(self, device: int) -> Any | None:  # noqa: ANN401
        """Mark where the current stream stands; None, counted, where that cannot be."""
        ...

    def push(self, pending: Any) -> None:  # noqa: ANN401
        """Take what is to be written down once the device has come to its marks."""
        ...

    def release(self, mark: Any) -> None:  # noqa: ANN401
        """Take back a mark that is no longer needed."""
        ...

    def track_id(self, mark: Any) -> int:  # noqa: ANN401
        """Return the track of a mark's stream."""
        ...

    def lose(self) -> None:
        """Count a span whose times on the device will never be known."""
        ...


class NoDeviceTiming:
    """Times nothing."""

    __slots__ = ()

    active = False
    comm_backend = NCCL
    """Works of it are left out: the host knows nothing of their ends."""

    def device_of(self, objects: Iterable[object]) -> None:
        """Return None."""

    def mark(self, device: int) -> None:
        """Return None."""

    def push(self, pending: Any) -> None:  # noqa: ANN401
        """Let go of it: it came too late."""
        pending.lose()

    def release(self, mark: Any) -> None:  # noqa: ANN401
        """Do nothing."""

    def track_id(self, mark: Any) -> int:  # noqa: ANN401
        """Return the track of everything unnamed."""
        return 0

    def lose(self) -> None:
        """Do nothing."""


NO_DEVICE_TIMING = NoDeviceTiming()
