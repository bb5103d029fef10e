"""Lease: which of several processes on one store does the work that only one should do.

Each process writes its claim, and again as long as it lives, before it reads the claims of the
others; the live one that has claimed first has the lease. All times are those of the store's clock.
The work may run twice at once for a moment, when a holder was silent for longer than `TTL_S`.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from typing import TYPE_CHECKING

from rankscope.tracer.span import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from .store import Store

TTL_S = 60
"""Time after its last sign of life from which on the work of a process is another's."""

PAUSE_S = 10.0
"""Pause between two signs of life."""

UPKEEP = "upkeep"

CLAIM = """
INSERT INTO leases (name, holder, since_ns)
WITH toUnixTimestamp64Nano(now64(9)) AS now_ns, at_ns > now_ns - {ttl_ns:Int64} AS is_live
SELECT {name:String}, {holder:String},
    if(countIf(is_live) > 0, argMaxIf(since_ns, at_ns, is_live), now_ns)
FROM leases WHERE name = {name:String} AND holder = {holder:String}
"""
"""A process that was silent for too long claims the work anew, behind the others."""

SELECT_HOLDER = """
SELECT holder FROM leases FINAL
WHERE name = {name:String} AND at_ns > toUnixTimestamp64Nano(now64(9)) - {ttl_ns:Int64}
ORDER BY since_ns, holder LIMIT 1
"""

RELEASE = "DELETE FROM leases WHERE name = {name:String} AND holder = {holder:String}"


class Lease:
    """A claim to a piece of work. An embedded store has one process, which always has it.

    Args:
        is_shared: Whether other processes may have the store open; None: all but embedded ones.
        monotonic_s: Clock that limits how long the last answer of the store counts.
    """

    def __init__(
        self,
        store: Store,
        *,
        name: str = UPKEEP,
        is_shared: bool | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._name = name
        self._is_shared = store.path is None if is_shared is None else is_shared
        self._monotonic_s = monotonic_s
        self._until_s = 0.0
        self.holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        """Name of this process."""

    @property
    def is_held(self) -> bool:
        """True if this process does the work now."""
        return not self._is_shared or self._monotonic_s() < self._until_s

    def renew(self) -> None:
        """Claim the work, or show that this process lives; learn who does it.

        Raises:
            StoreError: The store does not answer. The lease ends by itself.
        """
        if not self._is_shared:
            return
        asked_s = self._monotonic_s()
        bound = {"name": self._name, "holder": self.holder, "ttl_ns": TTL_S * NS_PER_S}
        self._store.command(CLAIM, bound)
        rows = self._store.rows(SELECT_HOLDER, bound)
        is_own = bool(rows) and rows[0]["holder"] == self.holder
        self._until_s = asked_s + TTL_S - PAUSE_S if is_own else 0.0

    def release(self) -> None:
        """Leave the work to another process at once."""
        if self._is_shared:
            self._until_s = 0.0
            self._store.command(RELEASE, {"name": self._name, "holder": self.holder})
