"""One reading of a host or a device, and what gives such readings."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..errors import CollectorError

if TYPE_CHECKING:
    from pathlib import Path

WHOLE_HOST = -1
"""Device of a reading that belongs to no device."""

PART_MARK = ":"
"""Stands between a name and the part of the host that it is of: ``nic-sent-bytes:eth0``."""

MAX_FILE_BYTES = 4096


class Sample(NamedTuple):
    """One number that was read at one time."""

    at_ns: int
    """Unix time."""

    name: str
    """What was read; ends in its unit, before the mark of a part. See docs/samples.md."""

    value: float
    device: int = WHOLE_HOST
    """Local rank; `WHOLE_HOST` for the host."""


class Source(Protocol):
    """Something that can be read once a second. One thread reads it."""

    @property
    def name(self) -> str:
        """What it is called in what is told of it."""

    def read(self, at_ns: int) -> list[Sample]:
        """Return what it says now; what is unknown is left out, never zero.

        Args:
            at_ns: Unix time that the readings bear.

        Raises:
            SourceAbsentError: The host has no such thing.
        """


class SourceAbsentError(CollectorError):
    """The host does not have what a source reads. The message is one plain line."""


def read_text(path: Path) -> str | None:
    """Return the stripped text of a small file; None where it is missing or can't be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(MAX_FILE_BYTES).decode("ascii", "replace").strip()
    return None


def read_number(path: Path) -> int | None:
    """Return the whole number in a file; None where there is none (``N/A (no PMA)``).

    Nor is one of more than 64 bits, or of 64 that are all set: so reads a device that is gone.
    """
    text = read_text(path)
    if text is None or not text.isascii() or not text.removeprefix("-").isdigit():
        return None
    number = int(text)
    return number if -(1 << 63) <= number < (1 << 64) - 1 else None
