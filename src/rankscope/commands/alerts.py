"""`rankscope alerts`: list, test, silence, acknowledge and resolve alerts, and note incidents."""

import json
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.analysis.report.text import EMPTY, format_range, format_time

from ..errors import BadInputError, FailedError
from ..terminal.lines import format_table, table_width
from .flags import AsJson, Store, existing_store_url, open_existing_store, user_name

if TYPE_CHECKING:
    from rankscope.collector.read.alerts import Silence, StoredAlert

    from ..server.alert_changes import AlertChange

NO_ALERTS = "no alerts"
DURATION = re.compile(r"(\d{1,5})(m|h|d)")
UNITS_S = {"m": 60, "h": 3600, "d": 86_400}

alerts = typer.Typer(
    name="alerts",
    help="List, test, silence, acknowledge and resolve alerts; note incidents.",
    rich_markup_mode=None,
)

Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="TOML file with the rules and receivers of alerts.",
        show_default=False,
    ),
]

AlertWebhook = Annotated[
    str | None,
    typer.Option(
        "--alert-webhook",
        metavar="URL",
        envvar="RANKSCOPE_ALERT_WEBHOOK",
        help="URL that gets a message as JSON.",
        show_default=False,
    ),
]


@alerts.callback(invoke_without_command=True)
def list_all(context: typer.Context, *, as_json: AsJson = False, store: Store = None) -> None:
    """List the alerts, the newest first."""
    if context.invoked_subcommand is None:
        typer.echo(list_alerts(as_json=as_json, store_url=store))


@alerts.command("test")
def send_test(
    *,
    config: Config = None,
    alert_webhook: AlertWebhook = None,
    as_json: AsJson = False,
) -> None:
    """Send a marked test alert to each receiver and print each answer."""
    from ..server.alert_config import AlertConfig, open_receiver, read_alert_config, with_webhook
    from ..server.alerting import TEST, plain_document

    known = AlertConfig() if config is None else read_alert_config(config)
    known = with_webhook(known, alert_webhook)
    if not known.receivers:
        raise BadInputError("no receiver: give --config FILE or --alert-webhook URL")
    text = "test alert of rankscope: nothing is wrong"
    document = plain_document(TEST, text, at_ns=time.time_ns(), url=known.url)
    answers = {}
    for each in known.receivers:
        receiver = open_receiver(each)
        answers[each.name] = receiver.send(document)
        receiver.close()
    if as_json:
        documents = [{"receiver": name, **asdict(answer)} for name, answer in answers.items()]
        typer.echo(json.dumps({"receivers": documents}))
    else:
        rows = [
            (name, "delivered" if answer.is_delivered else "not delivered", answer.text)
            for name, answer in answers.items()
        ]
        typer.echo("\n".join(format_table(("receiver", "result", "answer"), rows)))
    if not all(answer.is_delivered for answer in answers.values()):
        raise FailedError("a receiver did not get the test alert: check its URL and its log")


@alerts.command("silence")
def silence(  # noqa: PLR0913  # one parameter a flag
    *,
    run: Annotated[
        str | None, typer.Option(metavar="RUN", help="Of this run. Default: of all.")
    ] = None,
    rule: Annotated[str | None, typer.Option(metavar="RULE", help="Of this rule or cause.")] = None,
    ranks: Annotated[
        list[int] | None,
        typer.Option("--rank", metavar="RANK", min=0, help="That name no other rank."),
    ] = None,
    hosts: Annotated[
        list[str] | None, typer.Option("--host", metavar="HOST", help="That name no other host.")
    ] = None,
    duration: Annotated[
        str, typer.Option("--for", metavar="TIME", help="How long: 30m, 2h, 1d, ...")
    ] = "2h",
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why.")] = "",
    end: Annotated[str | None, typer.Option(metavar="NAME", help="End this silence now.")] = None,
    store: Store = None,
) -> None:
    """Send no alerts for a time; what is still active then is sent."""
    from ..server.alert_changes import AlertChange

    change = AlertChange(
        what="silence" if end is None else "unsilence",
        name=end or "",
        run_id=run,
        rule=rule,
        ranks=ranks or [],
        hosts=hosts or [],
        for_s=parse_duration_s(duration),
        by=user_name(),
        reason=reason,
    )
    typer.echo(_change(change, store))


