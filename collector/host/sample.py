"""Samples of a host or a device, the interface of their sources, and sums of counters."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from ..errors import CollectorError

WHOLE_HOST = -1
"""Device of a sample that belongs to no device."""

PART_MARK = ":"
"""Separator between a name and a part of the host: ``nic-sent-bytes:eth0``."""

MAX_FILE_BYTES = 4096

MAX_PARTS = 4096
"""Largest number of counters: 64 ports of 64 counters."""

WRAP_BITS = 32
MAX_WRAPPED_GROWTH = 1 << 28
"""A counter that fell is assumed to have 32 bits and to have overflowed, if that means no more
growth than this: more packets than a port of 400 Gb/s moves in a second."""

MOST_BACK_RATIO = 0.5
"""A counter that fell to more than this share of its value was not reset to zero. It stepped back,
as sums over a driver's queues do, and its growth is unknown."""


class Sample(NamedTuple):
    """One value that was read at one time."""

    at_ns: int
    """Unix time."""

    name: str
    """Name of the quantity with its unit, and a part after `PART_MARK`. See docs/samples.md."""

    value: float
    device: int = WHOLE_HOST
    """Local rank of the device; `WHOLE_HOST` for the host."""


class Source(Protocol):
    """Source of samples that is read once a second, by one thread."""

    @property
    def name(self) -> str:
        """Name of the source in messages."""

    def read(self, at_ns: int) -> list[Sample]:
        """Return the current samples. Unknown values are left out, never zero.

        Args:
            at_ns: Unix time of the samples.

        Raises:
            SourceAbsentError: The host has no such device or counter.
        """


class SourceAbsentError(CollectorError):
    """The host does not have what a source reads. The message is one line."""


def read_text(path: Path) -> str | None:
    """Return the stripped text of a small file; None if it is missing or cannot be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(MAX_FILE_BYTES).decode("ascii", "replace").strip()
    return None


def read_number(path: Path) -> int | None:
    """Return the integer in a file; None if there is none (``N/A (no PMA)``).

    None too for more than 64 bits, and for 64 set bits, which a device that is gone returns.
    """
    text = read_text(path)
    if text is None or not text.isascii() or not text.removeprefix("-").isdigit():
        return None
    number = int(text)
    return number if -(1 << 63) <= number < (1 << 64) - 1 else None


VMSTAT = Path("/proc/vmstat")


def read_vmstat(name: str, path: Path = VMSTAT) -> int | None:
    """Return one of the kernel's counters of memory; None if it has none of this name."""
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text("ascii").splitlines():
            if line.startswith(f"{name} "):
                return int(line.partition(" ")[2])
    return None


@dataclass(slots=True)
class _Part:
    raws: dict[str, int] = field(default_factory=dict)
    growth: int = 0
    reported: int | None = None


@dataclass(slots=True)
class CounterTotals:
    """Growth of counters since the first reading, summed by name.

    No sum falls or jumps if a port disappears and returns, a counter overflows or a driver is
    loaded again.
    """

    num_refused: int = 0
    """Counters ignored beyond `MAX_PARTS`."""

    _parts: dict[tuple[str, str], _Part] = field(default_factory=dict)
    _sums: dict[str, int] = field(default_factory=dict)

    def add_reading(
        self, name: str, part: str, raw: int, *, scale: int = 1, counter: str = ""
    ) -> None:
        """Add a reading of a counter.

        Args:
            name: Name of the sum.
            part: Port of the counter.
            scale: Factor from the counter's unit to the unit of the name.
            counter: Name of the counter, if the port has several for this sum. Each may be reset
                alone.
        """
        known = self._parts.get((name, part))
        if known is None:
            if len(self._parts) >= MAX_PARTS:
                self.num_refused += 1
                return
            known = self._parts[name, part] = _Part()
            self._sums.setdefault(name, 0)
        growth = growth_between(known.raws.get(counter, raw), raw) * scale
        known.raws[counter] = raw
        known.growth += growth
        self._sums[name] += growth

    def total(self, name: str) -> int | None:
        """Return the growth over all ports; None if no counter has this name."""
        return self._sums.get(name)

    def samples(self, at_ns: int) -> list[Sample]:
        """Return each sum, and the growth of each port if it changed since the last call."""
        found = [Sample(at_ns, name, float(total)) for name, total in self._sums.items()]
        for (name, port), part in self._parts.items():
            if part.reported != part.growth:
                part.reported = part.growth
                found.append(Sample(at_ns, f"{name}{PART_MARK}{port}", float(part.growth)))
        return found


def growth_between(before: int, now: int) -> int:
    """Return the growth of a counter between two readings, after an overflow or a reset too.

    0 if it stepped back.
    """
    if now >= before:
        return now - before
    wrapped = now + (1 << WRAP_BITS) - before
    if 0 <= wrapped <= MAX_WRAPPED_GROWTH:
        return wrapped
    return now if now <= MOST_BACK_RATIO * before else 0
