"""`rankscope doctor`: is this host fit to train, and what is wrong with this installation."""

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import FAILED, BadInputError
from .flags import AsJson, Store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..doctor.host import Host
    from ..doctor.result import Result

MAX_LOG_BYTES = 256 << 20


def doctor(  # noqa: PLR0913  # one parameter a flag
    *,
    active: Annotated[
        bool,
        typer.Option(
            "--active",
            help="Also measure: matmul, memory, copies, collectives. Under torchrun, all hosts"
            " together.",
        ),
    ] = False,
    before_job: Annotated[
        bool,
        typer.Option(
            "--before-job",
            help="For a Slurm prolog: only the host, at most 5 seconds, one line on stderr for"
            " each error. An exit status of 1 drains the host.",
        ),
    ] = False,
    nccl_log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Output of a job with NCCL_DEBUG=INFO: the network that NCCL used."
        ),
    ] = None,
    spool: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder of the tracer's records. Default: RANKSCOPE_TRACE."
        ),
    ] = None,
    expect_gpus: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="N", help="GPUs that this host must have. Default: those on its PCI bus."
        ),
    ] = None,
    host_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Name of this host in the results. Default: the host name."
        ),
    ] = None,
    root: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="A copy of another host's proc and sys, with the output of its tools in commands.",
        ),
    ] = Path("/"),
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="List healthy checks too.")
    ] = False,
    as_json: AsJson = False,
    store: Store = None,
) -> None:
    """Check that this host is fit to train, and this installation, its store and its spool.

    Exit status 1 if anything is an error, else 0. With --store, the results are stored, too.
    """
    from rankscope.collector.read.host_checks import BEFORE_JOB, COMMAND

    from ..doctor.host import Host

    if before_job and active:
        raise BadInputError("--before-job must end at once: leave out --active")
    host = Host(
        root=root,
        name=host_name,
        spool=spool,
        store_url=store,
        nccl_log=_read_log(nccl_log),
        expected_gpus=expect_gpus,
        is_before_job=before_job,
        is_idle=active,
    )
    if active:
        _run_active(host, as_json=as_json, is_verbose=verbose, store_url=store)
        return
    at_ns = time.time_ns()
    results = [*_examine(host)]
    if store is not None:
        occasion = BEFORE_JOB if before_job else COMMAND
        _keep(store, [(host.name, result) for result in results], at_ns, occasion=occasion)
        results += _other_versions(store, host.name, at_ns)
    _finish(host, results, at_ns, as_json=as_json, is_verbose=verbose)


def _examine(host: "Host") -> "Sequence[Result]":
    from ..doctor.examination import examine, examine_host

    return examine_host(host) if host.is_before_job else examine(host)


def _finish(
    host: "Host", results: "Sequence[Result]", at_ns: int, *, as_json: bool, is_verbose: bool
) -> None:
    """Print the results, and exit with 1 if any is an error."""
    from ..doctor.result import State, count_states, worst_state
    from ..doctor.text import error_lines, format_results
    from ..terminal.lines import terminal_width

    state = worst_state(results)
    if as_json:
        document = {
            "schema": 1,
            "host": host.name,
            "at_ns": at_ns,
            "state": state,
            "num": count_states(results),
            "checks": [asdict(result) for result in results],
        }
        typer.echo(json.dumps(document))
    elif host.is_before_job:
        for line in error_lines(host.name, results):
            typer.echo(line, err=True)
    else:
        typer.echo(format_results(host.name, results, width=terminal_width(), is_full=is_verbose))
    if state is State.ERROR:
        raise typer.Exit(FAILED)


def _keep(url: str, results: "Sequence[tuple[str, Result]]", at_ns: int, *, occasion: str) -> None:
    """Store results with the host of each."""
    from rankscope.collector.client.served_store import open_for_reading
    from rankscope.collector.client.served_writer import run_writer
    from rankscope.collector.read.host_checks import TABLE

    from ..doctor.stored import check_rows

    by_host: dict[str, list[Result]] = {}
    for name, result in results:
        by_host.setdefault(name, []).append(result)
    rows = [
        row
        for name, of_host in by_host.items()
        for row in check_rows(of_host, host=name, at_ns=at_ns, occasion=occasion)
    ]
    with open_for_reading(url) as store:
        writer = run_writer(store)
        writer.upsert(TABLE, rows)
        writer.close()


def _other_versions(url: str, host: str, at_ns: int) -> "list[Result]":
    """Return a warning for each version of this host that most hosts of the store do not have."""
    from rankscope.collector.client.served_store import open_for_reading
    from rankscope.collector.read.host_checks import read_newest_checks

    from ..doctor.result import Result, State
    from ..doctor.stored import NEWEST_NS, compare_values

    with open_for_reading(url) as store:
        newest = read_newest_checks(store, since_ns=at_ns - NEWEST_NS)
    return [
        Result(
            section="other hosts",
            check=check.name,
            state=State.WARNING,
            reason=check.reason,
            remedy=check.remedy,
        )
        for check in compare_values(newest)
        if check.host == host
    ]


def _run_active(host: "Host", *, as_json: bool, is_verbose: bool, store_url: str | None) -> None:
    """Run the static checks and the active tests, here or on all hosts of a torchrun."""
    from rankscope.collector.read.host_checks import ACTIVE, COMMAND

    from ..doctor.active.launch import run_active

    at_ns = time.time_ns()
    measured = run_active(host)
    if measured is None:
        return  # rank 0 reports
    static = _examine(host)
    if store_url is not None:
        _keep(store_url, [(host.name, result) for result in static], at_ns, occasion=COMMAND)
        _keep(store_url, measured, at_ns, occasion=ACTIVE)
    is_shared = any(name != host.name for name, _ in measured)
    shown = [
        replace(result, part=" ".join(filter(None, (name, result.part)))) if is_shared else result
        for name, result in measured
    ]
    _finish(host, [*static, *shown], at_ns, as_json=as_json, is_verbose=is_verbose)


def _read_log(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            return file.read(MAX_LOG_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise BadInputError(f"--nccl-log {path} cannot be read ({error.strerror})") from error
