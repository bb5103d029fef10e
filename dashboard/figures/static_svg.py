"""A figure as SVG without scripts, for files and messages in which plotly cannot run.

It draws what `proof_card` uses: points and lines on linear axes with given ranges and ticks, lines,
rectangles, and texts whose upper left corner is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import plotly.graph_objects as go

    Map = Callable[[float], float]

WIDTH_PX = 960
FONT_PX = 12
TICK_PX = 4

_GROUND = (
    "<style>svg{color:#1b2026;background:#fff}"
    "@media(prefers-color-scheme:dark){svg{color:#e9edf1;background:#181c22}}</style>"
)


def static_svg(figure: go.Figure, *, title: str, alone: bool = False) -> str:
    """Return a figure as SVG, its neutral colours those of the text around it.

    Args:
        figure: Of `proof_card.proof_figure`.
        title: For screen readers; escaped for HTML.
        alone: Whether it is a file of its own, which has its ground and follows the viewer's
            choice of light or dark.
    """
    document: dict[str, Any] = figure.to_plotly_json()
    layout: dict[str, Any] = document["layout"]
    height, margin = int(layout["height"]), layout["margin"]
    box = (
        margin["l"],
        margin["t"],
        WIDTH_PX - margin["l"] - margin["r"],
        height - margin["t"] - margin["b"],
    )
    # In a page, the name of SVG is known.
    namespace = ' xmlns="http://www.w3.org/2000/svg"' if alone else ""
    parts = [
        (
            f'<svg{namespace} viewBox="0 0 {WIDTH_PX} {height}" role="img" aria-label="{title}"'
            f' font-family="system-ui, sans-serif" font-size="{FONT_PX}" fill="currentColor">'
        ),
        f"<title>{title}</title>",
        _GROUND if alone else "",
    ]
    maps = {}
    for name in layout:
        if name.startswith("xaxis") and "range" in layout[name]:
            suffix = name.removeprefix("xaxis")
            maps[suffix] = _map_x(layout[name], box), _map_y(layout[f"yaxis{suffix}"], box)
            parts += _draw_axes(layout[name], layout[f"yaxis{suffix}"], *maps[suffix])
    for shape in layout.get("shapes", ()):
        parts.append(_draw_shape(shape, *maps[shape["xref"][1:]]))
    for trace in document["data"]:
        parts += _draw_trace(trace, *maps[trace.get("xaxis", "x")[1:]])
    paper: tuple[Map, Map] = (
        lambda share: box[0] + share * box[2],
        lambda share: box[1] + (1 - share) * box[3],
    )
    for note in layout.get("annotations", ()):
        x, y = paper if note["xref"] == "paper" else maps[note["xref"][1:]]
        color = note["font"]["color"]
        # Plotly's own distance of a text from its place.
        place = f'x="{x(note["x"]) + 1:.1f}" y="{y(note["y"]) + FONT_PX + 1:.1f}"'
        parts.append(f'<text {place} fill="{color}">{note["text"]}</text>')
    return "".join([*parts, "</svg>"])


def _map_x(axis: dict[str, Any], box: tuple[int, int, int, int]) -> Map:
    (first, last), (left, right) = axis["range"], axis["domain"]
    return lambda value: (
        box[0] + box[2] * (left + (right - left) * (value - first) / (last - first))
    )


def _map_y(axis: dict[str, Any], box: tuple[int, int, int, int]) -> Map:
    (first, last), (low, high) = axis["range"], axis["domain"]
    return lambda value: (
        box[1] + box[3] * (1 - low - (high - low) * (value - first) / (last - first))
    )


def _draw_axes(x_axis: dict[str, Any], y_axis: dict[str, Any], x: Map, y: Map) -> Iterator[str]:
    (left, right), (bottom, top) = map(x, x_axis["range"]), map(y, y_axis["range"])
    if x_axis.get("visible", True):
        yield _segment(left, bottom, right, bottom, "currentColor", opacity=0.4)
        for value, text in zip(x_axis["tickvals"], x_axis["ticktext"], strict=True):
            if x_axis.get("showgrid", True):
                yield _segment(x(value), bottom, x(value), top, "currentColor", opacity=0.15)
            yield (
                f'<text x="{x(value):.1f}" y="{bottom + FONT_PX + TICK_PX:.1f}"'
                f' text-anchor="middle" opacity="0.75">{text}</text>'
            )
    if y_axis.get("visible", True):
        for value, text in zip(y_axis["tickvals"], y_axis["ticktext"], strict=True):
            yield _segment(left, y(value), right, y(value), "currentColor", opacity=0.15)
            yield (
                f'<text x="{left - TICK_PX:.1f}" y="{y(value) + TICK_PX:.1f}"'
                f' text-anchor="end" opacity="0.75">{text}</text>'
            )


def _draw_trace(trace: dict[str, Any], x: Map, y: Map) -> Iterator[str]:
    places = [
        None if across is None or up is None else (x(across), y(up))
        for across, up in zip(trace["x"], trace["y"], strict=True)
    ]
    if "lines" in trace["mode"]:
        line = trace["line"]
        # A line breaks where a value is unknown.
        pieces: list[list[str]] = [[]]
        for place in places:
            if place is None:
                pieces.append([])
            else:
                pieces[-1].append(f"{place[0]:.1f},{place[1]:.1f}")
        for piece in pieces:
            yield (
                f'<polyline points="{" ".join(piece)}" fill="none" stroke="{line["color"]}"'
                f' stroke-width="{line["width"]}"/>'
            )
    for place in places:
        if place is not None:
            marker = trace["marker"]
            yield (
                f'<circle cx="{place[0]:.1f}" cy="{place[1]:.1f}" r="{marker["size"] / 2}"'
                f' fill="{marker["color"]}"/>'
            )


def _draw_shape(shape: dict[str, Any], x: Map, y: Map) -> str:
    (left, right), (top, bottom) = (
        (x(shape["x0"]), x(shape["x1"])),
        (y(shape["y0"]), y(shape["y1"])),
    )
    if shape["type"] == "line":
        dash = ' stroke-dasharray="2 3"' if shape["line"]["dash"] == "dot" else ""
        return _segment(left, top, right, bottom, shape["line"]["color"], width=2, more=dash)
    return (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}"'
        f' height="{bottom - top:.1f}" fill="{shape["fillcolor"]}"/>'
    )


def _segment(  # noqa: PLR0913  # two ends and the look of a line
    x0: float,
    y0: float,
    x1: float,
    y1: float,
    color: str,
    *,
    width: int = 1,
    opacity: float = 1.0,
    more: str = "",
) -> str:
    return (
        f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{color}"'
        f' stroke-width="{width}" opacity="{opacity}"{more}/>'
    )
