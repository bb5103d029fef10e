"""Whose a run is: what one owner began, another owner's token can't write to.

The owner is the holder of the token, up to an ``@``: the agents of one job carry tokens of
``team`` or of ``team@host``, and write to one run. The server's own token and those of
administrators write everywhere and own nothing.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..http.tokens import Role

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..http.tokens import Grant
    from ..store.store import Store

SELECT_OWNER = """
SELECT owner FROM owners WHERE run_id = {run_id:String} ORDER BY at_ns, owner LIMIT 1
"""

MAX_KNOWN = 10_000


def owner_of(grant: Grant) -> str | None:
    """Return whom a grant writes for; None where it may write to anybody's runs."""
    if grant.role is Role.ADMIN or grant.token_id is None:
        return None
    return grant.holder.partition("@")[0]


class Owners:
    """The owners of runs, kept in the store.

    Args:
        store: An open store.
        unix_ns: Clock for when a run was claimed.
    """

    def __init__(self, store: Store, *, unix_ns: Callable[[], int] = time.time_ns) -> None:
        self._store = store
        self._unix_ns = unix_ns
        self._known: dict[str, str] = {}

    def may_write(self, run_id: str, owner: str | None) -> bool:
        """Return whether ``owner`` may write to a run; the first who asks owns it.

        Raises:
            StoreError: The claims can't be read or written.
        """
        if owner is None:
            return True
        known = self._known.get(run_id)
        if known is None:
            known = self._read(run_id)
            if known is None:
                claim = {"run_id": run_id, "at_ns": self._unix_ns(), "owner": owner}
                self._store.insert_rows("owners", [claim])
                known = self._read(run_id)  # another collector may have been first
            if known is not None:
                while len(self._known) >= MAX_KNOWN:
                    del self._known[next(iter(self._known))]
                self._known[run_id] = known
        return known == owner

    def _read(self, run_id: str) -> str | None:
        rows = self._store.rows(SELECT_OWNER, {"run_id": run_id})
        return rows[0]["owner"] if rows else None
