"""`rankscope analyze`: the diagnosis of a stored run, as text or as one JSON document."""

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import BadInputError
from ..terminal.lines import (
    DEFAULT_TOP,
    Progress,
    emphasize,
    table_width,
    terminal_width,
    wrap_text,
)
from .flags import AsJson, Store, open_existing_store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankscope.analysis.report.report import RunReport
    from rankscope.collector.store.store import Store as OpenStore

    from ..terminal.report_text import View

WATCH_S = 5.0
"""Pause between two looks for new steps; a live verdict is due within three steps."""

HANG_S = 30.0
"""Time without a new step after which the run is analysed again: a hang brings none."""

CLEAR = "\x1b[H\x1b[2J"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyzeOptions:
    """Options of `rankscope analyze`."""

    run_id: str
    first: int | None = None
    last: int | None = None
    top: int = DEFAULT_TOP
    rank: int | None = None
    has_details: bool = False
    is_fresh: bool = False
    """Analyse all steps here, even if there is a report."""

    as_json: bool = False
    store_url: str | None = None


def analyze(  # noqa: PLR0913  # one parameter a flag
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.")],
    *,
    steps: Annotated[
        str,
        typer.Option(
            metavar="A:B", help="Analyse steps A to B, both included. Either may be left out."
        ),
    ] = ":",
    top: Annotated[
        int, typer.Option(min=1, metavar="N", help="List N findings, waiting ranks and transfers.")
    ] = DEFAULT_TOP,
    rank: Annotated[
        int | None, typer.Option(min=0, metavar="R", help="Print what is known of this rank only.")
    ] = None,
    details: Annotated[
        bool,
        typer.Option("--details", help="Print the figures of the replay and the bandwidths, too."),
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Print it again whenever there are new steps.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Analyse all steps anew, even if there is a report.")
    ] = False,
    as_json: AsJson = False,
    store: Store = None,
) -> None:
    """Diagnose a run: slow ranks, waiting ranks, causes."""
    first, last = parse_steps(steps)
    if as_json and rank is not None:
        raise BadInputError("--json has all ranks: leave out --rank")
    options = AnalyzeOptions(
        run_id=run, first=first, last=last, top=top, rank=rank, has_details=details,
        is_fresh=fresh, as_json=as_json, store_url=store,
    )  # fmt: skip
    if not watch:
        typer.echo(analyze_stored(options))
        return
    if as_json:
        raise BadInputError("--watch prints text: leave out --json")
    watch_stored(options)


def analyze_stored(options: AnalyzeOptions) -> str:
    """Return the diagnosis of a run, or of some of its steps, as printable text.

    Of an ended run it is the stored report, which the pages show too, if there is one.

    Raises:
        UnknownRunError: The store holds no run of this name.
        EmptyRunError: The run has no spans in these steps.
        BadInputError: The run has no rank of this number.
        StoreError: The store could not be opened or read.
    """
    from ..memory import keep_freed_memory, without_collection

    keep_freed_memory()  # before numpy starts threads, each of which would get its own arena

    with (
        without_collection(),
        open_existing_store(options.store_url) as store,
        Progress() as progress,
    ):
        store.stop_merges()
        return _analyze_open(store, options, progress)


def watch_stored(options: AnalyzeOptions) -> None:
    """Print the diagnosis of a run whenever it has new steps, until it has ended.

    Raises:
        Those of `analyze_stored`.
    """
    from ..server.reports import find_run
    from ..sources.store_source import StoreSource

    seen: tuple[object, ...] | None = None
    shown, looked_s = "", 0.0
    with open_existing_store(options.store_url) as store:
        while True:
            summary = find_run(StoreSource(store), options.run_id)
            state = (summary.num_steps, summary.state)
            if state != seen or time.monotonic() - looked_s >= HANG_S:
                with Progress() as progress:
                    text = _analyze_open(store, options, progress)
                if text != shown:
                    typer.echo(f"{CLEAR if table_width() else ''}{text}\n")
                seen, shown, looked_s = state, text, time.monotonic()
            if summary.state != "running":
                return
            time.sleep(WATCH_S)


