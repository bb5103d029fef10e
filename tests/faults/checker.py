"""What was lost, doubled, made up or changed between those who produced rows and the store.

The oracle is written by whoever produces, on another path than the pipeline's, and synced
line by line: what it says was attempted was, and what it says was acknowledged was told so.
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
    from types import TracebackType

Key = tuple[str, ...]
"""What identifies one thing that is stored once: a row, or a batch."""


def key_of(*parts: object) -> Key:
    """Return the key of these parts, as it is after a journey through JSON."""
    return tuple(str(part) for part in parts)


def content_hash(*values: object) -> str:
    """Return the SHA-256 of values, by their JSON."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


class Oracle:
    """The record of what was attempted and what was acknowledged.

    Args:
        path: The file; appended to, so that producers restart.
        is_synced: Whether each line is on disk when its call returns. Off only where no
            process that writes it is killed.
    """

    def __init__(self, path: Path, *, is_synced: bool = True) -> None:
        self._is_synced = is_synced
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def attempt(self, key: Key, content: str) -> None:
        """Note that a thing is about to be handed over; ``content`` is its hash."""
        self._write({"attempt": key, "sha256": content})

    def acknowledge(self, key: Key) -> None:
        """Note that the pipeline said that it keeps a thing."""
        self._write({"ack": key})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)

    def _write(self, document: Mapping[str, object]) -> None:
        os.write(self._descriptor, json.dumps(document).encode() + b"\n")
        if self._is_synced:
            os.fsync(self._descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the checker found; `is_clean` says whether all of it is as promised."""

    lost: tuple[Key, ...]
    """Acknowledged and not stored."""

    duplicated: tuple[Key, ...]
    """Seen more than once."""

    unexpected: tuple[Key, ...]
    """Stored and never attempted."""

    corrupt: tuple[Key, ...]
    """Stored with a content that nobody attempted under that key, or attempted with two."""

    num_recovered: int
    """Stored without an acknowledgement that arrived: no fault."""

    num_stored: int
    num_unaccounted: int
    """``produced - stored - dropped - buffered``: 0 where the account holds."""

    @property
    def is_clean(self) -> bool:
        """Whether nothing is lost, doubled, made up, changed or unaccounted for."""
        found = self.lost or self.duplicated or self.unexpected or self.corrupt
        return not found and self.num_unaccounted == 0


@dataclass(slots=True)
class _Told:
    contents: dict[Key, set[str]] = field(default_factory=dict)
    acknowledged: set[Key] = field(default_factory=set)


def check(
    oracle_path: Path,
    stored: Iterable[tuple[Key, str]],
    *,
    num_dropped: int = 0,
    num_buffered: int = 0,
) -> Verdict:
    """Compare the oracle with everything that queries show.

    Args:
        oracle_path: What `Oracle` wrote.
        stored: (key, hash of the content as it was read back) of each thing that a query
            returned, as often as it returned it.
        num_dropped: Things that the pipeline says it dropped.
        num_buffered: Things that wait where the pipeline says they do.
    """
    told = _read(oracle_path)
    rows = list(stored)
    seen = Counter(key for key, _ in rows)
    ambiguous = {key for key, contents in told.contents.items() if len(contents) > 1}
    changed = {key for key, content in rows if content not in told.contents.get(key, {content})}
    num_produced = len(told.contents)
    return Verdict(
        lost=_ordered(told.acknowledged - seen.keys()),
        duplicated=_ordered(key for key, times in seen.items() if times > 1),
        unexpected=_ordered(seen.keys() - told.contents.keys()),
        corrupt=_ordered(ambiguous | changed),
        num_recovered=len((seen.keys() & told.contents.keys()) - told.acknowledged),
        num_stored=len(seen),
        num_unaccounted=num_produced - len(seen) - num_dropped - num_buffered,
    )


def _ordered(keys: Iterable[Key]) -> tuple[Key, ...]:
    return tuple(sorted(keys))


def _read(path: Path) -> _Told:
    told = _Told()
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break  # the producer was killed in the middle of it: not attempted yet
        document = json.loads(line)
        if "ack" in document:
            told.acknowledged.add(_key(document["ack"]))
        else:
            told.contents.setdefault(_key(document["attempt"]), set()).add(document["sha256"])
    return told


def _key(parts: Sequence[str]) -> Key:
    return tuple(parts)
