"""Owners of runs and of the clocks of hosts. Only the owner writes to them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from .store import Store

SERVER = "@server"
"""Owner of what the server stores itself: its own spool, simulations and imports, and what comes
with its own token. No holder of a token has this name: theirs end before an ``@``."""

MAX_KNOWN_OWNERS = 10_000

SELECT_OWNER = """
SELECT owner FROM owners WHERE run_id = {run_id:String} ORDER BY at_ns, owner LIMIT 1
"""

SELECT_ROWS = """
SELECT run_id FROM runs WHERE run_id = {run_id:String} LIMIT 1 UNION ALL
SELECT run_id FROM ranks WHERE run_id = {run_id:String} LIMIT 1 UNION ALL
SELECT run_id FROM ledger WHERE run_id = {run_id:String} LIMIT 1 UNION ALL
SELECT run_id FROM events WHERE run_id = {run_id:String} LIMIT 1 UNION ALL
SELECT run_id FROM manifests WHERE run_id = {run_id:String} LIMIT 1
"""

SELECT_CLOCK_ROWS = """
SELECT host FROM clock WHERE host = {host:String} AND boot_id = {boot_id:String} LIMIT 1
"""


class Owners:
    """Owners of runs and clocks: only the owner may write.

    The owner is the holder of the first token that wrote, up to an ``@``: the agents of one job
    have tokens of ``team`` or ``team@host``, and write to one run. What was written without a claim
    is the server's. The server's own token and those of administrators may write everywhere.
    """

    def __init__(self, store: Store, *, unix_ns: Callable[[], int] = time.time_ns) -> None:
        self._store = store
        self._unix_ns = unix_ns
        self._known: dict[str, str] = {}

    def may_write(self, run_id: str, owner: str | None) -> bool:
        """Return whether ``owner`` may write to a run; claim the run if it has no owner.

        Args:
            owner: Name of the owner; None for one who may write everywhere, for the server.

        Raises:
            StoreError: The claims cannot be read or written.
        """
        return self._may_write(run_id, owner, lambda: self._has_rows(run_id))

    def may_write_clock(self, host: str, boot_id: str, owner: str | None) -> bool:
        """Return whether ``owner`` may write the clock of a boot of a host. See `may_write`."""
        bound = {"host": host, "boot_id": boot_id}
        key = f"@{boot_id}@{host}"  # no run has an "@" in its name
        return self._may_write(key, owner, lambda: bool(self._store.rows(SELECT_CLOCK_ROWS, bound)))

    def may_read(self, run_id: str, owner: str | None) -> bool:
        """Return whether ``owner`` may ask what is stored of a run, without a claim to it."""
        if owner is None:
            return True
        return self._find(run_id, lambda: self._has_rows(run_id)) in {None, owner}

    def _may_write(self, key: str, owner: str | None, has_rows: Callable[[], bool]) -> bool:
        current = self._find(key, has_rows)
        if current is None:
            claim = {"run_id": key, "at_ns": self._unix_ns(), "owner": owner or SERVER}
            self._store.insert_rows("owners", [claim])
            current = self._find(key, has_rows)  # another collector may have claimed it first
        return owner is None or current == owner

    def _find(self, key: str, has_rows: Callable[[], bool]) -> str | None:
        current = self._known.get(key)
        if current is None:
            rows = self._store.rows(SELECT_OWNER, {"run_id": key})
            current = rows[0]["owner"] if rows else SERVER if has_rows() else None
            if current is not None:
                while len(self._known) >= MAX_KNOWN_OWNERS:
                    self._known.pop(next(iter(self._known)), None)
                self._known[key] = current
        return current

    def _has_rows(self, run_id: str) -> bool:
        return bool(self._store.rows(SELECT_ROWS, {"run_id": run_id}))
