"""The page's address: it holds the whole view, so that a view can be sent to a colleague."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import parse_qs, quote, unquote, urlencode

from rankscope.analysis.drawing.raster import Window
from rankscope.analysis.drawing.rows import GroupBy

_MAX_DIGITS = 15


class Page(StrEnum):
    """What the address names; the value is its first path segment."""

    NEWEST = ""
    RUN = "run"
    TIMELINE = "timeline"
    UNKNOWN = "?"


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One address, read."""

    page: Page
    run: str | None = None
    """None: the newest one."""

    epoch: int | None = None
    """None: the last one."""

    step: int | None = None
    """None: the one that the top finding shows best."""

    group_by: GroupBy = GroupBy.PP
    window: Window | None = None
    """The part of the step that fills the page; None: all of it."""


def read_address(path: str, query: str) -> View:
    """Read a path below the dashboard's base and a query string; what makes no sense is left out.

    Args:
        path: Without the base path, with or without slashes at its ends.
        query: With or without its ``?``.
    """
    first, _, rest = path.strip("/").partition("/")
    asked = {key: values[-1] for key, values in parse_qs(query.lstrip("?")).items()}
    if first == Page.RUN and rest:
        return View(page=Page.RUN, run=unquote(rest))
    if first == Page.TIMELINE and not rest:
        return View(
            page=Page.TIMELINE,
            run=asked.get("run"),
            epoch=_number(asked.get("epoch")),
            step=_number(asked.get("step")),
            group_by=_group_by(asked.get("group")),
            window=_window(asked),
        )
    return View(page=Page.UNKNOWN if first else Page.NEWEST)


def write_address(view: View, *, base_path: str) -> str:
    """Return the address that `read_address` reads back as ``view``."""
    if view.page is Page.RUN and view.run is not None:
        return f"{base_path}run/{quote(view.run, safe='')}"
    if view.page is Page.TIMELINE:
        asked = {
            "run": view.run,
            "epoch": view.epoch,
            "step": view.step,
            "group": None if view.group_by is GroupBy.PP else view.group_by.value,
            **_window_words(view.window),
        }
        given = {key: value for key, value in asked.items() if value is not None}
        return f"{base_path}timeline?{urlencode(given)}" if given else f"{base_path}timeline"
    return base_path


def _number(text: str | None) -> int | None:
    plain = text is not None and text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    return int(text) if plain and text is not None else None


def _window(asked: dict[str, str]) -> Window | None:
    """Read ``from`` and ``to``, ns after the step's begin, and ``rows``, first-last from 0."""
    first, _, last = asked.get("rows", "").partition("-")
    texts = (asked.get("from"), asked.get("to"), first, last)
    begin_ns, end_ns, first_row, last_row = (_number(text) for text in texts)
    if begin_ns is None or end_ns is None or first_row is None or last_row is None:
        return None
    if begin_ns >= end_ns or first_row > last_row:
        return None
    return Window(begin_ns=begin_ns, end_ns=end_ns, first_row=first_row, end_row=last_row + 1)


def _window_words(window: Window | None) -> dict[str, str]:
    if window is None:
        return {}
    return {
        "from": str(window.begin_ns),
        "to": str(window.end_ns),
        "rows": f"{window.first_row}-{window.end_row - 1}",
    }


def _group_by(text: str | None) -> GroupBy:
    return GroupBy(text) if text in set(GroupBy) else GroupBy.PP
