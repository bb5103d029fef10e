"""Bars and cells of a step that the assets draw on a canvas beneath plotly's axes.

Plotly makes an element of the page for each bar, which took half a second for 2,500 bars, and
draws the whole figure anew at each zoom. `assets/timeline_canvas.js` paints 8,000 in 2 ms.
"""

from __future__ import annotations

import html
from base64 import b64encode
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.tracer.span import KINDS

from ..theme import CLEAR, KIND_COLORS, rgba

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from rankscope.tracer.span import SpanKind

PALE = 0.4
"""Opacity of what is pale."""

SOLID, HATCHED = "solid", "hatched"
"""Looks of bars."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # arrays are no truth
class Bars:
    """Bars of one look; later ones are drawn over earlier ones. Arrays have shape (bars,)."""

    kind: SpanKind
    """Hidden with this kind's entry in the legend."""

    begin_ms: NDArray[np.float64]
    length_ms: NDArray[np.float64]
    """Times since the step's first span."""

    center: NDArray[np.float64]
    height: NDArray[np.float64]
    """Places on the axis of the rows."""

    spans: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """Rows of the spans, for a click and for their texts; empty: the bars are no spans."""

    of: SpanKind | None = None
    """Kind of the spans, if the bars show another: a blocked thread shows the transfer it is in."""

    texts: Sequence[str] = ()
    """Of bars that are no spans: what is shown under the pointer."""

    look: str = SOLID
    color: str = ""
    """As CSS; empty: the kind's."""

    def document(self) -> dict[str, Any]:
        """Return the bars with arrays in base64."""
        return {
            "kind": self.kind.value,
            "of": (self.of or self.kind).value,
            "begin": pack(self.begin_ms, "<f8"),
            "length": pack(self.length_ms, "<f8"),
            "center": pack(self.center, "<f8"),
            "height": pack(self.height, "<f8"),
            "spans": pack(self.spans, "<i4"),
            "texts": list(self.texts),
            "look": self.look,
            "color": self.color or KIND_COLORS[self.kind],
        }

    def trace(self, texts: Sequence[str]) -> dict[str, Any]:
        """Return the bars as a trace of plotly, for a figure without the assets.

        Args:
            texts: Of all spans, as of `hover_texts`.
        """
        color = self.color or KIND_COLORS[self.kind]
        marker: dict[str, Any] = {"color": color, "line": {"width": 0}}
        if self.look == HATCHED:
            pattern = {"shape": "/", "size": 5, "solidity": 0.25, "fgcolor": color}
            marker = {"color": color, "line": {"width": 1, "color": color}, "pattern": pattern}
        return {
            "type": "bar",
            "orientation": "h",
            "base": self.begin_ms,
            "x": self.length_ms,
            "y": self.center,
            "width": self.height,
            "marker": marker,
            "legendgroup": self.kind.value,
            "showlegend": False,
            "hovertext": [html.escape(texts[row]).replace("\n", "<br>") for row in self.spans],
            "hovertemplate": "%{hovertext}<extra></extra>",
        }


def cells_document(
    shades: NDArray[np.uint8],
    ends_ms: tuple[float, float],
    *,
    labels: Sequence[str] = (),
) -> dict[str, Any]:
    """Return a picture of cells.

    Args:
        shades: As of `raster_shades`, shape (lines, bins).
        ends_ms: Begin of the first bin and end of the last one.
        labels: What each line is, for what is shown under the pointer; none: nothing is shown.
    """
    colors = [CLEAR]
    for kind in KINDS:
        colors += [rgba(KIND_COLORS[kind], alpha) for alpha in (PALE, 1)]
    return {
        "shades": pack(shades, "u1"),
        "num_lines": shades.shape[0],
        "num_bins": shades.shape[1],
        "ends": list(ends_ms),
        "labels": list(labels),
        "colors": colors,  # by shade
        "kinds": [kind.value for kind in KINDS],
    }


def canvas_document(part: str, content: dict[str, Any], layout: dict[str, Any]) -> dict[str, Any]:
    """Return what the assets draw, with the place that a figure's layout gives it.

    Args:
        content: Either ``bars``, a list of `Bars.document`, or ``cells``, a `cells_document`.
        layout: Of the figure that has the axes.
    """
    return {
        **content,
        "part": part,
        "key": layout["uirevision"],  # an equal one keeps the reader's zoom
        "height": layout["height"],
        "margin": layout["margin"],
        "x": layout["xaxis"]["range"],
        "y": layout["yaxis"]["range"],
    }


def pack(values: NDArray[Any], dtype: str) -> str:
    """Return an array in base64, which takes half of the bytes of its text."""
    return b64encode(np.ascontiguousarray(values, dtype).tobytes()).decode("ascii")
