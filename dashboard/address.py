"""Addresses of pages: an address holds the whole view, so that it can be sent to a colleague."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote, unquote, urlencode

from rankscope.analysis.drawing.raster import ALL_ROWS, Viewport
from rankscope.analysis.drawing.rows import RowOrder
from rankscope.analysis.drawing.selection import SpanPlace, frame_proof
from rankscope.analysis.report.text import format_ranges
from rankscope.analysis.severity import MATTERS
from rankscope.tracer.span import SpanKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope.analysis.report.report import Finding, RunReport

OVERVIEW = "run"
INCIDENT = "incident"
TIMELINE = "timeline"
RANK = "rank"
MFU = "mfu"
LINKS = "links"
GRAPH = "graph"
START_UP = "start-up"
WHAT_IF = "what-if"
COMPARE = "compare"
RUNS = "runs"
ALERTS = "alerts"
HEALTH = "health"
LAYERS = ("path", "ideal")
"""What the timeline may draw beside a step: its critical path, and the usual step."""

MAX_SEARCH = 100
"""Characters of a search."""

UNKNOWN = "?"
"""An address that can name no page."""

MAX_DIGITS = 15
"""Digits of a number in an address or a post: a browser keeps larger ones inexactly."""

MAX_MARKED = 65_536
"""Ranks of one address: a range of all ranks of the largest job, and no more memory than that."""


WHOLE = "whole"
"""Word of `View.show` for all of a step, which is else shown until it came to a stop."""

PROOF_PATH = "export/proof.svg"
"""Address of the picture of a finding, as a file."""


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

    ranks: tuple[int, ...] = ()
    """The marked ranks, ascending; on the page of a rank, the first one is shown."""

    with_run: str | None = None
    """The run to compare with."""

    steps: tuple[int, int] | None = None
    """First and last step of a range."""

    with_steps: tuple[int, int] | None = None
    """Likewise of the run to compare with."""

    show: str | None = None
    """What the page shows of several things, as one of its own words; None: its first choice.
    On the timeline a cause, for the proof of its finding, or `WHOLE`; the changes of a what-if; the
    number of an incident, None for the list of them."""

    find: str | None = None
    """What is searched for on the timeline."""

    span: SpanPlace | None = None
    """The span that is selected on the timeline."""

    box: Viewport | None = None
    """The box that is measured on the timeline, of places among the rows of the whole step."""

    layers: tuple[str, ...] = ()
    """Those of `LAYERS` that are drawn, in their order."""

    order: RowOrder = RowOrder.PP
    folded: tuple[int, ...] = ()
    """Numbers of the groups of rows that are folded, as in `analysis.drawing.rows.Group`."""

    viewport: Viewport | None = None
    """The part of the step that fills the page; None: all of it, or until it came to a stop."""


def read_address(path: str | None, query: str | None) -> View:
    """Return the view of an address. Parts without meaning are ignored.

    The overview is ``/`` and ``/run/NAME``, an incident ``/run/NAME/incident/NUMBER``; every other
    page is ``/PAGE`` with a query.

    Args:
        path: With or without slashes at its ends.
        query: With or without its ``?``.
    """
    page, _, run = (path or "").strip("/").partition("/")
    if not page:
        return View()
    if page == OVERVIEW and run:
        name, _, inside = run.partition("/")
        below, _, number = inside.partition("/")
        if below == INCIDENT:
            return View(page=INCIDENT, run=unquote(name), show=unquote(number) or None)
        return View(run=unquote(run))
    if page == OVERVIEW or run:
        return View(page=UNKNOWN)
    values = {key: values[-1] for key, values in parse_qs((query or "").lstrip("?")).items()}
    order = values.get("order")
    return View(
        page=page,
        run=values.get("run"),
        epoch=_number(values.get("epoch")),
        step=_number(values.get("step")),
        ranks=read_ranks(values.get("rank", "")),
        with_run=values.get("with"),
        steps=read_steps(values.get("steps", "")),
        with_steps=read_steps(values.get("with-steps", "")),
        show=values.get("show"),
        find=values.get("find", "")[:MAX_SEARCH] or None,
        span=_read_span(values.get("span", "")),
        box=_read_box(values.get("box", "")),
        layers=tuple(one for one in LAYERS if one in values.get("layers", "").split(",")),
        order=RowOrder(order) if order in set(RowOrder) else RowOrder.PP,
        folded=read_ranks(values.get("fold", "")),
        viewport=_read_viewport(values),
    )


def write_address(view: View, *, base_path: str = "/") -> str:
    """Return the address that `read_address` reads as ``view``; ``base_path`` may be a URL."""
    if view.page == OVERVIEW:
        return base_path if view.run is None else f"{base_path}run/{quote(view.run, safe='')}"
    if view.page == INCIDENT and view.run is not None:
        number = "" if view.show is None else f"/{quote(view.show, safe='')}"
        return f"{base_path}run/{quote(view.run, safe='')}/{INCIDENT}{number}"
    box = view.box
    values = {
        "run": view.run,
        "epoch": view.epoch,
        "step": view.step,
        "rank": format_ranks(view.ranks) or None,
        "with": view.with_run,
        "steps": _write_steps(view.steps),
        "with-steps": _write_steps(view.with_steps),
        "show": view.show,
        "find": view.find,
        "span": None
        if view.span is None
        else f"{view.span.rank},{view.span.kind.value},{view.span.at_ns}",
        "box": None
        if box is None
        else f"{box.begin_ns}-{box.end_ns},{box.first_row}-{box.end_row - 1}",
        "layers": ",".join(view.layers) or None,
        "order": None if view.order is RowOrder.PP else view.order.value,
        "fold": format_ranks(view.folded) or None,
        **_write_viewport(view.viewport),
    }
    given = {key: value for key, value in values.items() if value is not None}
    query = f"?{urlencode(given, safe=',')}" if given else ""
    return f"{base_path}{quote(view.page)}{query}"


def write_query(view: View) -> str:
    """Return the query of an address, with its ``?``; "" if there is none."""
    _, mark, query = write_address(view).partition("?")
    return mark + query


def view_finding(view: View, finding: Finding) -> View:
    """Return the view of a step that shows a finding: its ranks marked, at its proof if known.

    That of a hang or a crash has no proof: its step is where it came to a stop.
    """
    proof = finding.proof
    order = RowOrder.EXCESS if finding.ranks or proof is not None else RowOrder.PP
    if finding.cause == "stage-imbalance":  # stage against stage
        order = RowOrder.PP
    shown = replace(view, page=TIMELINE, ranks=finding.ranks, order=order)
    if finding.cause == "network-degradation":  # of all ranks: the usual step is the comparison
        shown = replace(shown, order=RowOrder.PP, layers=("ideal",))
    if proof is None:
        last = None if finding.steps is None else finding.steps[1]
        return replace(shown, step=last if view.step is None else view.step)
    return replace(shown, epoch=proof.epoch, step=proof.step, viewport=frame_proof(proof))


def provable(report: RunReport) -> Finding | None:
    """Return the top finding if it matters and a step shows it."""
    top = report.top_finding
    return top if top.severity in MATTERS and top.steps is not None else None


def view_proof(view: View, finding: Finding) -> View:
    """Return the view of a run that shows a finding's proof: the timeline finds its step."""
    return View(page=TIMELINE, run=view.run, ranks=finding.ranks, show=finding.cause)


