"""The one refresh of every page: it is rendered again, and the browser gets the changed parts.

A part is a component with an id. Its browser keeps a digest of each property that it has, so a
part that is as before is not sent, and keeps what a reader has typed, opened or zoomed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from dash import Dash, Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component
from dash.exceptions import PreventUpdate
from plotly.io.json import to_json_plotly  # type: ignore[import-untyped]

from ..address import read_address
from ..callback_checks import Number, Posted, Ticks, checked
from .components import FALLBACK_TIMER, LIVE_MS, announced, next_tick, poll_timer, run_in_browser
from .page import Content
from .placeholders import unknown_page

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..provider import ReportProvider
    from .page import Page

AGAIN = "page-again"
"""Store of the frame: a callback that outputs other data to it has the page refreshed at once."""

Digests = dict[str, dict[str, str]]
"""A digest by id and property."""

Changes = dict[str, dict[str, Any]]
"""New values by id and property."""


class Shown(Posted):
    """The shown state, which the page keeps in the browser."""

    asked: str
    """The address that it answers."""

    run: str | None
    epoch: Number | None
    step: Number | None
    revision: str | None
    digests: dict[str, dict[str, str]]
    is_drawn: bool = False
    """Whether it is more than a card that says what is missing."""


def page_frame() -> list[Component]:
    """Return the place of the page, which the refresh fills."""
    return [
        dcc.Store(id="page-asked"),
        dcc.Store(id=AGAIN),
        dcc.Store(id="page-shown"),
        dcc.Store(id="page-changes"),
        poll_timer("page-timer", interval_ms=LIVE_MS),
        html.Main(
            [html.Div(id="page-problem", **announced()), html.Div(id="page-content")],
            id="page",
            tabIndex=-1,
        ),
    ]


def register_refresh(app: Dash, provider: ReportProvider, pages: Sequence[Page]) -> None:
    """Show the page of the address, and again when its data or the address change."""
    page_by_name = {page.name: page for page in pages}
    # A zoom into what is loaded changes the address, and needs no answer. A zoom into anything else
    # is asked for before Dash knows the new address: so the question counts, and not ``url``.
    run_in_browser(
        app,
        "rankscope.askPage",
        Output("page-asked", "data"),
        Input("url", "pathname"),
        Input("url", "search"),
        State("page-asked", "data"),
        at_start=True,
    )
    run_in_browser(app, "rankscope.applyChanges", Input("page-changes", "data"))
    run_in_browser(app, "rankscope.endNavigation", Input("page-shown", "data"))

    @app.callback(
        Output("page-content", "children"),
        Output("page-changes", "data"),
        Output("page-shown", "data"),
        Output("page-timer", "interval"),
        Output("page-timer", "max_intervals"),
        Input("page-asked", "data"),
        Input(AGAIN, "data"),
        Input("page-timer", "n_intervals"),
        Input(FALLBACK_TIMER, "n_intervals"),
        State("page-shown", "data"),
        prevent_initial_call=True,
    )
    @checked
    def refresh(  # Dash calls it by position
        asked: str | None,
        _again: Any,  # noqa: ANN401  # a new value is all that counts
        num_ticks: Ticks,
        _fallback_ticks: Ticks,
        shown: Shown | None,
    ) -> tuple[Any, ...]:
        if asked is None:
            raise PreventUpdate
        path, _, query = asked.partition("?")
        view = read_address(path, query)
        page = page_by_name.get(view.page)
        is_same_view = shown is not None and shown.asked == asked
        if shown is not None and is_same_view:
            # A new run or step must not take away the one that a reader looks at.
            view = replace(
                view,
                run=view.run or shown.run,
                epoch=shown.epoch if view.epoch is None else view.epoch,
                step=shown.step if view.step is None else view.step,
            )
        if page is None:
            revision, content = None, Content(problem=unknown_page(path), view=view)
        else:
            view = page.choose_run(provider, view)
            revision = page.read_revision(provider, view)
            is_known = revision is not None and shown is not None and revision == shown.revision
            if is_known and is_same_view:
                return *(no_update,) * 4, next_tick(num_ticks)
            content = page.render(provider, view)
            is_same_step = (
                shown is not None
                and view.step is not None
                and shown.asked.partition("?")[0] == path
                and (view.run, view.epoch, view.step) == (shown.run, shown.epoch, shown.step)
            )
            stays = shown is not None and shown.is_drawn and (is_same_view or is_same_step)
            if stays and content.is_pending:
                # Late records of what is shown are being read, or more of the step, as for a
                # search in a live run: it stays until they are there.
                return *(no_update,) * 3, content.interval_ms or LIVE_MS, next_tick(num_ticks)
        rendered = render_parts(page_children(content))
        changes = rendered.changes(shown.digests if shown is not None else {})
        children = changes.get("page-content", {}).pop("children", no_update)
        chosen = content.view or view
        kept = Shown(
            asked=asked,
            run=chosen.run,
            epoch=chosen.epoch,
            step=chosen.step,
            revision=None if content.is_unfinished else revision,
            is_drawn=bool(content.children),
            digests=rendered.digests,
        )
        return (
            children,
            changes or no_update,
            kept.model_dump(),
            content.interval_ms or LIVE_MS,
            next_tick(num_ticks),
        )


def page_children(content: Content) -> list[Component]:
    """Return the components of a page in its frame; each outermost one becomes a part."""
    for number, part in enumerate(content.children):
        if getattr(part, "id", None) is None:
            setattr(part, "id", f"page-part-{number}")  # noqa: B010  # Dash declares no id
    return [
        html.Div(content.problem, id="page-problem"),
        html.Div(content.children, id="page-content"),
    ]


@dataclass(frozen=True, slots=True)
class RenderedParts:
    """The properties of each part of a page."""

    properties: Mapping[str, Mapping[str, Any]]
    digests: Digests
    """Of children, parts inside count by their id only."""

    around: Mapping[str, str]
    """The part in which a part is."""

    def changes(self, before: Digests) -> Changes:
        """Return the properties that differ from those before; a part has all inside it anew."""
        changes: Changes = {}
        replaced: set[str] = set()
        for part, digests in self.digests.items():  # the outer ones first
            known = before.get(part, {})
            if self.around.get(part) in replaced:
                replaced.add(part)
                continue
            if known.get("children") != digests.get("children"):
                replaced.add(part)
            names = [name for name in {**known, **digests} if known.get(name) != digests.get(name)]
            if names:
                changes[part] = {name: self.properties[part].get(name) for name in names}
        return changes


def render_parts(children: Sequence[Component]) -> RenderedParts:
    """Return the parts of a page."""
    properties: dict[str, dict[str, Any]] = {}
    digests: Digests = {}
    around: dict[str, str] = {}

    def outline(node: Any, parent: str) -> Any:  # noqa: ANN401  # children of a component
        """Return a component with parts inside it as their ids, and add those to the page."""
        if isinstance(node, list | tuple):
            return [outline(child, parent) for child in node]
        if not isinstance(node, Component):
            return node
        document = node.to_plotly_json()  # type: ignore[no-untyped-call]
        own = dict(document["props"])
        part = own.pop("id", None)
        if part is not None:
            # Before the parts inside it.
            properties[part], digests[part] = own, {}
            around[part] = parent
        inside = outline(own.get("children"), part or parent)
        if part is None:
            return {**document, "props": {**own, "children": inside}}
        digests[part] = {
            name: _digest(inside if name == "children" else value) for name, value in own.items()
        }
        return {"part": part, "type": document["type"]}

    outline(children, "")
    return RenderedParts(properties, digests, around)


def _digest(value: Any) -> str:  # noqa: ANN401  # what Dash can send
    return blake2b(to_json_plotly(value).encode(), digest_size=8).hexdigest()
