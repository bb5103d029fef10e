"""A moment of a stream that was asked for and is not yet known."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .backend import DeviceEvent


class Mark(NamedTuple):
    """An event that was recorded on a stream."""

    event: DeviceEvent
    device: int
    stream: int
    """Handle of the stream."""

    launch_ns: int
    """When the host recorded it, monotonic."""
