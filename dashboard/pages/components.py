"""Components that every page uses: cards, tables, figures, timers, and screen reader labels."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import dash_mantine_components as dmc  # type: ignore[import-untyped]
from dash import ClientsideFunction, Dash, Input, Output, State, dcc, html

from rankscope.analysis.report.text import EMPTY, name_ranges

from ..address import MAX_DIGITS, RANK, View, write_address
from ..theme import graph_config

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import plotly.graph_objects as go
    from dash.development.base_component import Component

    from rankscope.analysis.trace.tables import RunSummary

    Cell = Component | str | Sequence[Component | str]
    """Content of a cell of a table."""

    Figure = go.Figure | dict[str, Any]
    """Plotly's own object, or the plain document that is sent to the browser."""

RUNNING, ENDED, FAILED, LOST = "running", "ended", "failed", "lost"
"""States of a run, as in `RunSummary.state`."""

NO_NEW_STEP = "no new step"
"""The state of a running job that is silent, as pages show it."""

SOON_MS = 1_500
"""Pause between an answer and the next request while a result is being made."""

LIVE_MS = 3_000
"""Likewise for a run that trains, or may appear."""

QUIET_MS = 20_000
"""Likewise for a run that no longer trains."""

FALLBACK_MS = 30_000
"""Pause between two requests whether or not the first was answered: an answer lost with a
restarted server would otherwise stop a poll timer for good."""

FALLBACK_TIMER = "fallback-timer"

GRID_THEME = (
    "themeQuartz.withParams({backgroundColor: 'var(--surface)', foregroundColor: 'var(--ink)',"
    " headerBackgroundColor: 'var(--surface)', headerTextColor: 'var(--ink-soft)',"
    " borderColor: 'var(--edge)', rowHoverColor: 'var(--ground)', accentColor: 'var(--accent)',"
    " chromeBackgroundColor: 'var(--surface)', fontFamily: 'var(--font)', fontSize: 13,"
    " headerFontSize: 12.5, cellHorizontalPadding: 8, wrapperBorder: false,"
    " browserColorScheme: 'inherit'})"
)
"""AG Grid's theme in the page's own colours, so that light and dark differ by style sheet alone."""


def card(*children: object, class_name: str = "", label: str = "") -> Component:
    """Return a bordered part of a page.

    Args:
        label: Its name for screen readers; "": its first child, if that is a heading.
    """
    first = children[0] if children else None
    if not label and isinstance(first, html.H2) and isinstance(first.children, str):
        label = first.children
    framed: Component = dmc.Paper(
        list(children),
        withBorder=True,
        radius="md",
        className=f"card {class_name}".strip(),
        **({"attributes": {"root": {"role": "group"}}, **labelled(label)} if label else {}),
    )
    return framed


STACKED = "stacked-rows"
"""Style of a table whose rows are a list of named values each on a small screen."""


def table(
    label: str,
    head: Mapping[str, str],
    rows: Iterable[Sequence[Cell]],
    *,
    class_name: str = "",
) -> Component:
    """Return a table that scrolls on a small screen.

    Args:
        label: Its name for screen readers.
        head: The style of each column by its name: "number" or "".
        rows: Cells in the style of their columns, but a `dmc.TableTd` has its own.
    """
    columns = [dmc.TableTh(name, className=style) for name, style in head.items()]
    is_stacked = STACKED in class_name.split()
    own = [
        {"className": style} | ({"data-head": name} if is_stacked else {})
        for name, style in head.items()
    ]
    lines = [
        dmc.TableTr(
            [
                cell if isinstance(cell, dmc.TableTd) else dmc.TableTd(cell, **style)
                for cell, style in zip(row, own, strict=True)
            ]
        )
        for row in rows
    ]
    cells = dmc.Table(
        [dmc.TableThead(dmc.TableTr(columns)), dmc.TableTbody(lines)],
        tabularNums=True,
        verticalSpacing="xs",
        className=f"cells {class_name}".strip(),
    )
    return html.Div(cells, className="scrolls", tabIndex=0, role="region", **labelled(label))


def rank_link(run: str | None, rank: int) -> Component:
    """Return a rank's number as a link to its page.

    Args:
        run: The run; None: the newest one.
    """
    href = write_address(View(page=RANK, run=run, ranks=(rank,)))
    title = f"Show rank {rank}"
    return dcc.Link(str(rank), href=href, className="rank-link", title=title)


def rank_links(
    run: str | None, ranks: Sequence[int], *, max_ranges: int | None = None, num_ranks: int = 0
) -> list[Component | str]:
    """Return ranks as `format_ranges` writes them, each number a link to its rank's page.

    Args:
        run: The run; None: the newest one.
        ranks: Ascending.
        max_ranges: Ranges to show before the rest is counted; all if None.
        num_ranks: Number of all ranks, if ``ranks`` are only the first ones.
    """
    parts: list[Component | str] = []
    shown, num_more = name_ranges(ranks, max_ranges=max_ranges, num_all=num_ranks)
    for first, last in shown:
        parts += [", "] if parts else []
        parts.append(rank_link(run, first))
        if last > first:
            parts += ["-", rank_link(run, last)]
    return [*parts, f" and {num_more:,} more"] if num_more else parts or [EMPTY]


def local_time(utc: str) -> Component | str:
    """Return a time that `format_time` wrote; the browser shows it in its own zone.

    `assets/local_time.js` does, for every such element. A text that is no time stays as it is.
    """
    if not utc[:1].isdigit():
        return utc
    return html.Time(f"{utc} UTC", dateTime=f"{utc.replace(' ', 'T')}Z")


