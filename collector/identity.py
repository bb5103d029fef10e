"""Names and numbers of runs and rows in the store."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from .errors import RunNameError

SEGMENT_BITS = 24
MAX_SEGMENT = (1 << SEGMENT_BITS) - 1

MAX_INT32 = (1 << 31) - 1
MAX_INT64 = (1 << 63) - 1
"""Largest values of Int32 and Int64 columns."""

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")

Row = dict[str, Any]
"""One row of a table, by column."""


def segment_id(process: str, number: int) -> int:
    """Return the 64-bit number of a segment, unique among all processes of a rank.

    A restarted rank may reuse (run, epoch, rank) and count its segments from 0 again. So the
    upper 40 bits are a hash of the process, the lower 24 the number in that process.

    Args:
        process: UUID of the process in hex, or the hash of an imported file.
        number: Number of the segment in that process, at most `MAX_SEGMENT`.

    Raises:
        ValueError: The number is out of range.
    """
    if not 0 <= number <= MAX_SEGMENT:
        raise ValueError(f"segment number {number} does not fit {SEGMENT_BITS} bits")
    digest = hashlib.blake2b(process.encode(), digest_size=5).digest()
    return (int.from_bytes(digest, "big") << SEGMENT_BITS) | number


def check_run_name(run_id: str) -> str:
    """Return ``run_id`` unchanged if it is allowed as the name of a run.

    Raises:
        RunNameError: It is empty, too long, or contains a character that is not allowed.
    """
    if not RUN_NAME.fullmatch(run_id):
        raise RunNameError(run_id)
    return run_id
