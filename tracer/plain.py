"""Make anything that a job hands over safe to write down, without running the job's code."""

from __future__ import annotations

import math
from typing import cast

MAX_TEXT = 10_000
MAX_ITEMS = 1_000
MAX_DEPTH = 8
MAX_BITS = 4096
"""Of a number that is written out; Python itself refuses from some 14,000 on."""

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]
"""What JSON can say."""


def type_name(value: object) -> str:
    """Return the name of ``value``'s class, past any ``__class__`` or metaclass of its own."""
    return str(type.__dict__["__name__"].__get__(type(value)))


def plain_text(value: object) -> str | None:
    """Return ``value`` as a plain `str`; None where it is no string. Runs none of its methods."""
    if type(value) is str:
        return value
    # By its type: `isinstance` asks for the value's ``__class__``, which may be code of its own.
    if issubclass(type(value), str):
        return str.__str__(cast("str", value))
    return None


def plain_int(value: object, *, limit: int = 2**63 - 1) -> int | None:
    """Return ``value`` as a plain `int`; None where it is none or lies outside ``[-1, limit]``."""
    if type(value) is not int:
        if not issubclass(type(value), int):
            return None
        value = int.__index__(cast("int", value))
    return value if -1 <= value <= limit else None


def plain(value: object, depth: int = 0) -> Plain:
    """Return a bounded copy of ``value`` that JSON can hold.

    Builtin containers and scalars keep their content up to `MAX_DEPTH`,
    `MAX_ITEMS` and `MAX_TEXT`; anything else becomes its class's name in
    angle brackets. No method of a foreign object is called, so none can
    raise, hang or change anything.
    """
    if value is None or value is True or value is False:
        return value
    text = plain_text(value)
    if text is not None:
        return text[:MAX_TEXT].encode("utf-8", "replace").decode()
    if issubclass(type(value), int):
        number = plain_int(value)
        return number if number is not None else _long_number(cast("int", value))
    if issubclass(type(value), float):
        real = float.__float__(cast("float", value))
        return real if math.isfinite(real) else float.__repr__(real)
    return _plain_container(value, depth)


def _long_number(number: int) -> str:
    bits = int.bit_length(number)
    return f"<int of {bits} bits>" if bits > MAX_BITS else int.__repr__(int.__index__(number))


def _plain_container(value: object, depth: int) -> Plain:
    kind = type(value)
    if depth < MAX_DEPTH and kind is dict:
        return {
            plain_text(key) or f"<{type_name(key)}>": plain(item, depth + 1)
            for key, item in list(value.items())[:MAX_ITEMS]  # type: ignore[attr-defined]
        }
    if depth < MAX_DEPTH and kind in (list, tuple, set, frozenset):
        return [plain(item, depth + 1) for item in list(value)[:MAX_ITEMS]]  # type: ignore[call-overload]
    return f"<{type_name(value)}>"
