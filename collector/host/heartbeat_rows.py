"""Heartbeats as rows of table ``heartbeats``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from ..names import storable_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..identity import Row
    from .heartbeat import Heartbeat

TEXTS = ("host", "address", "pod", "hardware", "state")


def beat_row(beat: Heartbeat) -> Row:
    """Return a heartbeat as a row; its texts are safe to store."""
    row = asdict(beat)
    return row | {name: storable_name(row[name]) for name in TEXTS}


def beat_sink(add: Callable[[Sequence[Row]], None]) -> Callable[[Sequence[Heartbeat]], None]:
    """Return what hands heartbeats on to ``add`` as rows; it must not wait for anybody."""

    def write(beats: Sequence[Heartbeat]) -> None:
        add([beat_row(beat) for beat in beats])

    return write
