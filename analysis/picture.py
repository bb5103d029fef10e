"""One step as a picture: what is left of it when it has more spans than can be drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from analysis.raster import step_raster

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.raster import StepRaster
    from analysis.timeline import StepTimeline
    from tracer.topology import Coords


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

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks from the top."""
        return tuple(rank for block in self.raster.rank_blocks for rank in block)


def picture_of(
    timeline: StepTimeline, ranks: Sequence[int], *, max_rows: int, num_bins: int
) -> StepPicture:
    """Draw a step; see `analysis.raster.step_raster`.

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
