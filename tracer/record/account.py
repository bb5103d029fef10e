"""What the tracer did and what it cost, for whoever reads the process file's header."""

from __future__ import annotations

import time
from time import monotonic_ns
from typing import TYPE_CHECKING

from ..span import NONE
from ..spool import ACCOUNT, ACCOUNT_OFFSET

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .lane import Lane
    from .process_file import ProcessFile


class Account:
    """Adds up records and costs; written by the background thread at each turn."""

    def __init__(self, process: ProcessFile, lanes: Iterable[Lane]) -> None:
        self.resolver_lag_ns: int | None = None
        """Age of the oldest device span not yet resolved; None: no device is timed."""

        self._process = process
        self._lanes = lanes
        self._own_cpu_ns = 0

    def note_own_cost(self) -> None:
        """Read the processor time of the calling thread, which is the background thread."""
        self._own_cpu_ns = time.thread_time_ns()

    def publish(self) -> None:
        """Write the account into the header."""
        self._process.publish_drops()
        # Drops first: what is claimed meanwhile then counts as produced and stored.
        num_lost = self._process.num_lost()
        num_stored = sum(lane.num_stored() for lane in self._lanes)
        lag_ns = self.resolver_lag_ns
        ACCOUNT.pack_into(
            self._process.buffer,
            ACCOUNT_OFFSET,
            num_stored + num_lost,
            num_stored,
            monotonic_ns(),
            self._own_cpu_ns,
            NONE if lag_ns is None else lag_ns,
        )
