"""Read the parts of a fault's text ``cause:key=value,...``. Standard library only."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..errors import FaultSpecError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def read_pairs(
    spec: str, text: str, *, cause: str, keys: Sequence[str], optional: Sequence[str]
) -> dict[str, str]:
    """Return the values of ``key=value,...`` by key.

    Args:
        spec: The whole fault, for the message.
        text: What stands behind the colon.
        cause: What stands before it.
        keys: Every key that the cause takes.
        optional: Those of them that may be left out.

    Raises:
        FaultSpecError: Not of that form, or a key is unknown, missing or repeated.
    """
    values: dict[str, str] = {}
    for pair in text.split(","):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not value:
            raise FaultSpecError(spec, f"expected key=value, got {pair!r}")
        if key not in keys:
            raise FaultSpecError(spec, f"unknown key {key!r}: {cause} takes {', '.join(keys)}")
        if key in values:
            raise FaultSpecError(spec, f"{key!r} is given twice")
        values[key] = value
    for key in keys:
        if key not in values and key not in optional:
            raise FaultSpecError(spec, f"{key!r} is missing: {cause} takes {', '.join(keys)}")
    return values


def read_number(spec: str, key: str, text: str) -> int:
    """Return the whole number from 0 on that ``text`` spells.

    Raises:
        FaultSpecError: It spells none.
    """
    if not (text.isascii() and text.isdigit()):
        raise FaultSpecError(spec, f"{key} must be a whole number from 0 on, got {text!r}")
    return int(text)


def read_ranks(spec: str, text: str) -> tuple[int, ...]:
    """Return the ranks that ``5+6`` spells, ascending.

    Raises:
        FaultSpecError: One is no rank, or is named twice.
    """
    ranks = sorted(read_number(spec, "rank", part) for part in text.split("+"))
    if len(set(ranks)) < len(ranks):
        raise FaultSpecError(spec, f"rank names a rank twice: {text!r}")
    return tuple(ranks)


def read_factor(spec: str, text: str) -> float:
    """Return the factor, finite and above 1.

    Raises:
        FaultSpecError: It is not.
    """
    factor = _float(text)
    if not (math.isfinite(factor) and factor > 1):
        raise FaultSpecError(spec, f"factor must be a number above 1, got {text!r}")
    return factor


def read_amount(spec: str, key: str, text: str, *, most: float = math.inf) -> float:
    """Return a finite number above 0 and at most ``most``.

    Raises:
        FaultSpecError: It is not.
    """
    amount = _float(text)
    if not (math.isfinite(amount) and 0 < amount <= most):
        limit = "" if most == math.inf else f" and at most {most:g}"
        raise FaultSpecError(spec, f"{key} must be a number above 0{limit}, got {text!r}")
    return amount


def read_choice(spec: str, key: str, text: str, choices: Iterable[str]) -> str:
    """Return ``text``, one of ``choices``.

    Raises:
        FaultSpecError: It is none of them.
    """
    known = tuple(choices)
    if text not in known:
        raise FaultSpecError(spec, f"{key} must be one of {', '.join(known)}, got {text!r}")
    return text


def read_steps(spec: str, text: str) -> tuple[int, int]:
    """Return the first and last step that ``10-29`` or ``7`` spells.

    Raises:
        FaultSpecError: It spells none, or ends before it starts.
    """
    first_text, dash, last_text = text.partition("-")
    first = read_number(spec, "steps", first_text)
    last = read_number(spec, "steps", last_text) if dash else first
    if last < first:
        raise FaultSpecError(
            spec, f"steps must be FIRST-LAST, got {text!r}: it ends before it starts"
        )
    return first, last


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
