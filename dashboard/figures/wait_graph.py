"""Graph of who waits for whom, in layers from the culprit outward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plotly.graph_objects as go

from rankscope.analysis.report.text import format_count, format_percent, format_ranges

from ..theme import IDEAL, SLOW, apply_style, rgba

if TYPE_CHECKING:
    from rankscope.analysis.breakdown.wait_graph import WaitEdge, WaitGraph, WaitNode

MAX_LABELLED = 40
"""Edges up to which each shows its share of a step."""

MAX_NAMED_RANGES = 2

_PIXELS_PER_NODE, _PIXELS_PER_GROUP = 40, 56
_PIXELS_PER_SMALL_NODE = 14
_MANY_NODES = 24
"""Nodes of a layer from which they are small."""

_MIN_HEIGHT, _FRAME_PX = 260, 90
_LABEL_WIDTH, _LABEL_PX = 0.2, 13
"""Room of a share on an arrow: in layers, and in pixels of height."""

_LAYER_PX, _WIDE_LAYER_PX = 108, 150
"""Width of a layer in which its labels fit, "waits for those" and "16 ranks" above "stage 2"; and
one in which the shares on its arrows do too."""

_FEW_LAYERS = 3
"""Layers that a phone shows at once."""

_LEAST_PX, _MOST_PX, _MOST_RATIO = 1.0, 7.0, 0.3
"""Widths of the edges of no waiting, and of this share of a step or more."""


def wait_graph_figure(graph: WaitGraph, *, run: str) -> go.Figure:
    """Draw each node at its distance from the culprit, and an arrow to each that waits for it."""
    places, largest = _places(graph)
    is_small = largest > _MANY_NODES
    has_groups = any(len(node.ranks) > 1 for node in graph.nodes)
    pixels = _PIXELS_PER_GROUP if has_groups else _PIXELS_PER_NODE
    pixels = _PIXELS_PER_SMALL_NODE if is_small else pixels
    height = max(_MIN_HEIGHT, pixels * largest + _FRAME_PX)
    figure = go.Figure()
    by_width: dict[float, list[WaitEdge]] = {}
    for edge in graph.edges:
        by_width.setdefault(_width_px(edge, graph.nodes[edge.node]), []).append(edge)
    for width, edges in sorted(by_width.items()):
        figure.add_trace(_arrows(edges, graph, places, width, is_small=is_small))
    if len(graph.edges) <= MAX_LABELLED:
        figure.add_trace(_edge_labels(graph, places, row_px=(height - _FRAME_PX) / largest))
    figure.add_trace(_nodes(graph, places, is_small=is_small))
    apply_style(figure, height=height, zoom_key=f"graph {run} {graph.nodes[0].ranks}")
    figure.update_layout(showlegend=False, margin={"l": 16, "r": 16, "t": 30, "b": 26})
    last = _num_layers(graph) - 1
    headings = ("culprit", "waits for it", "waits for those")
    if sum(node.distance == 0 for node in graph.nodes) > 1:
        headings = ("culprits", "wait for them", "wait for those")
    figure.update_xaxes(
        side="top",
        tickvals=list(range(last + 1)),
        ticktext=[*headings[: last + 1], *[""] * (last - 2)],
        range=[-0.3, last + 0.5],
        showgrid=False,
        ticks="",
        linecolor="rgba(0,0,0,0)",
    )
    figure.update_yaxes(visible=False, range=[largest - 0.3, -0.7])
    return figure


def least_width(graph: WaitGraph) -> int:
    """Return the width in pixels below which the labels of `wait_graph_figure` would overlap."""
    num = _num_layers(graph)
    return num * (_LAYER_PX if num <= _FEW_LAYERS else _WIDE_LAYER_PX)


def _num_layers(graph: WaitGraph) -> int:
    return 1 + max(node.distance for node in graph.nodes)


def node_name(node: WaitNode) -> str:
    """Return "rank 5", or "16 ranks of stage 2"."""
    if len(node.ranks) == 1:
        return f"rank {node.ranks[0]}"
    return f"{format_count(len(node.ranks), 'rank')} of stage {node.stage}"


def _places(graph: WaitGraph) -> tuple[list[tuple[float, float]], int]:
    """Return (x, y) of each node, and the size of the largest layer.

    Nodes of a layer are ordered by the mean place of what they wait for, so that few edges cross.
    """
    layers: dict[int, list[int]] = {}
    for number, node in enumerate(graph.nodes):
        layers.setdefault(node.distance, []).append(number)
    largest = max(map(len, layers.values()))
    waits_on: dict[int, list[int]] = {}
    for edge in graph.edges:
        waits_on.setdefault(edge.node, []).append(edge.on_node)
    y: dict[int, float] = {}
    for distance in sorted(layers):
        layer = layers[distance]

        def key(number: int) -> tuple[float, int, int]:
            near = [y[one] for one in waits_on.get(number, ()) if one in y]
            node = graph.nodes[number]
            return (sum(near) / len(near) if near else 0.0, node.stage, node.ranks[0])

        space = largest / len(layer)
        for place, number in enumerate(sorted(layer, key=key)):
            y[number] = (place + 0.5) * space - 0.5
    return [(float(node.distance), y[number]) for number, node in enumerate(graph.nodes)], largest


def _width_px(edge: WaitEdge, node: WaitNode) -> float:
    """Return the width of an edge in half pixels, by the mean share of all ranks of its node."""
    ratio = edge.ratio * len(edge.ranks) / len(node.ranks)
    width = _LEAST_PX + (_MOST_PX - _LEAST_PX) * min(ratio / _MOST_RATIO, 1.0)
    return round(2 * width) / 2


def _arrows(
    edges: list[WaitEdge],
    graph: WaitGraph,
    places: list[tuple[float, float]],
    width: float,
    *,
    is_small: bool,
) -> go.Scatter:
    """Return a trace of arrows that end at the edge of their nodes."""
    x: list[float | None] = []
    y: list[float | None] = []
    before_px: list[float] = []
    for edge in edges:
        (begin_x, begin_y), (end_x, end_y) = places[edge.on_node], places[edge.node]
        x += [begin_x, end_x, None]
        y += [begin_y, end_y, None]
        before_px += [0, _size(graph.nodes[edge.node], is_small=is_small) / 2 + 1, 0]
    return go.Scatter(
        x=x,
        y=y,
        mode="lines+markers",
        line={"width": width, "color": rgba(IDEAL, 0.55)},
        marker={
            "symbol": "arrow",
            "angleref": "previous",
            "size": [0, 6 + 1.5 * width, 0] * len(edges),
            "standoff": before_px,
            "color": IDEAL,
            "opacity": 1,
        },
        hoverinfo="skip",
    )


def _edge_labels(
    graph: WaitGraph, places: list[tuple[float, float]], *, row_px: float
) -> go.Scatter:
    """Return the shares on the arrows; of those that would overlap, the largest."""
    shown: list[tuple[float, float, str]] = []
    for edge in sorted(graph.edges, key=lambda edge: -edge.ratio):
        (end_x, end_y), (begin_x, begin_y) = places[edge.node], places[edge.on_node]
        x, y = (2 * end_x + begin_x) / 3, (2 * end_y + begin_y) / 3
        if all(
            abs(x - other_x) >= _LABEL_WIDTH or abs(y - other_y) * row_px >= _LABEL_PX
            for other_x, other_y, _ in shown
        ):
            shown.append((x, y, format_percent(edge.ratio)))
    return go.Scatter(
        x=[x for x, _, _ in shown],
        y=[y for _, y, _ in shown],
        mode="text",
        text=[text for _, _, text in shown],
        textposition="middle center",
        textfont={"size": 11},
        hoverinfo="skip",
    )


def _nodes(graph: WaitGraph, places: list[tuple[float, float]], *, is_small: bool) -> go.Scatter:
    waits: dict[int, list[str]] = {}
    for edge in graph.edges:
        node, other = graph.nodes[edge.node], node_name(graph.nodes[edge.on_node])
        num = len(edge.ranks)
        who = f"{format_count(num, 'rank')}: " if num < len(node.ranks) else ""
        waits.setdefault(edge.node, []).append(f"{who}{format_percent(edge.ratio)} for {other}")
    hover = [
        "<br>".join(
            [
                f"<b>{node_name(node)}</b>",
                f"ranks {format_ranges(node.ranks, max_ranges=6)}, stage {node.stage}",
                *(f"waits, of a step: {text}" for text in waits.get(number, ())[:6]),
            ]
        )
        for number, node in enumerate(graph.nodes)
    ]
    return go.Scatter(
        x=[x for x, _ in places],
        y=[y for _, y in places],
        mode="markers+text",
        text=[node_name(node).replace(" of stage", "<br>stage") for node in graph.nodes],
        textposition="bottom center" if not is_small else "middle right",
        textfont={"size": 10 if is_small else 12},
        customdata=[node.ranks[0] for node in graph.nodes],
        marker={
            "size": [_size(node, is_small=is_small) for node in graph.nodes],
            "color": [SLOW if node.distance == 0 else IDEAL for node in graph.nodes],
            "opacity": 1,
        },
        hovertext=hover,
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _size(node: WaitNode, *, is_small: bool) -> int:
    if is_small:
        return 8
    return 14 if len(node.ranks) == 1 else 20
