"""The place of a figure that is not there yet."""

from __future__ import annotations

import plotly.graph_objects as go

from ..theme import dressed


def blank_figure(said: str, *, height: int) -> go.Figure:
    """Return an empty figure that says in its middle why, without axes.

    Args:
        said: Plain words of ours.
        height: Pixels; that of the figure that will stand there.
    """
    figure = dressed(go.Figure(), height=height, keep=said)
    figure.add_annotation(text=said, x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False)
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return figure
