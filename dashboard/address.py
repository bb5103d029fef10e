"""Addresses of pages: an address holds the whole view, so that it can be sent to a colleague."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qs, quote, unquote, urlencode

from rankscope.analysis.drawing.raster import Viewport
from rankscope.analysis.drawing.rows import GroupBy

OVERVIEW = "run"
TIMELINE = "timeline"
UNKNOWN = "?"
"""An address that can name no page."""

MAX_DIGITS = 15
"""Digits of a number in an address or a post: a browser keeps larger ones inexactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A page and its parameters: the content of an address."""

    page: str = OVERVIEW
    """First part of the path."""

    run: str | None = None
    """None: the newest one."""

    epoch: int | None = None
    """None: the last one."""

    step: int | None = None
    """None: the step that shows the top finding best."""

    group_by: GroupBy = GroupBy.PP
    viewport: Viewport | None = None
    """The part of the step that fills the page; None: all of it."""


def read_address(path: str, query: str) -> View:
    """Return the view of an address. Parts without meaning are ignored.

    The overview is ``/`` and ``/run/NAME``; every other page is ``/PAGE`` with a query.

    Args:
        path: Without the base path, with or without slashes at its ends.
        query: With or without its ``?``.
    """
    page, _, run = path.strip("/").partition("/")
    if not page:
        return View()
    if page == OVERVIEW and run:
        return View(run=unquote(run))
    if page == OVERVIEW or run:
        return View(page=UNKNOWN)
    values = {key: values[-1] for key, values in parse_qs(query.lstrip("?")).items()}
    group_by = values.get("group")
    return View(
        page=page,
        run=values.get("run"),
        epoch=_number(values.get("epoch")),
        step=_number(values.get("step")),
        group_by=GroupBy(group_by) if group_by in set(GroupBy) else GroupBy.PP,
        viewport=_read_viewport(values),
    )


def write_address(view: View, *, base_path: str) -> str:
    """Return the address that `read_address` reads as ``view``."""
    if view.page == OVERVIEW:
        return base_path if view.run is None else f"{base_path}run/{quote(view.run, safe='')}"
    values = {
        "run": view.run,
        "epoch": view.epoch,
        "step": view.step,
        "group": None if view.group_by is GroupBy.PP else view.group_by.value,
        **_write_viewport(view.viewport),
    }
    given = {key: value for key, value in values.items() if value is not None}
    query = f"?{urlencode(given)}" if given else ""
    return f"{base_path}{quote(view.page)}{query}"


def _number(text: str | None) -> int | None:
    if text is None or not (text.isascii() and text.isdigit()) or len(text) > MAX_DIGITS:
        return None
    return int(text)


def _read_viewport(values: dict[str, str]) -> Viewport | None:
    """Read ``from`` and ``to``, in ns from the step's begin, and ``rows``, first-last from 0."""
    first, _, last = values.get("rows", "").partition("-")
    texts = (values.get("from"), values.get("to"), first, last)
    begin_ns, end_ns, first_row, last_row = (_number(text) for text in texts)
    if begin_ns is None or end_ns is None or first_row is None or last_row is None:
        return None
    if begin_ns >= end_ns or first_row > last_row:
        return None
    return Viewport(begin_ns=begin_ns, end_ns=end_ns, first_row=first_row, end_row=last_row + 1)


def _write_viewport(viewport: Viewport | None) -> dict[str, str]:
    if viewport is None:
        return {}
    return {
        "from": str(viewport.begin_ns),
        "to": str(viewport.end_ns),
        "rows": f"{viewport.first_row}-{viewport.end_row - 1}",
    }
