"""`rankscope hosts`: exclude hosts from training, mark them, and write node lists without them."""

import json
import time
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.analysis.report.text import EMPTY, format_count, format_ranges, format_time
from rankscope.tracer.span import NS_PER_S

from ..errors import BadInputError
from ..terminal.lines import format_table, printable, table_width
from .alerts import AlertWebhook, Config, parse_duration_s
from .flags import AsJson, Store, existing_store_url, open_existing_store, user_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankscope.collector.read.hosts import HostChange

    from ..server.host_changes import HostChanges, Mark

DRY_RUN = "dry run, nothing is written without --yes:"
NO_MARKS = "no host is excluded, golden or spare"
MAX_RUNS = 3
"""Runs of a host that are listed."""

hosts = typer.Typer(
    name="hosts",
    help="Exclude hosts from training, mark them, and write node lists without them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Hosts = Annotated[
    list[str], typer.Argument(metavar="HOST...", help="Names of hosts.", show_default=False)
]
Yes = Annotated[bool, typer.Option("--yes", help="Do it. Without it nothing is written.")]
Reason = Annotated[
    str, typer.Option("--reason", metavar="TEXT", help="Why, for others.", show_default=False)
]


class Label(StrEnum):
    """Label of a host that `rankscope hosts label` sets."""

    GOLDEN = "golden"
    SPARE = "spare"
    NONE = "none"


LABELS: "dict[Label, list[Mark]]" = {
    Label.GOLDEN: ["golden"],
    Label.SPARE: ["spare"],
    Label.NONE: ["golden", "spare"],
}
"""Marks that a label is about."""


@hosts.command("list")
def list_marks(*, as_json: AsJson = False, store: Store = None) -> None:
    """List the hosts that are excluded, golden or spare."""
    marks = _read_marks(store)
    if as_json:
        typer.echo(json.dumps({"hosts": [asdict(mark) for mark in marks]}))
        return
    rows = [
        (
            mark.host,
            str(mark.mark),
            format_time(mark.at_ns),
            _format_end(mark),
            printable(mark.set_by) or EMPTY,
            printable(mark.reason) or EMPTY,
        )
        for mark in marks
    ]
    header = ("host", "mark", "since (UTC)", "until", "by", "reason")
    typer.echo(
        "\n".join(format_table(header, rows, right="lkkkll", width=table_width()))
        if rows
        else NO_MARKS
    )


def _format_end(mark: "HostChange") -> str:
    if mark.until_ns is not None:
        return format_time(mark.until_ns)
    return "included" if mark.mark == "excluded" else EMPTY


@hosts.command()
def exclude(  # noqa: PLR0913  # one parameter a flag
    hosts: Hosts,
    *,
    reason: Reason,
    duration: Annotated[
        str | None,
        typer.Option("--for", metavar="TIME", help="How long: 12h, 7d. Default: until included."),
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="DATE", help="Until 2026-12-24 or 2026-12-24T18:00, UTC.")
    ] = None,
    yes: Yes = False,
    config: Config = None,
    alert_webhook: AlertWebhook = None,
    store: Store = None,
) -> None:
    """Exclude hosts: node lists leave them out, and reports say if a job uses them again.

    No job and no scheduler is touched: the commands for Slurm are printed.
    """
    from ..server.host_changes import HostChanges
    from ..server.node_lists import slurm_drain

    changes = HostChanges(
        hosts=[*dict.fromkeys(hosts)], marks=["excluded"], is_set=True,
        until_ns=parse_end_ns(duration, until, now_ns=time.time_ns()),
        reason=reason, by=user_name(),
    )  # fmt: skip
    _describe_use(changes.hosts, store)
    _change(changes, yes=yes, config=config, alert_webhook=alert_webhook, store=store)
    typer.echo("for Slurm, as its administrator:")
    for host in changes.hosts:
        typer.echo(f"  {slurm_drain(host, reason)}")
    typer.echo("for a launcher: rankscope hosts hostfile FILE; for sbatch: rankscope hosts slurm")


@hosts.command()
def include(
    hosts: Hosts,
    *,
    reason: Reason = "",
    yes: Yes = False,
    config: Config = None,
    alert_webhook: AlertWebhook = None,
    store: Store = None,
) -> None:
    """Take hosts back that were excluded."""
    from ..server.host_changes import HostChanges
    from ..server.node_lists import slurm_resume

    excluded = _marked(_read_marks(store), "excluded")
    unknown = [host for host in hosts if host not in excluded]
    if unknown:
        names = ", ".join(sorted(excluded)) or "none"
        raise BadInputError(f"host {', '.join(unknown)} is not excluded; excluded: {names}")
    changes = HostChanges(
        hosts=[*dict.fromkeys(hosts)], marks=["excluded"], is_set=False, reason=reason,
        by=user_name(),
    )  # fmt: skip
    _change(changes, yes=yes, config=config, alert_webhook=alert_webhook, store=store)
    typer.echo("for Slurm, as its administrator:")
    for host in changes.hosts:
        typer.echo(f"  {slurm_resume(host)}")


