"""Plain copies of values that the job passes, made without running the job's code."""

from __future__ import annotations

import itertools
import math
import sys
from typing import TYPE_CHECKING, Any, cast

from ..span import NONE

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_TEXT = 10_000
MAX_ITEMS = 1_000
MAX_DEPTH = 8
MAX_COST = 100_000
"""Cost of one copy: 1 per item, and 1 more per 16 characters of its text.

The limit ends the copy of a container that holds another many times or itself, and bounds the time
that the training waits for the copy.
"""

CHARACTERS_PER_COST = 16
MAX_BITS = 4096
"""Size of a number that is written in full; Python itself rejects numbers of about 14,000 bits."""

INT32_MAX = 2**31 - 1

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]
"""A value that JSON can represent."""


def type_name(value: object) -> str:
    """Return the name of ``value``'s class, ignoring a ``__class__`` or metaclass of its own."""
    return str(type.__dict__["__name__"].__get__(type(value)))


def plain_text(value: object) -> str | None:
    """Return ``value`` as a plain `str`, None if it is not a string. Runs none of its methods."""
    if type(value) is str:
        return value
    # Not `isinstance`, which reads the value's ``__class__``: that may run code of the job.
    if issubclass(type(value), str):
        return str.__str__(cast("str", value))
    return None


def plain_int(value: object, *, limit: int = 2**63 - 1) -> int | None:
    """Return ``value`` as a plain `int`, None if it is not one or outside ``[-1, limit]``."""
    if type(value) is not int:
        if not issubclass(type(value), int):
            return None
        value = int.__index__(cast("int", value))
    return value if -1 <= value <= limit else None


def plain_copy(value: object) -> Plain:
    """Return a bounded copy of ``value`` that JSON can represent.

    Builtin containers and scalars keep their content up to `MAX_DEPTH`, `MAX_ITEMS`, `MAX_TEXT`
    and `MAX_COST`. Any other value becomes the name of its class in angle brackets. No method of
    such a value is called, so none can raise, hang or change anything.
    """
    return _Copy().of(value, 0)


class _Copy:
    """One copy in progress, and the cost that is left for it."""

    def __init__(self) -> None:
        self._left = MAX_COST

    def of(self, value: object, depth: int) -> Plain:
        self._left -= 1
        if value is None or value is True or value is False:
            return value
        text = plain_text(value)
        if text is not None:
            return self._text(text)
        if issubclass(type(value), int):
            number = plain_int(value)
            if number is not None:
                return number
            long = cast("int", value)
            bits = int.bit_length(long)
            return f"<int of {bits} bits>" if bits > MAX_BITS else int.__repr__(int.__index__(long))
        if issubclass(type(value), float):
            real = float.__float__(cast("float", value))
            return real if math.isfinite(real) else float.__repr__(real)
        return self._container(value, depth)

    def _text(self, text: str) -> str:
        kept = text[:MAX_TEXT]
        self._left -= len(kept) // CHARACTERS_PER_COST
        return kept.encode("utf-8", "replace").decode()

    def _container(self, value: object, depth: int) -> Plain:
        kind = type(value)
        if depth < MAX_DEPTH and self._left > 0:
            # The list is made in one C call, so no other thread changes the container during it.
            if kind is dict:
                items = list(itertools.islice(value.items(), MAX_ITEMS))  # type: ignore[attr-defined]
                return {
                    self._text(plain_text(key) or f"<{type_name(key)}>"): self.of(item, depth + 1)
                    for key, item in items
                    if self._left > 0
                }
            if kind in (list, tuple, set, frozenset):
                members = list(itertools.islice(value, MAX_ITEMS))  # type: ignore[call-overload]
                return [self.of(member, depth + 1) for member in members if self._left > 0]
        return f"<{type_name(value)}>"


class Arguments:
    """Checks of arguments; an invalid one is replaced and counted, never raised.

    No method of an argument is called.
    """

    __slots__ = ("_on_invalid",)

    def __init__(self, on_invalid: Callable[[], None]) -> None:
        self._on_invalid = on_invalid

    def name(self, value: object) -> str:
        """Return ``value`` if it is a name, else the name of its class in angle brackets."""
        text = plain_text(value)
        if text:
            return text
        self._on_invalid()
        return "<empty>" if text == "" else f"<{type_name(value)}>"

    def step(self, value: object) -> int:
        """Return ``value`` if it is a step number, else 0."""
        number = plain_int(value, limit=INT32_MAX)
        if number is None:
            self._on_invalid()
            return 0
        return number

    def index(self, value: object) -> int:
        """Return ``value`` if it is an index of a micro-batch or chunk, else `NONE`."""
        number = plain_int(value, limit=INT32_MAX)
        if number is None:
            self._on_invalid()
            return NONE
        return number

    def count(self, value: object) -> int:
        """Return ``value`` if it is a count, else `NONE`; None is valid and gives `NONE`."""
        if value is None:
            return NONE
        number = plain_int(value)
        if number is None:
            self._on_invalid()
            return NONE
        return number

    def loss(self, value: object) -> float:
        """Return ``value`` if it can be read as a loss, else NaN; None is valid and gives NaN."""
        if value is None:
            return math.nan
        loss = read_loss(value)
        if loss is None:
            self._on_invalid()
            return math.nan
        return loss


def read_loss(loss: object) -> float | None:
    """Return a loss as a float, None if reading it would wait or run code of the job.

    A tensor on a device is not read, because ``.item()`` would synchronise the job.
    """
    if issubclass(type(loss), float):
        return float.__float__(cast("float", loss))
    torch = sys.modules.get("torch")
    if torch is None or type(loss) is not torch.Tensor:
        number = plain_int(loss)
        return None if number is None else float(number)
    tensor: Any = loss
    if not tensor.is_cpu or tensor.numel() != 1 or tensor.is_complex():
        return None
    return float(tensor.item())
