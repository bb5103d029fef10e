"""Goodput of a run for a terminal: one sentence, and its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.analysis.goodput import GoodputPart, describe_goodput
from rankscope.analysis.report.text import format_device_hours, format_percent

from .lines import format_table, wrap_text

if TYPE_CHECKING:
    from rankscope.analysis.goodput import Goodput

LABEL_WIDTH = 13


def goodput_lines(
    goodput: Goodput | None, *, width: int, is_whole: bool, table_width: int | None = None
) -> list[str]:
    """Return the goodput of a run as lines; none if it is unknown.

    Args:
        goodput: What the time of the run was spent on.
        width: Columns of a sentence.
        is_whole: Whether its parts are listed.
        table_width: Columns of the parts. None: any.
    """
    if goodput is None:
        return []
    lines = wrap_text(describe_goodput(goodput), width, first="goodput".ljust(LABEL_WIDTH))
    if not is_whole:
        return lines
    rows = []
    for part in GoodputPart:
        if goodput.rank_s[part] > 0:
            share = format_percent(goodput.share(part), digits=1)
            rows.append((part.word, format_device_hours(goodput.hours(part)), share))
            if part is GoodputPart.FINDINGS:
                rows += [
                    (
                        f"  {cause}",
                        format_device_hours(seconds / 3_600),
                        format_percent(seconds / goodput.total_rank_s, digits=1),
                    )
                    for cause, seconds in goodput.finding_rank_s.items()
                ]
    header = ("part", "time", "share")
    return [*lines, *format_table(header, rows, right="lrr", width=table_width)]
