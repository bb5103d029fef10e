"""Ranks in boxes of their hosts, and hosts in blocks of their switches, as cells of a picture."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import NONE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..records.rank_details import RankValues

RANKS_PER_LINE = 8
"""Cells of one line of a box: the devices of most hosts."""

WIDE = 3.0
"""Width of a picture over its height, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBox:
    """Place of a host: its upper left cell."""

    host: str
    switch: str
    line: int
    column: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBoxes:
    """Cells of all ranks; between boxes there are empty ones."""

    seconds: NDArray[np.float64]
    """Shape (lines, columns); NaN without a rank."""

    rank: NDArray[np.int64]
    """Shape (lines, columns); `NONE` without a rank."""

    boxes: tuple[HostBox, ...]
    """The slowest first."""

    box_width: int
    """Columns from the begin of a box to that of the next."""


def arrange_hosts(values: RankValues) -> HostBoxes:
    """Arrange ranks by host and switch, those with the largest value of a rank first.

    A switch is a block of boxes, and small blocks are side by side. Ranks of an unknown host share
    one box.

    Source:
        arXiv 2402.15627, figure 7: ranks by machine, so that slow machines show.
    """
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for one in sorted(values.seconds):
        host, switch = values.hosts.get(one, ("", ""))
        ranks_of.setdefault((switch, host), []).append(one)
    worst = {key: max(values.seconds[one] for one in mine) for key, mine in ranks_of.items()}
    of_switch: dict[str, list[tuple[str, str]]] = {}
    for key in sorted(worst, key=lambda key: (-worst[key], key)):
        of_switch.setdefault(key[0], []).append(key)
    size = max(map(len, ranks_of.values()))
    width = min(size, RANKS_PER_LINE)
    height = -(-size // width)
    most = math.ceil(math.sqrt(WIDE * len(ranks_of) * (height + 1) / (width + 1)))
    per_block = min(most, max(map(len, of_switch.values())))
    num_blocks = min(most // per_block, len(of_switch))
    boxes, line, next_line = [], 0, 0
    for number, (switch, keys) in enumerate(of_switch.items()):
        block = number % num_blocks
        line = line if block else next_line
        for place, (_, host) in enumerate(keys):
            row, column = divmod(place, per_block)
            boxes.append(
                HostBox(
                    host=host,
                    switch=switch,
                    line=line + row * (height + 1),
                    column=(block * per_block + column) * (width + 1) + block,
                )
            )
        next_line = max(next_line, boxes[-1].line + height + 1)
    shape = (next_line - 1, num_blocks * (per_block * (width + 1) + 1) - 2)
    seconds, rank = np.full(shape, np.nan), np.full(shape, NONE, dtype=np.int64)
    for box in boxes:
        for place, one in enumerate(ranks_of[box.switch, box.host]):
            cell = box.line + place // width, box.column + place % width
            seconds[cell], rank[cell] = values.seconds[one], one
    return HostBoxes(seconds=seconds, rank=rank, boxes=tuple(boxes), box_width=width + 1)
