"""The words that ClickHouse's native format is made of.

Source: ``VarInt``, ``SerializationString`` and ``SerializationLowCardinality`` of ClickHouse.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

LOW_CARDINALITY_HAS_KEYS = 1 << 9
"""Set where a block of codes brings the texts that they index, as all blocks of an answer do."""

INDEX_WIDTHS = (1, 2, 4, 8)
"""Bytes a code, by the lowest byte of a low cardinality's flags."""


class NativeCursor(ABC):
    """A place in native blocks, from which on words are read."""

    @abstractmethod
    def take(self, num_bytes: int) -> memoryview:
        """Return so many bytes and go on behind them."""

    def varint(self) -> int:
        """Return a whole number of 7 bits a byte, the lowest first."""
        value = shift = 0
        while True:
            (byte,) = self.take(1)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:  # noqa: PLR2004  # the bit that says "more"
                return value
            shift += 7

    def uint64(self) -> int:
        """Return a whole number of 8 bytes."""
        return int.from_bytes(self.take(8), "little")

    def text(self) -> str:
        """Return a text, whose length in bytes comes first."""
        return bytes(self.take(self.varint())).decode()
