"""`rankscope analyze`: diagnose a stored run, as text or as one JSON document."""

import json
from typing import Annotated

import typer

from ..errors import BadInputError
from ..terminal.lines import terminal_width
from .flags import AsJson, Store


def analyze(
    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False)],
    *,
    steps: Annotated[
        str, typer.Option(metavar="A:B", help="Steps A to B, both included; either may be empty.")
    ] = ":",
    as_json: AsJson = False,
    store: Store = None,
) -> None:
    """Say which rank is slow, which ranks wait for it, and why."""
    first, last = parse_steps(steps)
    typer.echo(analyze_stored(run, first=first, last=last, as_json=as_json, store_url=store))


def analyze_stored(
    run_id: str, *, first: int | None, last: int | None, as_json: bool, store_url: str | None
) -> str:
    """Return the diagnosis of steps ``first`` to ``last`` of a run, ready to print.

    Raises:
        UnknownRunError: The store holds no run of that name.
        EmptyRunError: It holds no spans in these steps.
        StoreError: The store could not be opened or read.
    """
    from ..memory import keep_freed_memory, without_collection

    keep_freed_memory()  # before numpy's threads, which would be given pools of their own
    with without_collection():
        return _analyze_stored(run_id, (first, last), as_json=as_json, store_url=store_url)


def _analyze_stored(
    run_id: str, steps: tuple[int | None, int | None], *, as_json: bool, store_url: str | None
) -> str:
    from rankscope.analysis.analyze import analyze_known
    from rankscope.analysis.report.document import to_document
    from rankscope.analysis.verdict import verdict_sentence
    from rankscope.collector.client.served_store import open_for_reading
    from rankscope.collector.store.location import default_store_url

    from ..sources.finding_history import History, follows_document, follows_text
    from ..sources.store_source import StoreSource
    from ..terminal.report_text import report_text

    with open_for_reading(store_url or default_store_url()) as store:
        source = StoreSource(store)
        run = source.run_info(run_id)
        report = analyze_known(source, run, first=steps[0], last=steps[1])
        followed = History(store).of_report(report, run)
    if as_json:
        document = to_document(report)
        for finding, found in zip(document["findings"], followed, strict=True):
            finding["follows"] = follows_document(found)
        return json.dumps(document, allow_nan=False)
    return report_text(
        report,
        verdict=verdict_sentence(report),
        width=terminal_width(),
        follows=tuple(map(follows_text, followed)),
    )


def parse_steps(text: str) -> tuple[int | None, int | None]:
    """Return the first and last step that ``A:B`` names; None where an end is left open.

    Raises:
        BadInputError: It is not of that form, or ends before it begins.
    """
    first_text, colon, last_text = text.partition(":")
    ends = [part.strip() for part in (first_text, last_text)]
    if not colon or not all(end == "" or (end.isascii() and end.isdigit()) for end in ends):
        raise BadInputError(f"--steps {text!r} must be A:B, as 10:29, 10: or :29")
    first, last = (int(end) if end else None for end in ends)
    if first is not None and last is not None and last < first:
        raise BadInputError(f"--steps {text!r} ends before it begins: give {last}:{first}")
    return first, last