@hosts.command()
def label(  # noqa: PLR0913  # one parameter a flag
    hosts: Hosts,
    label: Annotated[
        Label,
        typer.Argument(
            metavar="LABEL",
            help="golden: known to be good, others are tested against it; spare: kept free, to"
            " replace an excluded host; none: neither.",
        ),
    ],
    *,
    reason: Reason = "",
    yes: Yes = False,
    config: Config = None,
    alert_webhook: AlertWebhook = None,
    store: Store = None,
) -> None:
    """Mark hosts as golden or spare, or as neither."""
    from ..server.host_changes import HostChanges

    is_set = label is not Label.NONE
    changes = HostChanges(
        hosts=[*dict.fromkeys(hosts)],
        marks=LABELS[label],
        is_set=is_set,
        reason=reason,
        by=user_name(),
    )
    _change(changes, yes=yes, config=config, alert_webhook=alert_webhook, store=store)


@hosts.command()
def hostfile(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Node list: one host a line, as Open MPI, DeepSpeed, MPICH and pdsh read it.",
            exists=True,
            dir_okay=False,
        ),
    ],
    *,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write. Default: stdout.")
    ] = None,
    with_spares: Annotated[
        bool, typer.Option("--with-spares", help="Replace excluded hosts by spare ones.")
    ] = False,
    store: Store = None,
) -> None:
    """Write a node list without the excluded hosts, for torchrun, mpirun, deepspeed or pdsh."""
    from rankscope.collector.new_file import new_file

    from ..server.node_lists import filter_hostfile

    marks = _read_marks(store)
    nodes = filter_hostfile(
        file.read_text(encoding="utf-8").splitlines(),
        excluded=_marked(marks, "excluded"),
        spares=_marked(marks, "spare") if with_spares else [],
    )
    if not nodes.hosts:
        raise BadInputError(f"{file} has no host that is not excluded: add others")
    text = "".join(f"{line}\n" for line in nodes.lines)
    if out is None:
        typer.echo(text, nl=False)
    else:
        with new_file(out) as written:
            written.write(text.encode())
    said = [f"{format_count(len(nodes.hosts), 'host')} (--nnodes {len(nodes.hosts)})"]
    said += [f"left out {', '.join(nodes.removed)}"] if nodes.removed else []
    said += [f"added the spare {', '.join(nodes.added)}"] if nodes.added else []
    num_missing = len(nodes.removed) - len(nodes.added)
    said += [f"no spare for {num_missing} of them"] if with_spares and num_missing > 0 else []
    typer.echo("; ".join(said), err=True)


@hosts.command()
def slurm(*, store: Store = None) -> None:
    """Print --exclude= for sbatch and srun; nothing if no host is excluded."""
    from ..server.node_lists import slurm_exclude

    option = slurm_exclude(_marked(_read_marks(store), "excluded"))
    if option:
        typer.echo(option)


def parse_end_ns(duration: str | None, until: str | None, *, now_ns: int) -> int | None:
    """Return the end that ``--for`` or ``--until`` gives, Unix ns; None without either.

    Raises:
        BadInputError: Both are given, one is none, or the end is past.
    """
    if duration is not None and until is not None:
        raise BadInputError("give --for or --until, not both")
    if duration is not None:
        return now_ns + int(parse_duration_s(duration) * NS_PER_S)
    if until is None:
        return None
    try:
        end = datetime.fromisoformat(until)
    except ValueError:
        raise BadInputError(f"--until {until!r}: give 2026-12-24 or 2026-12-24T18:00") from None
    end = end if end.tzinfo else end.replace(tzinfo=UTC)
    end_ns = int(end.timestamp()) * NS_PER_S
    if end_ns <= now_ns:
        raise BadInputError(f"--until {until} is past (it is {format_time(now_ns)} UTC)")
    return end_ns


def _read_marks(store_url: str | None) -> "tuple[HostChange, ...]":
    from rankscope.collector.read.hosts import marks_in_force, read_host_changes

    with open_existing_store(store_url) as store:
        return marks_in_force(read_host_changes(store), time.time_ns())


def _marked(marks: "Iterable[HostChange]", mark: "Mark") -> list[str]:
    return [one.host for one in marks if one.mark == mark]


def _describe_use(names: list[str], store_url: str | None) -> None:
    """Print which runs trained on hosts, so that a wrong name is seen."""
    from rankscope.collector.read.hosts import read_seen_hosts

    with open_existing_store(store_url) as store:
        seen = read_seen_hosts(store, names)
    for name in names:
        runs = [each for each in seen if each.host == name]
        if not runs:
            typer.echo(f"{name}: in no stored run; check the name")
            continue
        shown = "; ".join(
            f"{each.run_id} (ranks {format_ranges(each.seen_ranks, max_ranges=4)})"
            for each in runs[:MAX_RUNS]
        )
        more = f" and {len(runs) - MAX_RUNS} more" if len(runs) > MAX_RUNS else ""
        typer.echo(f"{name}: in {format_count(len(runs), 'run')}: {shown}{more}")


def _change(
    changes: "HostChanges",
    *,
    yes: bool,
    config: Path | None,
    alert_webhook: str | None,
    store: str | None,
) -> None:
    """Apply changes if ``yes``, and print them."""
    from ..server.alert_config import AlertConfig, open_receiver, read_alert_config, with_webhook
    from ..server.host_changes import change_hosts, describe_changes

    url = existing_store_url(store)
    if not yes:
        typer.echo(DRY_RUN)
        typer.echo(describe_changes(changes))
        return
    alerts = AlertConfig() if config is None else read_alert_config(config)
    with ExitStack() as stack:
        receivers = []
        for each in with_webhook(alerts, alert_webhook).receivers:
            receivers.append(open_receiver(each))
            stack.callback(receivers[-1].close)
        typer.echo(change_hosts(url, changes, receivers))
