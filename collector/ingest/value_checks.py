"""What a value of a description may be: how it is taken, and how that is described to programs."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..identity import RUN_NAME
from ..names import storable_name

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_MEMBERS = 65_536
MAX_ENTRIES = 512
MAX_TEXT_LETTERS = 4 << 20
"""A manifest lists the hosts of the whole job, and an event may hold a stack of each thread."""


@dataclass(frozen=True, slots=True)
class Check:
    """A type of value."""

    take: Callable[[Any], Any]
    """Returns the value as it is stored; raises `ValueError` where it is of another type."""

    schema: dict[str, Any]
    """The same in JSON Schema."""


def integer(bits: int, *, signed: bool = True) -> Check:
    """Return the check for an integer of so many bits; 2.0 is one, as in JSON Schema."""
    low = -(1 << (bits - 1)) if signed else 0
    high = (1 << (bits - 1 if signed else bits)) - 1

    def take(value: Any) -> int:  # noqa: ANN401  # whatever JSON holds
        is_whole = type(value) is int or (type(value) is float and value.is_integer())
        if not is_whole or not low <= value <= high:
            raise ValueError(f"expected an integer from {low} to {high}")
        return int(value)

    # FastAPI writes bounds as floats, which hold a power of two and not the number before it.
    return Check(take, {"type": "integer", "minimum": low, "exclusiveMaximum": high + 1})


def optional(check: Check) -> Check:
    """Return the check for such a value or null."""
    return Check(
        lambda value: None if value is None else check.take(value),
        {"anyOf": [check.schema, {"type": "null"}]},
    )


def mapping(check: Check) -> Check:
    """Return the check for an object whose values are such ones."""

    def take(value: Any) -> dict[str, Any]:  # noqa: ANN401  # as above
        if not isinstance(value, dict) or len(value) > MAX_ENTRIES:
            raise ValueError(f"expected an object of at most {MAX_ENTRIES} entries")
        return {_word(name): check.take(inner) for name, inner in value.items()}

    return Check(
        take,
        {
            "type": "object",
            "maxProperties": MAX_ENTRIES,
            "additionalProperties": check.schema,
        },
    )


def _float(value: Any) -> float:  # noqa: ANN401  # as above
    if type(value) in {int, float}:
        with suppress(OverflowError):  # an integer may be larger than any float
            number = float(value)
            if math.isfinite(number):
                return number
    raise ValueError("expected a finite number")


def _word(value: Any) -> str:  # noqa: ANN401  # as above
    """Return a name, safe to store; the same as the tail writes."""
    if not isinstance(value, str):
        raise ValueError("expected a text")  # noqa: TRY004  # one kind of error for all checks
    return storable_name(value)


def _text(value: Any) -> str:  # noqa: ANN401  # as above
    """Return a text that may hold line breaks (a traceback, a document)."""
    if not isinstance(value, str) or len(value) > MAX_TEXT_LETTERS:
        raise ValueError(f"expected a text of at most {MAX_TEXT_LETTERS} letters")
    kept = "".join(letter if letter in "\n\t" or letter.isprintable() else "�" for letter in value)
    return kept.encode("utf-8", "replace").decode()


def _members(value: Any) -> list[int]:  # noqa: ANN401  # as above
    if not isinstance(value, list) or len(value) > MAX_MEMBERS:
        raise ValueError(f"expected a list of at most {MAX_MEMBERS} ranks")
    return [INT32.take(member) for member in value]


INT32, INT64, UINT64 = integer(32), integer(64), integer(64, signed=False)
OPT_INT64 = optional(INT64)
FLOAT = Check(_float, {"type": "number"})
OPT_FLOAT = optional(FLOAT)
WORD = Check(_word, {"type": "string"})
RUN = Check(_word, {"type": "string", "pattern": f"^{RUN_NAME.pattern}$"})
RUN_OR_NONE = Check(_word, {"type": "string", "pattern": f"^({RUN_NAME.pattern})?$"})
TEXT = Check(_text, {"type": "string", "maxLength": MAX_TEXT_LETTERS})
MEMBERS = Check(_members, {"type": "array", "maxItems": MAX_MEMBERS, "items": INT32.schema})
