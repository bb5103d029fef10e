"""The frame that every part of a page stands in, and what a screen reader calls it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dash_mantine_components as dmc  # type: ignore[import-untyped]
from dash import ClientsideFunction, Dash, Input, Output, State, dcc, html

from ..theme import graph_config

if TYPE_CHECKING:
    from collections.abc import Iterable

    import plotly.graph_objects as go
    from dash.development.base_component import Component

    from rankscope.analysis.trace.tables import RunSummary

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


SOON_MS = 1_500
"""From an answer to the next look at what is being made."""


LIVE_MS = 3_000
"""From an answer to the next look at a run that trains, or may come."""


QUIET_MS = 20_000
"""The same for a run that trains no more."""


RESCUE_MS = 30_000
"""Between two looks whether or not the one before was answered: where a server ended meanwhile, no
answer comes that would let a clock go on."""


RESCUE = "rescue"


_LIVE = "running"


def clock(part: str, *, pace_ms: int) -> Component:
    """Return a clock that stops at its first tick; an answer lets it go on, by `next_tick`.

    Dash drops the answer to what is asked again meanwhile: where answers take longer than the
    pace, a clock that just goes on would never show one.

    Args:
        part: Its id.
        pace_ms: From an answer to the next question.
    """
    return dcc.Interval(id=part, interval=pace_ms, n_intervals=0, max_intervals=next_tick(0))


def next_tick(num_ticks: int | None) -> int:
    """Return the ``max_intervals`` that let a clock go for one more tick after so many."""
    return (num_ticks or 0) + 1


def rescue() -> Component:
    """Return the clock that asks for every part of a page in any case, every `RESCUE_MS`."""
    return dcc.Interval(id=RESCUE, interval=RESCUE_MS, n_intervals=0)


def pace_of(runs: Iterable[RunSummary], run_id: str | None) -> int:
    """Return how long after an answer to ask again what is known of a run.

    Args:
        runs: Those of the store.
        run_id: The run; one that is not there may come. None: whichever comes first.
    """
    states = {run.run_id: run.state for run in runs}
    return LIVE_MS if states.get(run_id or "", _LIVE) == _LIVE else QUIET_MS
