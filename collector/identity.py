"""What a row and a run are called in the store."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from .errors import RunNameError

SEGMENT_BITS = 24
MAX_SEGMENT = (1 << SEGMENT_BITS) - 1

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")

Row = dict[str, Any]
"""One row of a table of the store, by column."""


def segment_id(process: str, number: int) -> int:
    """Return the number of a segment that no other process of the rank shares.

    A restarted rank may reuse (run, epoch, rank) and count its segments from 0
    again, so the upper 40 bits are a hash of the process and the lower 24 the
    process's own count.

    Args:
        process: The process's uuid in hex, or the hash of an imported file.
        number: The segment's number in that process, at most `MAX_SEGMENT`.
    """
    if not 0 <= number <= MAX_SEGMENT:
        raise ValueError(f"segment number {number} does not fit {SEGMENT_BITS} bits")
    digest = hashlib.blake2b(process.encode(), digest_size=5).digest()
    return (int.from_bytes(digest, "big") << SEGMENT_BITS) | number


def check_run_name(run_id: str) -> str:
    """Return ``run_id`` if it can name a run.

    Raises:
        RunNameError: It is empty, too long, or has a character outside the allowed ones.
    """
    if not RUN_NAME.fullmatch(run_id):
        raise RunNameError(run_id)
    return run_id
