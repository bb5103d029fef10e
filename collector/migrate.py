"""Bring a store's tables to the version that this code knows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from collector.errors import StoreVersionError

if TYPE_CHECKING:
    from collector.store import Store

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """One numbered file of statements, each safe to run again."""

    version: int
    name: str

    def statements(self) -> tuple[str, ...]:
        """Return the file's statements in order, without comment lines."""
        text = (resources.files("collector.migrations") / self.name).read_text(encoding="utf-8")
        kept = "\n".join(line for line in text.splitlines() if not line.startswith("--"))
        return tuple(part.strip() for part in kept.split(";") if part.strip())


@cache
def known_migrations() -> tuple[Migration, ...]:
    """Return the shipped migrations by version; their numbers have no gap."""
    names = sorted(
        entry.name
        for entry in resources.files("collector.migrations").iterdir()
        if entry.name.endswith(".sql")
    )
    return tuple(Migration(version=int(name.split("_", 1)[0]), name=name) for name in names)


def migrate(store: Store) -> int:
    """Apply every migration that the store lacks, in order; return its version.

    A current store costs one read. A migration that was cut short runs again:
    its version is recorded after its last statement.

    Raises:
        StoreVersionError: The store is of a newer version than this code.
    """
    newest = known_migrations()[-1].version
    found = store.schema_version()
    if found > newest:
        raise StoreVersionError(store.url, found=found, known=newest)
    if found < newest:
        store.command(CREATE_VERSION_TABLE)
    for migration in known_migrations()[found:]:
        for statement in migration.statements():
            store.command(statement)
        row = {"version": migration.version, "name": migration.name}
        store.insert_rows("schema_version", [row])
    return newest
