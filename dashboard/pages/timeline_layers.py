"""Layers that the timeline draws of a step's replay: its critical path, and the usual step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dash import ClientsideFunction, Dash, Input, Output, html

from rankscope.analysis.report.text import format_duration, format_range
from rankscope.analysis.trace.errors import AnalysisError

from ..address import LAYERS
from ..figures.timeline_canvas import canvas_document
from ..text import escape
from .components import canvas, card, graph, pressed

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from rankscope.analysis.drawing.raster import StepPicture, Stretches
    from rankscope.analysis.drawing.step_replay import StepReplay
    from rankscope.analysis.drawing.timeline import StepTimeline

    from ..provider import ReportProvider
    from .components import Figure

TITLES = {
    "path": ("critical path", "Mark the operations that decide when the step ends (C)"),
    "ideal": ("usual step", "Show the step with usual durations and no delay, beneath (I)"),
}
"""Text and title of the button of each of `LAYERS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The replay of a step, or why there is none."""

    found: StepReplay | None = None
    reason: str = ""
    """From outside, in part."""

    is_pending: bool = False

    def path_of(self, layers: tuple[str, ...]) -> Stretches | None:
        """Return the critical path, if it is known and among the layers that are drawn."""
        return self.found.path if self.found is not None and "path" in layers else None


NO_REPLAY = Replayed()


def find_replay(provider: ReportProvider, recorded: StepTimeline | StepPicture) -> Replayed:
    """Return the replay of a step as the provider has it now."""
    try:
        found = provider.step_replay(recorded)
    except AnalysisError as error:
        return Replayed(reason=str(error))
    if found is None:
        return Replayed(reason="the step is being replayed", is_pending=True)
    return Replayed(found=found)


def layer_buttons(layers: tuple[str, ...]) -> Component:
    """Return the buttons that draw what the replay says."""
    return html.Div(
        [
            html.Button(
                text,
                id=f"timeline-{layer}",
                title=title,
                className="choice chosen" if layer in layers else "choice",
                **pressed(is_on=layer in layers),
            )
            for layer, (text, title) in TITLES.items()
        ],
        className="choices plain",
    )


def show_replay(
    replayed: Replayed, ideal: tuple[Figure, dict[str, Any] | None] | None
) -> list[Component]:
    """Return what is shown beneath a step.

    Args:
        replayed: The replay.
        ideal: The figure of its ideal, and what is drawn beneath; None: it is not shown.
    """
    if replayed.reason:
        about = f"No critical path or usual step yet: {replayed.reason}."
        if not replayed.is_pending:
            about = f"No critical path or usual step: {replayed.reason}."
        return [card(html.P(escape(about), className="quiet"))]
    if ideal is None or replayed.found is None:
        return []
    found = replayed.found
    figure, content = ideal
    layout = figure["layout"]
    layout["showlegend"] = False
    layout["dragmode"] = False
    title = f"With usual durations, the step takes {format_duration(found.ideal_ns)}"
    about = (
        f"{format_duration(found.actual_ns)} passed from the end of the step before to the end of"
        " this one. Beneath, each operation takes as long as alike ones usually do"
        f" ({_steps(found.steps)}), and no host is late: the waits that are left are the"
        " schedule's. The ideal at the top is less than that if steps as large took less."
    )
    part = "timeline-ideal-graph"
    drawn = graph(
        part, figure, beneath=canvas(part, content and canvas_document(part, content, layout))
    )
    return [card(html.H2(title), html.P(about, className="about"), drawn, label="usual step")]


def _steps(steps: tuple[int, int]) -> str:
    word = "step" if steps[0] == steps[1] else "steps"
    return f"{word} {format_range(steps)}"


def register_layers(app: Dash) -> None:
    """Turn layers on and off in the address."""
    app.clientside_callback(  # type: ignore[no-untyped-call]
        ClientsideFunction("rankscope", "toggleLayer"),
        Output("url", "search", allow_duplicate=True),
        *(Input(f"timeline-{layer}", "n_clicks") for layer in LAYERS),
        prevent_initial_call=True,
    )
