"""`rankscope runs` and `findings`: lists of what the store holds, tags and notes of runs."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rankscope.analysis.report.text import (
    EMPTY,
    MAX_NAMED,
    format_range,
    format_ranges,
    format_seconds,
    format_time,
)

from ..errors import BadInputError
from ..terminal.lines import format_table, table_width
from .flags import AsJson, Store, existing_store_url, open_existing_store, user_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankscope.analysis.recurrence import Recurrence
    from rankscope.collector.read.findings import StoredFinding
    from rankscope.dashboard.records.page_results import RunLine

RUNS_ALIGNED = {
    "format": "k", "state": "k", "ranks": "r", "steps": "r", "spans": "r", "started (UTC)": "k",
}  # fmt: skip
FINDINGS_ALIGNED = {
    "no.": "r", "steps": "k", "cost": "r", "confidence": "r", "opened": "k", "closed": "k",
}  # fmt: skip
"""Columns that are not wrapped, as `format_table` takes them."""

NO_RUNS = "no runs yet: try `rankscope demo` or `rankscope simulate`, or trace a job"
NO_FINDINGS = (
    "no findings: `rankscope serve` records them while a job trains,"
    " and `rankscope analyze RUN` those of a run that has ended"
)


runs = typer.Typer(
    name="runs", help="List, delete, tag and annotate the stored runs.", rich_markup_mode=None
)

RunName = Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.")]
Tag = Annotated[str, typer.Argument(metavar="TAG", help="A short text without a comma.")]


@runs.callback(invoke_without_command=True)
def list_all(
    context: typer.Context,
    *,
    delete: Annotated[
        str | None,
        typer.Option(
            metavar="RUN", help="Delete this run for good. Its name cannot be used again."
        ),
    ] = None,
    as_json: AsJson = False,
    store: Store = None,
) -> None:
    """List the stored runs, or delete one."""
    if context.invoked_subcommand is not None:
        return
    if delete is not None:
        typer.echo(delete_stored(delete, as_json=as_json, store_url=store))
        return
    typer.echo(list_runs(as_json=as_json, store_url=store))


@runs.command("tag")
def add_tag(run: RunName, tag: Tag, *, store: Store = None) -> None:
    """Add a tag to a run: the page of runs shows it, and filters by it."""
    typer.echo(annotate(run, "tag", tag, store_url=store))


@runs.command("untag")
def remove_tag(run: RunName, tag: Tag, *, store: Store = None) -> None:
    """Remove a tag from a run."""
    typer.echo(annotate(run, "tag", tag, is_removed=True, store_url=store))


@runs.command("note")
def note(
    run: RunName,
    text: Annotated[
        str | None,
        typer.Argument(metavar="TEXT", help="The note. Default: list those that there are."),
    ] = None,
    *,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the note TEXT.")] = False,
    store: Store = None,
) -> None:
    """Add a note to a run, remove one, or list the notes of a run."""
    if text is not None:
        typer.echo(annotate(run, "note", text, is_removed=remove, store_url=store))
    elif remove:
        raise BadInputError("--remove: give the TEXT of the note to remove")
    else:
        typer.echo(list_notes(run, store_url=store))


def findings(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Name of the run. Default: all.")
    ] = None,
    *,
    as_json: AsJson = False,
    store: Store = None,
) -> None:
    """List the findings of all runs, the newest first. Times are UTC."""
    typer.echo(list_findings(run, as_json=as_json, store_url=store))


def list_runs(*, as_json: bool, store_url: str | None) -> str:
    """Return the stored runs, the newest first, as printable text."""
    from ..sources.stored_reports import read_run_lines

    with open_existing_store(store_url) as store:
        lines = read_run_lines(store)
    if as_json:
        return json.dumps({"runs": [_run_document(line) for line in lines]})
    if not lines:
        return NO_RUNS
    found = [line.run for line in lines]
    width = table_width()
    columns = {
        "run": [run.run_id for run in found],
        "format": [run.source_format for run in found],
        "state": [run.state for run in found],
        "ranks": [f"{run.world_size:,}" for run in found],
        "steps": [f"{run.num_steps:,}" for run in found],
        "spans": [f"{run.num_spans:,}" for run in found],
        "started (UTC)": [format_time(run.started_ns) for run in found],
        "verdict": [_format_verdict(line) for line in lines],
        "tags": [", ".join(line.tags) or EMPTY for line in lines],
    }
    if not any(line.tags for line in lines):
        del columns["tags"]
    if width is not None and all(run.source_format == "rankscope" for run in found):
        del columns["format"]
    notes = [warning for run in found for warning in run.warnings]
    return "\n".join([*_format_columns(columns, RUNS_ALIGNED, width), *notes])


def delete_stored(run_id: str, *, as_json: bool, store_url: str | None) -> str:
    """Delete a run for good and return a line with what was deleted.

    Raises:
        UnknownRunError: The store holds no run of this name.
        FailedError: The server that holds the store did not delete it.
    """
    from ..server.deletion import delete_run

    done = delete_run(existing_store_url(store_url), run_id)
    if as_json:
        return json.dumps({"run": done.run_id, "at_ns": done.at_ns, "num_rows": done.num_rows})
    num_spans = done.num_rows.get("spans", 0)
    num_rows = sum(done.num_rows.values())
    return (
        f"deleted run {run_id!r}: {num_spans:,} spans, {num_rows:,} rows in all."
        " Its name cannot be used again"
    )


def annotate(
    run_id: str,
    kind: Literal["tag", "note"],
    text: str,
    *,
    is_removed: bool = False,
    store_url: str | None,
) -> str:
    """Add a tag or a note to a run, or remove it, and return a line with what was done.

    Raises:
        UnknownRunError: The store holds no run of this name.
        BadInputError: The text is not valid, or what is to be removed is not there.
        FailedError: The server that holds the store did not change it.
    """
    from ..server.annotations import AnnotationChange, annotate_stored

    url = existing_store_url(store_url)
    what: Literal["add", "remove"] = "remove" if is_removed else "add"
    try:
        change = AnnotationChange(what=what, kind=kind, run_id=run_id, text=text, by=user_name())
    except ValueError as error:  # longer than any
        raise BadInputError(f"the {kind} is too long: shorten it") from error
    return annotate_stored(url, change)


def list_notes(run_id: str, *, store_url: str | None) -> str:
    """Return the notes of a run, the oldest first, as printable text.

    Raises:
        UnknownRunError: The store holds no run of this name.
    """
    from rankscope.collector.read.annotations import AnnotationKind, read_annotations

    from ..server.reports import find_run
    from ..sources.store_source import StoreSource

    with open_existing_store(store_url) as store:
        find_run(StoreSource(store), run_id)
        notes = [one for one in read_annotations(store, run_id) if one.kind is AnnotationKind.NOTE]
    rows = [(format_time(one.at_ns), one.author or EMPTY, one.text) for one in notes]
    header = ("written (UTC)", "by", "note")
    table = format_table(header, rows, right="kkl", width=table_width())
    return "\n".join(table) if rows else f"no notes of run {run_id!r}"


def list_findings(run_id: str | None, *, as_json: bool, store_url: str | None) -> str:
    """Return the findings of all runs, the newest first, as printable text.

    Args:
        run_id: The run. None: all runs.
        as_json: Whether to return one JSON document.
        store_url: URL of the store. None: the default store.

    Raises:
        UnknownRunError: The store holds no run of this name.
    """
    from rankscope.collector.read.findings import read_findings

    from ..server.reports import find_run
    from ..sources.finding_history import FindingHistory, recurrence_document
    from ..sources.store_source import StoreSource

    with open_existing_store(store_url) as store:
        found = read_findings(store, run_id)
        if run_id is not None and not found:
            find_run(StoreSource(store), run_id)  # raises for an unknown run
        history = FindingHistory(store)
        recurrences = [history.follow_stored(finding) for finding in found]
    if as_json:
        documents = [
            {name: value for name, value in asdict(finding).items() if name != "card"}
            | {"follows": recurrence_document(one)}
            for finding, one in zip(found, recurrences, strict=True)
        ]
        return json.dumps({"findings": documents})
    if not found:
        return NO_FINDINGS
    width = table_width()
    columns: dict[str, list[str]] = {
        "run": [finding.run_id for finding in found],
        "no.": [f"{finding.number}" for finding in found],
        "cause": [finding.cause for finding in found],
        "ranks": [format_ranges(finding.ranks, max_ranges=MAX_NAMED) for finding in found],
        "steps": [_format_steps(finding) for finding in found],
        "cost": [format_seconds(finding.saved_s) for finding in found],
        "confidence": [f"{finding.confidence:.2f}" for finding in found],
        "opened": [_format_time(finding.opened_ns, width) for finding in found],
        "closed": [
            "open" if finding.closed_ns is None else _format_time(finding.closed_ns, width)
            for finding in found
        ],
        "follows": [_format_recurrence(one) for one in recurrences],
    }
    if width is not None:
        del columns["confidence"]
        if not any(recurrences):
            del columns["follows"]
    return "\n".join(_format_columns(columns, FINDINGS_ALIGNED, width))


def _format_columns(
    columns: "Mapping[str, list[str]]", aligned: "Mapping[str, str]", width: int | None
) -> list[str]:
    right = "".join(aligned.get(name, "l") for name in columns)
    return format_table(
        [*columns], [*zip(*columns.values(), strict=True)], right=right, width=width
    )


def _run_document(line: "RunLine") -> dict[str, Any]:
    run = line.run
    return {
        "run": run.run_id,
        "format": run.source_format,
        "state": run.state,
        "world_size": run.world_size,
        "layout": run.layout.to_dict(),
        "num_spans": run.num_spans,
        "num_steps": run.num_steps,
        "started_ns": run.started_ns,
        "warnings": list(run.warnings),
        "cause": line.cause or None,
        "severity": line.severity or None,
        "verdict": line.verdict or None,
        "tags": list(line.tags),
    }


def _format_verdict(line: "RunLine") -> str:
    """Return the cause that the stored report names, or else the worst recorded finding."""
    if not line.cause:
        return EMPTY
    ranks = f" on {format_ranges(line.ranks, max_ranges=2)}" if line.ranks else ""
    closed = " (closed)" if line.is_closed else ""
    return f"{line.cause}{ranks}{closed}"


def _format_steps(finding: "StoredFinding") -> str:
    first, last = finding.onset_step, finding.last_step
    return format_range(None if first is None or last is None else (first, last))


def _format_time(at_ns: int, width: int | None) -> str:
    """Return a time in UTC, on a terminal without year and seconds."""
    text = format_time(at_ns)
    return text if width is None else text[len("2026-") : len("2026-01-01 00:00")]


def _format_recurrence(recurrence: "Recurrence | None") -> str:
    if recurrence is None:
        return EMPTY
    return "unknown" if recurrence.what is None else f"the {recurrence.what}"
