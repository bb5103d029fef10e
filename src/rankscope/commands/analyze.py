"""`rankscope analyze`: the diagnosis of a stored run, as text or as one JSON document."""

import json
from typing import Annotated

import typer

from ..errors import BadInputError
from ..terminal.lines import Progress, terminal_width
from .flags import AsJson, Store, open_existing_store


def analyze(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.", show_default=False)],
    *,
    steps: Annotated[
        str,
        typer.Option(
            metavar="A:B", help="Analyse steps A to B, both included. Either may be left out."
        ),
    ] = ":",
    as_json: AsJson = False,
    store: Store = None,
) -> None:
    """Diagnose a run: slow ranks, waiting ranks, causes."""
    first, last = parse_steps(steps)
    typer.echo(analyze_stored(run, first=first, last=last, as_json=as_json, store_url=store))


def analyze_stored(
    run_id: str, *, first: int | None, last: int | None, as_json: bool, store_url: str | None
) -> str:
    """Return the diagnosis of steps ``first`` to ``last`` of a run as printable text.

    Raises:
        UnknownRunError: The store holds no run of this name.
        EmptyRunError: The run has no spans in these steps.
        StoreError: The store could not be opened or read.
    """
    from ..memory import keep_freed_memory, without_collection

    keep_freed_memory()  # before numpy starts threads, each of which would get its own arena

    from rankscope.analysis.analyze import analyze_known
    from rankscope.analysis.report.document import to_document
    from rankscope.analysis.verdict import verdict_sentence

    from ..sources.finding_history import FindingHistory, format_recurrence, recurrence_document
    from ..sources.store_source import StoreSource
    from ..terminal.report_text import report_text

    with without_collection(), open_existing_store(store_url) as store, Progress() as progress:
        if not as_json:
            progress.show(f"analysing run {run_id}")
        source = StoreSource(store)
        run = source.run_info(run_id)
        report = analyze_known(source, run, first=first, last=last)
        recurrences = FindingHistory(store).follow_report(report, run)
    if as_json:
        document = to_document(report)
        for finding, recurrence in zip(document["findings"], recurrences, strict=True):
            finding["follows"] = recurrence_document(recurrence)
        return json.dumps(document, allow_nan=False)
    return report_text(
        report,
        verdict=verdict_sentence(report),
        width=terminal_width(),
        follows=tuple(map(format_recurrence, recurrences)),
    )


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
