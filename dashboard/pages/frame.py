"""The frame that every part of a page stands in, and what a screen reader calls it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dash_mantine_components as dmc  # type: ignore[import-untyped]
from dash import ClientsideFunction, Dash, Input, Output, State, dcc, html

from ..theme import graph_config

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from dash.development.base_component import Component

    Figure = go.Figure | dict[str, Any]
    """As plotly's own objects, or as the plain document that these become on the way."""


def card(*children: object, class_name: str = "", label: str = "") -> Component:
    """Return a bordered part of a page.

    Args:
        children: What it holds.
        class_name: A further style.
        label: What a screen reader calls it.
    """
    framed: Component = dmc.Paper(
        list(children),
        withBorder=True,
        radius="md",
        className=f"card {class_name}".strip(),
        **(labelled(label) if label else {}),
    )
    return framed


def graph(part: str, figure: Figure, *, wheel_zooms: bool = False) -> Component:
    """Return a figure under the id ``part``, with nothing in it that leads to another host."""
    # The place is held while plotly is being loaded, so that nothing below it jumps.
    held = {"minHeight": height} if (height := graph_style(figure).get("height")) else {}
    config: Any = graph_config(wheel_zooms=wheel_zooms)
    return html.Div(
        [
            dcc.Store(id=f"{part}-fresh"),
            dcc.Graph(id=part, figure=figure, config=config, style=graph_style(figure)),
        ],
        style=held,
    )


def register_graph(app: Dash, part: str) -> None:
    """Pass what a callback outputs as ``{part}-fresh`` on to the figure, keeping the zoom."""
    app.clientside_callback(  # type: ignore[no-untyped-call]
        ClientsideFunction("rankscope", "keepZoom"),
        Output(part, "figure"),
        Input(f"{part}-fresh", "data"),
        State(part, "figure"),
        prevent_initial_call=True,
    )


def graph_style(figure: Figure) -> dict[str, str]:
    """Return the style that gives a responsive figure its own height: plotly ignores it there."""
    height = figure["layout"]["height"]
    return {"height": f"{height}px"} if height else {}


def labelled(label: str) -> dict[str, Any]:
    """Return the attribute that names a part to a screen reader."""
    return {"aria-label": label}


def announced() -> dict[str, Any]:
    """Return the attribute that has a screen reader tell a part's changes."""
    return {"aria-live": "polite"}
