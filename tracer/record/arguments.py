"""What a job hands over, made usable: a bad argument is replaced and counted, never raised."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, cast

from ..span import NONE
from .plain_values import plain_int, plain_text, type_name

if TYPE_CHECKING:
    from collections.abc import Callable

INT32_MAX = 2**31 - 1


class Arguments:
    """Checks arguments without running a method of theirs."""

    __slots__ = ("_on_bad",)

    def __init__(self, on_bad: Callable[[], None]) -> None:
        self._on_bad = on_bad

    def name(self, value: object) -> str:
        """Return ``value`` where it is a name, else its type's in angle brackets."""
        text = plain_text(value)
        if text:
            return text
        self._on_bad()
        return "<empty>" if text == "" else f"<{type_name(value)}>"

    def step(self, value: object) -> int:
        """Return ``value`` where it can be a step, else 0."""
        number = plain_int(value, limit=INT32_MAX)
        if number is None:
            self._on_bad()
            return 0
        return number

    def index(self, value: object) -> int:
        """Return ``value`` where it can be a micro-batch or chunk, else `NONE`."""
        number = plain_int(value, limit=INT32_MAX)
        if number is None:
            self._on_bad()
            return NONE
        return number

    def count(self, value: object) -> int:
        """Return ``value`` where it can be a count; `NONE` for None, and for what cannot."""
        if value is None:
            return NONE
        number = plain_int(value)
        if number is None:
            self._on_bad()
            return NONE
        return number

    def loss(self, value: object) -> float:
        """Return ``value`` where it can be read as a loss; NaN for None, and for what cannot."""
        if value is None:
            return math.nan
        loss = plain_loss(value)
        if loss is None:
            self._on_bad()
            return math.nan
        return loss


def plain_loss(loss: object) -> float | None:
    """Return a loss as a float; None where it cannot be read without waiting or foreign code.

    A tensor on a device stays unread: ``.item()`` would synchronise the job.
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
