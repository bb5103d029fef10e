"""A page of the dashboard: a pure function of the store's data and of a view."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rankscope.analysis.trace.errors import UnknownRunError

from .components import LIVE_MS, SOON_MS, poll_interval_ms
from .placeholders import missing_run, no_runs

if TYPE_CHECKING:
    from collections.abc import Callable

    from dash import Dash
    from dash.development.base_component import Component

    from ..address import View
    from ..provider import ReportProvider

    Show = Callable[[ReportProvider, View], "Content"]
    """Returns the content of a view; of a page about a run, the view names one."""

    Register = Callable[[Dash, ReportProvider], None]
    """Registers callbacks of a page besides its refresh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Content of a page for a view, as the data are now."""

    children: list[Component] = field(default_factory=list)
    problem: Component | None = None
    """A card that says what is missing; a screen reader announces it."""

    view: View | None = None
    """The shown view, if run, epoch or step were chosen: they stay while the page is open."""

    interval_ms: int | None = None
    """Pause before the page asks again; None: by the state of the run."""

    is_unfinished: bool = False
    """Whether a result is still being made, so that the same data will look different."""

    @property
    def is_pending(self) -> bool:
        """Return whether there is nothing to show until the result is there."""
        return self.is_unfinished and not self.children


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One page of the dashboard."""

    name: str
    """First part of its address."""

    title: str
    """Its name in the menu."""

    show: Show
    is_of_run: bool = True
    """Whether it is about the chosen run."""

    is_listed: bool = True
    """Whether the menu and the palette have it."""

    revision: Callable[[ReportProvider, View], object] | None = None
    """Returns what changes with the shown data, None if that is unknown: the page is not made anew
    as long as it is the same. It may raise `UnknownRunError`."""

    register: Register | None = None

    def choose_run(self, provider: ReportProvider, view: View) -> View:
        """Return the view with the newest run if the page needs one and the view names none."""
        if not self.is_of_run or view.run is not None:
            return view
        runs = provider.runs()
        return replace(view, run=runs[0].run_id) if runs else view

    def render(self, provider: ReportProvider, view: View) -> Content:
        """Return the content of a view, with the run, the next refresh and problems filled in."""
        view = self.choose_run(provider, view)
        if self.is_of_run and view.run is None:
            return Content(problem=no_runs(), view=view, interval_ms=LIVE_MS)
        try:
            content = self.show(provider, view)
        except UnknownRunError as error:
            content = Content(problem=missing_run(error))
        interval_ms = content.interval_ms
        if interval_ms is None and content.is_unfinished:
            interval_ms = SOON_MS
        if interval_ms is None:
            interval_ms = poll_interval_ms(provider.runs(), view.run) if self.is_of_run else LIVE_MS
        return replace(content, view=content.view or view, interval_ms=interval_ms)

    def read_revision(self, provider: ReportProvider, view: View) -> str | None:
        """Return the revision of the data as text, which JavaScript does not round."""
        if self.revision is None or (self.is_of_run and view.run is None):
            return None
        try:
            found = self.revision(provider, view)
        except UnknownRunError:
            return None
        return None if found is None else str(found)
