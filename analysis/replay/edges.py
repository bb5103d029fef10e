"""Dependencies as they are found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Edges:
    """Pairs of operations: the one waited for, and the one that waits."""

    def __init__(self) -> None:
        self._src: list[NDArray[np.int64]] = []
        self._dst: list[NDArray[np.int64]] = []

    def add(self, src: NDArray[np.int64], dst: NDArray[np.int64]) -> None:
        """Let each of ``dst`` wait for the one of ``src`` beside it."""
        self._src.append(src)
        self._dst.append(dst)

    def chain(self, rows: NDArray[np.int64], key: NDArray[np.int64]) -> None:
        """Let each row wait for the one before it with the same key; rows come sorted by key."""
        same = key[1:] == key[:-1]
        self.add(rows[:-1][same], rows[1:][same])

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (src, dst) of all that were added."""
        return np.concatenate(self._src), np.concatenate(self._dst)
