"""One step as a picture: what is left of it when it has more spans than can be drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .raster import step_raster

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope.tracer.topology import Coords

    from .raster import StepRaster
    from .timeline import StepTimeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A part of a step's picture: a stretch of time and neighbouring rows of ranks."""

    begin_ns: int
    """From the step's begin, as ``end_ns``."""

    end_ns: int
    first_row: int
    """Place of the uppermost rank in the picture's order, from 0."""

    end_row: int

    def within(self, length_ns: int, num_ranks: int) -> Window:
        """Return the part that lies in a step of this length and so many ranks, never empty."""
        begin = min(max(self.begin_ns, 0), max(length_ns - 1, 0))
        first = min(max(self.first_row, 0), max(num_ranks - 1, 0))
        return Window(
            begin_ns=begin,
            end_ns=max(min(self.end_ns, length_ns), begin + 1),
            first_row=first,
            end_row=max(min(self.end_row, num_ranks), first + 1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """Some ranks of a step for a while."""

    ranks: tuple[int, ...]
    begin_ns: int
    """From the step's begin, as ``end_ns``."""

    end_ns: int
    bounds_ns: tuple[int, int]
    """Begin and end of the whole step, Unix time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPicture:
    """A step's pixels, with what is to be said beside them."""

    run: str
    epoch: int
    step: int
    begin_ns: int
    """Start of the step's first span on the common clock."""

    end_ns: int
    num_spans: int
    num_ranks: int
    raster: StepRaster
    coords: dict[int, Coords]
    window: Window | None = None
    """What of the step it shows; None: all."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that are shown, from the top."""
        return tuple(rank for block in self.raster.rank_blocks for rank in block)


def picture_of(
    timeline: StepTimeline, ranks: Sequence[int], *, max_rows: int, num_bins: int
) -> StepPicture:
    """Draw a step; see `analysis.drawing.raster.step_raster`.

    Args:
        timeline: The step.
        ranks: Row order.
        max_rows: Most row pairs.
        num_bins: Columns.
    """
    return StepPicture(
        run=timeline.run,
        epoch=timeline.epoch,
        step=timeline.step,
        begin_ns=timeline.begin_ns,
        end_ns=timeline.end_ns,
        num_spans=len(timeline.spans),
        num_ranks=len(np.unique(timeline.spans.rank)),
        raster=step_raster(timeline, ranks, max_rows=max_rows, num_bins=num_bins),
        coords=timeline.coords,
    )