def read_ranks(text: str) -> tuple[int, ...]:
    """Return the ranks of a text such as ``2,5-9``, ascending.

    Parts that are neither a rank nor a range are ignored, and so is a range that leads beyond
    `MAX_MARKED` ranks.
    """
    ranks: set[int] = set()
    for part in text.split(","):
        begin, to, end = part.partition("-")
        first, last = _number(begin), _number(end if to else begin)
        if first is None or last is None or not 0 <= last - first < MAX_MARKED - len(ranks):
            continue
        ranks.update(range(first, last + 1))
    return tuple(sorted(ranks))


def format_ranks(ranks: Sequence[int]) -> str:
    """Return the text that `read_ranks` reads as ``ranks``, which ascend."""
    return format_ranges(ranks).replace(" ", "") if ranks else ""


def read_steps(text: str) -> tuple[int, int] | None:
    """Return the first and last step of a text such as ``10-19`` or ``7``; None for any other."""
    begin, to, end = text.strip().partition("-")
    first, last = _number(begin), _number(end if to else begin)
    return None if first is None or last is None or last < first else (first, last)


def _write_steps(steps: tuple[int, int] | None) -> str | None:
    return None if steps is None else f"{steps[0]}-{steps[1]}"


def _number(text: str | None) -> int | None:
    if text is None or not (text.isascii() and text.isdigit()) or len(text) > MAX_DIGITS:
        return None
    return int(text)


def _read_span(text: str) -> SpanPlace | None:
    """Read the rank, kind and time of a span, in ns from the step's begin."""
    rank, _, rest = text.partition(",")
    kind, _, at = rest.partition(",")
    rank_number, at_ns = _number(rank), _number(at)
    if rank_number is None or at_ns is None or kind not in set(SpanKind):
        return None
    return SpanPlace(rank=rank_number, kind=SpanKind(kind), at_ns=at_ns)


def _read_box(text: str) -> Viewport | None:
    """Read begin and end of a box, in ns from the step's begin, and its first and last row."""
    begin, to, rows = text.partition(",")
    first, _, last = begin.partition("-")
    return _read_viewport({"from": first, "to": last, "rows": rows}) if to else None


def _read_viewport(values: dict[str, str]) -> Viewport | None:
    """Read ``from`` and ``to``, in ns from the step's begin, and ``rows``, first-last from 0.

    Without ``rows`` it has all.
    """
    first, _, last = values.get("rows", f"0-{ALL_ROWS - 1}").partition("-")
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
    times = {"from": str(viewport.begin_ns), "to": str(viewport.end_ns)}
    if (viewport.first_row, viewport.end_row) == (0, ALL_ROWS):
        return times
    return {**times, "rows": f"{viewport.first_row}-{viewport.end_row - 1}"}
