"""Text of a profile's device time for a terminal: parts of the step, and kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.analysis.report.device_time import CHANGE_COLUMNS, KERNEL_COLUMNS
from rankscope.analysis.report.text import format_count, format_percent, format_seconds

from .lines import format_rows, format_table, printable, wrap_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope.analysis.report.device_time import DeviceTime, Kernel, KernelChange


def device_time_lines(
    device_time: DeviceTime | None, rank: int | None, *, width: int | None
) -> list[str]:
    """Return the parts of the mean step on the device, of all ranks or of one."""
    if device_time is None:
        return []
    parts = device_time.mean_s if rank is None else device_time.of_rank(rank)
    total_s = sum(parts.values())
    of_file = device_time.file_ratio if rank is None else None
    rows = [
        (
            part,
            format_seconds(seconds),
            format_percent(seconds / total_s, digits=1),
            *([] if of_file is None else [format_percent(of_file[part], digits=1)]),
        )
        for part, seconds in parts.items()
        if seconds or (of_file and of_file[part])
    ]
    if not rows:
        return []
    header = ("device time of a step", "per step", "share", "of the whole file")
    return format_table(header[: len(rows[0])], rows, right="lrrr"[: len(rows[0])], width=width)


def kernel_lines(kernels: Sequence[Kernel], *, top: int, width: int | None) -> list[str]:
    """Return the busiest kernels, and the rates that they reach if any is known."""
    if not kernels:
        return []
    shown = kernels[:top]
    num_columns = len(KERNEL_COLUMNS) - (not any(each.reached for each in shown))
    rows = [(printable(name), *rest)[:num_columns] for name, *rest in (e.cells for e in shown)]
    lines = format_table(KERNEL_COLUMNS[:num_columns], rows, right="lkrrl", width=width)
    more = len(kernels) - top
    return [*lines, f"  and {more:,} more (--top {len(kernels)})"] if more > 0 else lines


def kernel_change_lines(
    changes: Sequence[KernelChange], *, top: int, width: int | None
) -> list[str]:
    """Return the kernels that differ between two runs, the largest differences first.

    The name of each is on a line of its own, because it is long.
    """
    if not changes:
        return []
    shown = [each.cells for each in changes[:top]]
    rows = [cells[1:] for cells in shown]
    head, *body = format_rows(CHANGE_COLUMNS[1:], rows, right="kkrrr", width=width)
    lines = [head]
    for row, (name, *_) in zip(body, shown, strict=True):
        lines += [row, *wrap_text(printable(name), width or len(name) + 2, first="  ")]
    more = len(changes) - top
    return [*lines, f"  and {format_count(more, 'kernel')} more"] if more > 0 else lines
