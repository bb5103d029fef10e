"""One reading of a host or a device, and what gives such readings."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
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


MAX_PARTS = 4096
"""Counters that are followed at once: 64 ports of 64 counters."""

WRAP_BITS = 32
MAX_WRAPPED_GROWTH = 1 << 28
"""A counter that fell is taken for one of 32 bits that ran over where that means no more growth
than this: more packets than a port of 400 Gb/s moves in a second."""

MOST_BACK_RATIO = 0.5
"""A counter that fell by less than this has not begun anew at zero: it stepped back, as sums over
the queues of a driver do, and how far it went meanwhile is not known."""


@dataclass(slots=True)
class _Part:
    raws: dict[str, int] = field(default_factory=dict)
    grown: int = 0
    told: int | None = None


@dataclass(slots=True)
class GrowingTotals:
    """Growth of counters since the first reading, summed by name.

    A port that goes away and comes back, a counter that runs over and a driver
    that is loaded anew make no sum fall or jump.
    """

    num_refused: int = 0
    """Counters not followed, because `MAX_PARTS` are."""

    _parts: dict[tuple[str, str], _Part] = field(default_factory=dict)
    _sums: dict[str, int] = field(default_factory=dict)

    def count(self, name: str, part: str, raw: int, *, scale: int = 1, counter: str = "") -> None:
        """Take a reading.

        Args:
            name: What is counted.
            part: The port that counts it.
            raw: The counter as it stands.
            scale: The name's units in one of the counter's.
            counter: Which of several that one port has for this name: each may begin anew alone.
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
        known.grown += growth
        self._sums[name] += growth

    def total(self, name: str) -> int | None:
        """Return the growth of a name over all ports; None where nothing counts it."""
        return self._sums.get(name)

    def samples(self, at_ns: int) -> list[Sample]:
        """Return each sum, and each port's own growth where it changed since it was told."""
        found = [Sample(at_ns, name, float(total)) for name, total in self._sums.items()]
        for (name, port), part in self._parts.items():
            if part.told != part.grown:
                part.told = part.grown
                found.append(Sample(at_ns, f"{name}{PART_MARK}{port}", float(part.grown)))
        return found


def growth_between(before: int, now: int) -> int:
    """Return how far a counter went between two readings, over the end of 32 bits or from zero.

    0 where it stepped back.
    """
    if now >= before:
        return now - before
    wrapped = now + (1 << WRAP_BITS) - before
    if 0 <= wrapped <= MAX_WRAPPED_GROWTH:
        return wrapped
    return now if now <= MOST_BACK_RATIO * before else 0