@alerts.command("ack")
def acknowledge(
    name: Annotated[str, typer.Argument(metavar="ALERT", help="Its name in `rankscope alerts`.")],
    *,
    store: Store = None,
) -> None:
    """Say that you take care of an alert: it is not sent again while it is active."""
    from ..server.alert_changes import AlertChange

    typer.echo(_change(AlertChange(what="acknowledge", name=name, by=user_name()), store))


@alerts.command("note")
def note(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.")],
    incident: Annotated[
        int, typer.Argument(metavar="INCIDENT", min=0, help="Its number in `rankscope findings`.")
    ],
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What was seen or done.")],
    *,
    store: Store = None,
) -> None:
    """Add a note to an incident, for all who open its page."""
    from ..server.notes import make_note, note_incident

    url = existing_store_url(store)
    typer.echo(note_incident(url, make_note(run, incident, text, by=user_name())))


@alerts.command("resolve")
def resolve(
    name: Annotated[str, typer.Argument(metavar="ALERT", help="Its name in `rankscope alerts`.")],
    *,
    store: Store = None,
) -> None:
    """Say that an alert is over, such as the crash of a job that was started again."""
    from ..server.alert_changes import AlertChange

    typer.echo(_change(AlertChange(what="resolve", name=name, by=user_name()), store))


def parse_duration_s(text: str) -> float:
    """Return the seconds of a duration such as ``2h``.

    Raises:
        BadInputError: It is none.
    """
    match = DURATION.fullmatch(text)
    if match is None:
        raise BadInputError(f"--for {text!r}: give minutes, hours or days: 30m, 2h, 1d")
    return float(int(match[1]) * UNITS_S[match[2]])


def list_alerts(*, as_json: bool, store_url: str | None) -> str:
    """Return the alerts and the silences in force, the newest first, as printable text."""
    from rankscope.collector.read.alerts import read_alerts, read_silences

    from ..server.alert_changes import describe_silence

    with open_existing_store(store_url) as store:
        found, silences = read_alerts(store), read_silences(store)
    now_ns = time.time_ns()
    in_force = [each for each in silences if each.until_ns > now_ns]
    if as_json:
        return json.dumps(
            {
                "alerts": [_document(alert) for alert in found],
                "silences": [asdict(each) for each in in_force],
            }
        )
    rows = [
        (
            alert.name,
            format_time(alert.at_ns),
            _state(alert, in_force, now_ns),
            alert.severity,
            alert.run_id or EMPTY,
            format_range(alert.steps),
            str(alert.delivery),
            alert.text,
        )
        for alert in found
    ]
    header = ("name", "fired (UTC)", "state", "severity", "run", "steps", "sent", "alert")
    lines = (
        format_table(header, rows, right="kkkklkkl", width=table_width()) if rows else [NO_ALERTS]
    )
    for each in in_force:
        until = format_time(each.until_ns)
        lines.append(f"silence {each.name}: {describe_silence(each)} until {until} (UTC)")
    return "\n".join(lines)


def _document(alert: "StoredAlert") -> dict[str, object]:
    document = asdict(alert)
    del document["post"]  # the message repeats the other fields
    document["deliveries"] = [
        {
            "receiver": receiver,
            "state": state,
            "delivery": str(delivery),
            "message": alert.messages.get((receiver, state), ""),
        }
        for (receiver, state), delivery in alert.deliveries.items()
    ]
    del document["messages"]
    return {**document, "name": alert.name, "delivery": str(alert.delivery)}


def _state(alert: "StoredAlert", silences: "list[Silence]", now_ns: int) -> str:
    if alert.resolved_ns is not None:
        return f"resolved {format_time(alert.resolved_ns)}"
    if any(each.covers(alert, now_ns) for each in silences):
        return "silenced"
    return "active" if alert.acknowledged_ns is None else f"acknowledged {alert.acknowledged_by}"


def _change(change: "AlertChange", store_url: str | None) -> str:
    from ..server.alert_changes import change_alerts

    return change_alerts(existing_store_url(store_url), change)
