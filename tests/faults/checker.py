"""Checker of lost, duplicated, invented and changed rows between producers and the store.

Producers write the oracle on a path of their own and sync every line: a row that it lists as
attempted was attempted, and one that it lists as acknowledged was acknowledged to the producer.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

Key = tuple[str, ...]
"""Key of a row or batch, which is stored once."""


def key_of(*parts: object) -> Key:
    """Return the key of these parts, as it is after JSON encoding and decoding."""
    return tuple(str(part) for part in parts)


def content_hash(*values: object) -> str:
    """Return the SHA-256 of the JSON of values."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


class Oracle:
    """Record of attempted and acknowledged rows.

    Args:
        path: The file; appended to, so that producers restart.
        is_synced: Whether each line is on disk when its call returns. Off only if no process that
            writes it is killed.
    """

    def __init__(self, path: Path, *, is_synced: bool = True) -> None:
        self._is_synced = is_synced
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def attempt(self, key: Key, content: str) -> None:
        """Record that a row is about to be sent; ``content`` is its hash."""
        self._write({"attempt": key, "sha256": content})

    def acknowledge(self, key: Key) -> None:
        """Record that the pipeline acknowledged a row."""
        self._write({"ack": key})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def _write(self, document: Mapping[str, object]) -> None:
        os.write(self._descriptor, json.dumps(document).encode() + b"\n")
        if self._is_synced:
            os.fsync(self._descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of the checker."""

    lost: tuple[Key, ...]
    """Acknowledged and not stored."""

    duplicated: tuple[Key, ...]
    """Found more than once."""

    unexpected: tuple[Key, ...]
    """Stored without an attempt."""

    corrupt: tuple[Key, ...]
    """Stored with a content that was not attempted under that key, or attempted with two."""

    num_recovered: int
    """Stored without an acknowledgement that arrived, which is allowed."""

    num_stored: int
    num_unaccounted: int
    """``produced - stored - dropped - buffered``: 0 if all rows are accounted for."""

    @property
    def is_clean(self) -> bool:
        """True if no row is lost, duplicated, invented, changed or unaccounted for."""
        found = self.lost or self.duplicated or self.unexpected or self.corrupt
        return not found and self.num_unaccounted == 0


@dataclass(slots=True)
class _Record:
    contents: dict[Key, set[str]] = field(default_factory=dict)
    acknowledged: set[Key] = field(default_factory=set)


def check(
    oracle_path: Path,
    stored: Iterable[tuple[Key, str]],
    *,
    num_dropped: int = 0,
    num_buffered: int = 0,
) -> Verdict:
    """Compare the oracle with the results of queries.

    Args:
        oracle_path: File of the `Oracle`.
        stored: (key, hash of the content) of each row that a query returned, with duplicates.
        num_dropped: Number of rows that the pipeline reports as dropped.
        num_buffered: Number of rows that the pipeline reports as buffered.
    """
    record = _read(oracle_path)
    rows = list(stored)
    seen = Counter(key for key, _ in rows)
    ambiguous = {key for key, contents in record.contents.items() if len(contents) > 1}
    changed = {key for key, content in rows if content not in record.contents.get(key, {content})}
    num_produced = len(record.contents)
    return Verdict(
        lost=_ordered(record.acknowledged - seen.keys()),
        duplicated=_ordered(key for key, times in seen.items() if times > 1),
        unexpected=_ordered(seen.keys() - record.contents.keys()),
        corrupt=_ordered(ambiguous | changed),
        num_recovered=len((seen.keys() & record.contents.keys()) - record.acknowledged),
        num_stored=len(seen),
        num_unaccounted=num_produced - len(seen) - num_dropped - num_buffered,
    )


def _ordered(keys: Iterable[Key]) -> tuple[Key, ...]:
    return tuple(sorted(keys))


def _read(path: Path) -> _Record:
    record = _Record()
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break  # The producer was killed while writing this line: not attempted yet.
        document = json.loads(line)
        if "ack" in document:
            record.acknowledged.add(_key(document["ack"]))
        else:
            record.contents.setdefault(_key(document["attempt"]), set()).add(document["sha256"])
    return record


def _key(parts: Sequence[str]) -> Key:
    return tuple(parts)
