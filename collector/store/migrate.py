"""Bring a store's tables to the version that this code knows."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from ..errors import StoreQueryError, StoreVersionError
from .location import ServerLocation

if TYPE_CHECKING:
    from collections.abc import Callable

    from .store import Store

CREATE_VERSION_TABLE = """
CREATE TABLE IF NOT EXISTS schema_version (
    version UInt32,
    name String,
    applied_at DateTime64(3) DEFAULT now64(3)
) ENGINE = ReplacingMergeTree
ORDER BY version
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1
"""

SELECT_VERSION = "SELECT max(version) AS version FROM schema_version"

RETRY_DELAYS_S = (0.5, 1.0, 2.0, 4.0)
"""Pauses before a server is asked again. Two collectors that start at once change the same tables;
a replica that has not yet heard of the one change refuses the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """One numbered file of statements, each safe to run again."""

    version: int
    name: str

    @property
    def is_of_embedded_engine(self) -> bool:
        """Whether it concerns the engine inside rankscope alone, by its file's name."""
        return "_embedded_" in self.name

    def statements(self) -> tuple[str, ...]:
        """Return the file's statements in order, without comment lines."""
        text = (resources.files("rankscope.collector.store.migrations") / self.name).read_text(
            encoding="utf-8"
        )
        kept = "\n".join(line for line in text.splitlines() if not line.startswith("--"))
        return tuple(part.strip() for part in kept.split(";") if part.strip())


@cache
def known_migrations() -> tuple[Migration, ...]:
    """Return the shipped migrations by version; their numbers have no gap."""
    names = sorted(
        entry.name
        for entry in resources.files("rankscope.collector.store.migrations").iterdir()
        if entry.name.endswith(".sql")
    )
    return tuple(Migration(version=int(name.split("_", 1)[0]), name=name) for name in names)


def migrate(store: Store, *, sleep: Callable[[float], None] = time.sleep) -> int:
    """Apply every migration that the store lacks, in order; return its version.

    A current store costs one read. Statements for the embedded engine alone are left out for a
    server. A migration that was cut short runs again:
    its version is recorded after its last statement. A server may be brought up
    by several collectors at once; each statement can be said twice.

    Raises:
        StoreVersionError: The store is of a newer version than this code.
        StoreQueryError: A statement was refused; by a server, after the last retry.
    """
    is_shared = isinstance(store.location, ServerLocation)
    for delay_s in RETRY_DELAYS_S if is_shared else ():
        try:
            return _apply(store)
        except StoreQueryError:
            sleep(delay_s)
    return _apply(store)


def _apply(store: Store) -> int:
    newest = known_migrations()[-1].version
    found = store.schema_version()
    if found > newest:
        raise StoreVersionError(store.url, found=found, known=newest)
    if found < newest:
        store.command(CREATE_VERSION_TABLE)
    is_server = isinstance(store.location, ServerLocation)
    for migration in known_migrations()[found:]:
        is_meant = not (is_server and migration.is_of_embedded_engine)
        for statement in migration.statements() if is_meant else ():
            store.command(statement)
        row = {"version": migration.version, "name": migration.name}
        store.insert_rows("schema_version", [row])
    return newest