def with_code(text: str) -> list[Component | str]:
    """Return a text, escaped before, with what is in backticks as code."""
    parts = enumerate(_CODE.split(text))
    return [html.Code(part) if place % 2 else part for place, part in parts if part]


_CODE = re.compile(r"`([^`]+)`")
_RANKS = re.compile(r"\b(?:[Rr]ank \d+|[Rr]anks \d+(?:(?:-|, | and | to )\d+)*)")
_RANK = re.compile(r"\d+")
_COUNTED = re.compile(r"[\d,.]*\d* ?(?:%|more\b|others?\b|[mun]?s\b|[KMGT]i?B)")
"""What follows a number that counts or measures something: "ranks 3, 5 and 12 more"."""


def link_ranks(text: str, run: str | None, *, max_rank: int | None = None) -> list[Component | str]:
    """Return a sentence with each rank that it names as a link to its page.

    Args:
        text: Escaped.
        run: The run; None: the newest one.
        max_rank: Larger numbers are no ranks; None: every one may be.
    """
    parts: list[Component | str] = []
    done = 0
    for names in _RANKS.finditer(text):
        for found in _RANK.finditer(text, names.start(), names.end()):
            rank = found.group()
            is_long = len(rank) > MAX_DIGITS or (max_rank is not None and int(rank) > max_rank)
            if is_long or _COUNTED.match(text, found.end()):
                continue
            parts += [text[done : found.start()], rank_link(run, int(rank))]
            done = found.end()
    return [part for part in [*parts, text[done:]] if part != ""]


def canvas(part: str, content: dict[str, Any] | None) -> list[Component]:
    """Return a canvas on which the assets draw what `canvas_document` says, and its data."""
    return [
        dcc.Store(id=f"{part}-on-canvas", data=content),
        html.Canvas(id=f"{part}-canvas", **decorative()),
    ]


def run_in_browser(
    app: Dash, function: str, *parts: Input | Output | State, at_start: bool = False
) -> None:
    """Register a callback that a function of the assets runs, such as "timeline.follow"."""
    app.clientside_callback(  # type: ignore[no-untyped-call]
        ClientsideFunction(*function.split(".")), *parts, prevent_initial_call=not at_start
    )


def register_canvas(app: Dash, part: str) -> None:
    """Draw what a callback outputs as ``{part}-on-canvas``, before plotly is there if need be."""
    # A callback without an output is not called at first.
    drawn, content = Output(f"{part}-canvas", "hidden"), Input(f"{part}-on-canvas", "data")
    run_in_browser(app, "canvas.draw", drawn, content, at_start=True)


def graph(
    part: str,
    figure: Figure,
    *,
    selects: bool = False,
    min_px: int = 0,
    beneath: Sequence[Component] = (),
) -> Component:
    """Return a figure.

    Args:
        selects: Whether the pointer selects a box.
        min_px: Width below which it scrolls, because its labels would overlap.
        beneath: A `canvas` under it.
    """
    # Reserves the height while plotly loads, so that nothing below moves.
    reserved = {"minHeight": height} if (height := graph_style(figure).get("height")) else {}
    config: Any = graph_config(selects=selects)
    return html.Div(
        [
            *beneath,
            dcc.Graph(
                id=part,
                figure=figure,
                config=config,
                style=graph_style(figure) | ({"minWidth": f"{min_px}px"} if min_px else {}),
            ),
        ],
        id=f"{part}-frame",
        style=reserved,
        className="over-canvas" if beneath else "scrolls" if min_px else "",
    )


def graph_style(figure: Figure) -> dict[str, str]:
    """Return the style that gives a responsive figure its own height, which plotly ignores."""
    height = figure["layout"]["height"]
    return {"height": f"{height}px"} if height else {}


def poll_timer(timer_id: str, *, interval_ms: int) -> Component:
    """Return a timer that stops when it fires; the answer restarts it by `next_tick`.

    Dash drops an answer if the same is requested again meanwhile: if answers took longer than
    the interval, a timer that just goes on would never show one.

    Args:
        interval_ms: Pause between an answer and the next request.
    """
    return dcc.Interval(
        id=timer_id, interval=interval_ms, n_intervals=0, max_intervals=next_tick(0)
    )


def next_tick(num_ticks: int | None) -> int:
    """Return the ``max_intervals`` that lets a timer fire once more after ``num_ticks``."""
    return (num_ticks or 0) + 1


def fallback_timer() -> Component:
    """Return the timer that refreshes every part of a page, every `FALLBACK_MS`."""
    return dcc.Interval(id=FALLBACK_TIMER, interval=FALLBACK_MS, n_intervals=0)


def poll_interval_ms(runs: Iterable[RunSummary], run_id: str | None) -> int:
    """Return the pause between an answer about a run and the next request.

    Args:
        run_id: The run, which may not be there yet; None: whichever comes first.
    """
    states = {run.run_id: run.state for run in runs}
    return LIVE_MS if states.get(run_id or "", RUNNING) == RUNNING else QUIET_MS


def labelled(label: str) -> dict[str, Any]:
    """Return the attribute that names a part to a screen reader."""
    return {"aria-label": label}


def announced() -> dict[str, Any]:
    """Return the attribute that makes a screen reader read a part's changes."""
    return {"aria-live": "polite"}


def not_announced() -> dict[str, Any]:
    """Return the attribute that keeps a screen reader from reading a part's changes."""
    return {"aria-live": "off"}


def pressed(*, is_on: bool) -> dict[str, Any]:
    """Return the attribute with the state of a button that turns something on and off."""
    return {"aria-pressed": "true" if is_on else "false"}


def decorative() -> dict[str, Any]:
    """Return the attribute that hides a part from screen readers."""
    return {"aria-hidden": "true"}
