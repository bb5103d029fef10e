"""Migrations of the store's tables: the numbered ``.sql`` files of this folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

CREATE_VERSION_TABLE = """
CREATE TABLE IF NOT EXISTS schema_version (
    version UInt32,
    name String,
    applied_at DateTime64(3) DEFAULT now64(3)
) ENGINE = ReplacingMergeTree
ORDER BY version
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1
"""

END = re.compile(r";$", re.MULTILINE)
"""The end of a statement, which ends its line: a text may hold a semicolon."""

SELECT_VERSION = "SELECT max(version) AS version FROM schema_version"


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """One file of statements, each of which may run more than once."""

    version: int
    name: str

    @property
    def is_embedded_only(self) -> bool:
        """True if it is for the embedded engine only; its file's name says so."""
        return "_embedded_" in self.name

    def statements(self) -> tuple[str, ...]:
        """Return the file's statements in order, without comments."""
        text = (resources.files(__package__) / self.name).read_text(encoding="utf-8")
        kept = "\n".join(line for line in text.splitlines() if not line.startswith("--"))
        return tuple(part.strip() for part in END.split(kept) if part.strip())


@cache
def known_migrations() -> tuple[Migration, ...]:
    """Return all migrations by version; the versions have no gap."""
    names = sorted(
        entry.name
        for entry in resources.files(__package__).iterdir()
        if entry.name.endswith(".sql")
    )
    return tuple(Migration(version=int(name.split("_", 1)[0]), name=name) for name in names)