def _analyze_open(store: "OpenStore", options: AnalyzeOptions, progress: Progress) -> str:
    from rankscope.collector.client.served_store import ServedStore

    from ..doctor.confirmation import with_host_checks
    from ..server.run_answer import find_or_analyze, read_answer
    from ..sources.finding_history import format_recurrence
    from ..sources.store_source import StoreSource
    from ..terminal.proof_address import format_incident, format_proof
    from ..terminal.report_text import View

    show = (lambda _: None) if options.as_json else progress.show
    source = StoreSource(store)
    show(f"reading run {options.run_id}")
    run = source.run_info(options.run_id)
    if options.rank is not None and options.rank not in run.ranks:
        raise BadInputError(
            f"run {options.run_id!r} has no rank {options.rank}: give one of"
            f" {min(run.ranks, default=0)} to {max(run.ranks, default=0)}"
        )
    steps = options.first, options.last
    report = find_or_analyze(store, run, steps=steps, is_fresh=options.is_fresh, show=show)
    show("comparing with earlier runs")
    answer = read_answer(store, run, report, rank=options.rank)
    if options.as_json:
        return json.dumps(answer.to_document(store), allow_nan=False)
    report = with_host_checks(store, report)
    view = View(
        top=options.top,
        rank=options.rank,
        has_details=options.has_details,
        table_width=table_width(),
        states=answer.states,
        notes=answer.notes,
        goodput=answer.goodput,
    )
    server = store.server if isinstance(store, ServedStore) else None
    top = answer.numbers[report.findings.index(report.top_finding)]
    places = {
        "proof": format_proof(report, server),
        "incident": format_incident(report.run, top, server),
    }
    follows = tuple(map(format_recurrence, answer.recurrences))
    return _format_report(report, follows, view, places)


def _format_report(
    report: "RunReport", follows: tuple[str, ...], view: "View", places: "Mapping[str, str]"
) -> str:
    """Return the text of a report, on a terminal with its verdict in colour.

    Args:
        report: The report.
        follows: Recurrence of each finding.
        view: Parts to print.
        places: Where it is shown, by what is shown there; "" if nothing is.
    """
    from rankscope.analysis.report.report import Severity
    from rankscope.analysis.verdict import verdict_sentence

    from ..terminal.report_text import report_text

    text = report_text(
        report,
        verdict=verdict_sentence(report),
        width=terminal_width(),
        follows=follows,
        view=view,
    )
    verdict, gap, rest = text.partition("\n\n")
    top = report.top_finding
    colour = {Severity.CRITICAL: "red", Severity.WARNING: "yellow"}.get(
        top.severity or Severity.NONE, "green"
    )
    if top.cause == "insufficient-evidence":
        colour = "yellow"
    lines = [
        line
        for name, place in places.items()
        if place
        for line in wrap_text(place, terminal_width(), first=f"{name}: ")
    ]
    gap = "".join(f"\n{line}" for line in lines) + gap
    return f"{emphasize(verdict, colour)}{gap}{rest}"


def parse_steps(text: str) -> tuple[int | None, int | None]:
    """Return the first and the last step of ``A:B``; None for an end that is left out.

    Raises:
        BadInputError: The text has another form, or B is smaller than A.
    """
    first_text, colon, last_text = text.partition(":")
    ends = [part.strip() for part in (first_text, last_text)]
    if not colon or not all(end == "" or (end.isascii() and end.isdigit()) for end in ends):
        raise BadInputError(f"--steps {text!r} is not A:B: give 10:29, 10: or :29, for example")
    first, last = (int(end) if end else None for end in ends)
    if first is not None and last is not None and last < first:
        raise BadInputError(f"--steps {text!r} ends before it begins: give {last}:{first}")
    return first, last
