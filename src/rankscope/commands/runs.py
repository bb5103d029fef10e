"""`rankscope runs`, `alerts` and `findings`: what the store holds, in a list."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankscope.analysis.report.text import EMPTY, MAX_NAMED, format_ranges

from ..terminal.lines import aligned, format_time
from .flags import AsJson, Store

if TYPE_CHECKING:
    from rankscope.analysis.recurrence import Recurrence
    from rankscope.analysis.trace.tables import RunSummary
    from rankscope.collector.read.alerts import StoredAlert
    from rankscope.collector.read.findings import StoredFinding

NO_RUNS = "no runs yet: `rankscope demo` makes one, `rankscope import` stores a recorded one"
NO_ALERTS = "no alerts"
NO_FINDINGS = "no findings: `rankscope serve` notes them while runs train"


def runs(
    *,
    delete: Annotated[
        str | None,
        typer.Option(
            "--delete",
            metavar="RUN",
            help="Delete this run for good; its name is not given again.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
    store: Store = None,
) -> None:
    """List the runs of the store, the newest first, or delete one."""
    if delete is not None:
        typer.echo(delete_stored(delete, as_json=as_json, store_url=store))
        return
    typer.echo(list_runs(as_json=as_json, store_url=store))


def alerts(*, as_json: AsJson = False, store: Store = None) -> None:
    """List the alerts that have fired, the newest first."""
    typer.echo(list_alerts(as_json=as_json, store_url=store))


def findings(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", show_default=False)] = None,
    *,
    as_json: AsJson = False,
    store: Store = None,
) -> None:
    """List what was found in live runs, each from its onset to its end."""
    typer.echo(list_findings(run, as_json=as_json, store_url=store))


def list_runs(*, as_json: bool, store_url: str | None) -> str:
    """Return the runs of the store, the newest first, ready to print."""
    from rankscope.collector.client.served_store import open_for_reading
    from rankscope.collector.store.location import default_store_url

    from ..sources.store_source import StoreSource

    with open_for_reading(store_url or default_store_url()) as store:
        found = StoreSource(store).runs()
    if as_json:
        return json.dumps({"runs": [_run_document(run) for run in found]})
    rows = [
        (
            run.run_id,
            run.source_format,
            run.state,
            str(run.world_size),
            str(run.num_steps),
            f"{run.num_spans:,}",
            format_time(run.started_ns),
        )
        for run in found
    ]
    header = ("run", "format", "state", "ranks", "steps", "spans", "started (UTC)")
    return "\n".join(aligned(header, rows, right="lllrrrl")) if rows else NO_RUNS


def delete_stored(run_id: str, *, as_json: bool, store_url: str | None) -> str:
    """Delete a run for good and return what to print.

    Raises:
        UnknownRunError: The store holds no run of that name.
        FailedError: The server that holds the store did not delete it.
    """
    from rankscope.collector.store.location import default_store_url

    from ..server.deletion import delete_run

    done = delete_run(store_url or default_store_url(), run_id)
    if as_json:
        return json.dumps({"run": done.run_id, "at_ns": done.at_ns, "num_rows": done.num_rows})
    num_spans = done.num_rows.get("spans", 0)
    num_rows = sum(done.num_rows.values())
    return (
        f"deleted run {run_id!r}: {num_spans:,} spans, {num_rows:,} rows in all;"
        " its name takes in nothing any more"
    )


def list_alerts(*, as_json: bool, store_url: str | None) -> str:
    """Return the alerts that have fired, the newest first, ready to print."""
    from rankscope.collector.client.served_store import open_for_reading
    from rankscope.collector.read.alerts import read_alerts
    from rankscope.collector.store.location import default_store_url

    with open_for_reading(store_url or default_store_url()) as store:
        found = read_alerts(store)
    if as_json:
        told = [asdict(alert) for alert in found]
        for document in told:
            del document["post"]  # the same in other words
        return json.dumps({"alerts": told})
    rows = [
        (format_time(alert.at_ns), alert.run_id, _steps(alert), str(alert.delivery), alert.text)
        for alert in found
    ]
    header = ("fired (UTC)", "run", "steps", "webhook", "alert")
    return "\n".join(aligned(header, rows)) if rows else NO_ALERTS


def list_findings(run_id: str | None, *, as_json: bool, store_url: str | None) -> str:
    """Return what was found in live runs, from onset to end, ready to print.

    Args:
        run_id: The run; None: of all runs, the newest first.
        as_json: Whether as one JSON document.
        store_url: URL of the store; None: the default one.
    """
    from rankscope.collector.client.served_store import open_for_reading
    from rankscope.collector.read.findings import read_findings
    from rankscope.collector.store.location import default_store_url

    from ..sources.finding_history import History, follows_document

    with open_for_reading(store_url or default_store_url()) as store:
        found = read_findings(store, run_id)
        history = History(store)
        followed = [history.of_stored(finding) for finding in found]
    if as_json:
        documents = [
            {**asdict(finding), "follows": follows_document(one)}
            for finding, one in zip(found, followed, strict=True)
        ]
        return json.dumps({"findings": documents})
    rows = [
        (
            finding.run_id,
            finding.cause,
            format_ranges(finding.ranks, max_ranges=MAX_NAMED),
            _finding_steps(finding),
            format_time(finding.opened_ns),
            "stands" if finding.closed_ns is None else format_time(finding.closed_ns),
            f"{finding.confidence:.2f}",
            _follows(one),
        )
        for finding, one in zip(found, followed, strict=True)
    ]
    header = ("run", "cause", "ranks", "steps", "opened (UTC)", "closed (UTC)", "confidence")
    table = aligned((*header, "follows"), rows, right="llllllrl")
    return "\n".join(table) if rows else NO_FINDINGS


def _run_document(run: "RunSummary") -> dict[str, Any]:
    return {
        "run": run.run_id,
        "format": run.source_format,
        "state": run.state,
        "world_size": run.world_size,
        "layout": run.layout.to_dict(),
        "num_spans": run.num_spans,
        "num_steps": run.num_steps,
        "started_ns": run.started_ns,
    }


def _steps(alert: "StoredAlert") -> str:
    return f"{alert.first_step}-{alert.last_step}"


def _follows(followed: "Recurrence | None") -> str:
    if followed is None:
        return "-"
    return "cannot tell" if followed.what is None else f"the {followed.what}"


def _finding_steps(finding: "StoredFinding") -> str:
    known = finding.onset_step is not None and finding.last_step is not None
    return f"{finding.onset_step}-{finding.last_step}" if known else EMPTY
