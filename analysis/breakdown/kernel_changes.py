"""Kernels that differ between two reports, as a fusion changes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..report.device_time import Kernel, KernelChange

if TYPE_CHECKING:
    from collections.abc import Iterable

MIN_CHANGE = 0.02
"""Change of launches or time, as a share, that is one: equal runs vary as much. Source: choice."""


def compare_kernels(first: Iterable[Kernel], second: Iterable[Kernel]) -> tuple[KernelChange, ...]:
    """Return the kernels that differ, those with the largest difference in time first.

    Kernels are compared per step of a rank, by phase, stream and name. If either run has none,
    nothing is known, and nothing is returned.
    """
    before, after = (
        {(one.phase, one.stream, one.name): one for one in kernels} for kernels in (first, second)
    )
    if not before or not after:
        return ()
    changes = []
    for key, kernel in {**before, **after}.items():
        one, other = before.get(key), after.get(key)
        if change := _name_change(one, other):
            changes.append(KernelChange(change=change, kernel=kernel, first=one, second=other))
    return tuple(sorted(changes, key=lambda each: -abs(each.difference_s)))


def _name_change(first: Kernel | None, second: Kernel | None) -> str:
    """Return what differs; "" if nothing does."""
    if first is None or second is None:
        return "new" if first is None else "gone"
    for before, after, less, more in (
        (first.num, second.num, "fewer launches", "more launches"),
        (first.seconds, second.seconds, "less time", "more time"),
    ):
        if abs(after - before) > MIN_CHANGE * before:
            return less if after < before else more
    return ""
