"""Numbered migrations of the store's tables: one ``.sql`` file each, in this folder."""

from __future__ import annotations

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

SELECT_VERSION = "SELECT max(version) AS version FROM schema_version"


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
        text = (resources.files(__package__) / self.name).read_text(encoding="utf-8")
        kept = "\n".join(line for line in text.splitlines() if not line.startswith("--"))
        return tuple(part.strip() for part in kept.split(";") if part.strip())


@cache
def known_migrations() -> tuple[Migration, ...]:
    """Return the shipped migrations by version; their numbers have no gap."""
    names = sorted(
        entry.name
        for entry in resources.files(__package__).iterdir()
        if entry.name.endswith(".sql")
    )
    return tuple(Migration(version=int(name.split("_", 1)[0]), name=name) for name in names)
