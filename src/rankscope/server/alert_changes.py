"""Silences, acknowledgements and ends of alerts, by a command or by the server with the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from rankscope.analysis.report.text import MAX_NAMED, format_names, format_ranges, format_time

from ..errors import BadInputError
from .alerting import Alerting
from .changes import change_router, change_stored

if TYPE_CHECKING:
    from fastapi import APIRouter

    from rankscope.collector.read.alerts import Silence
    from rankscope.collector.store.store import Store

PATH = "/v1/alerts"
MAX_SILENCE_S = 90 * 86_400
"""Longer silences are forgotten ones: disable the rule instead."""

Text = Annotated[str, Field(max_length=500)]


class AlertChange(BaseModel):
    """A silence, its end, an acknowledgement, or the end of an alert."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    what: Literal["silence", "unsilence", "acknowledge", "resolve"]
    name: Annotated[str, Field(max_length=16)] = ""
    """Of the alert to acknowledge or to resolve, or of the silence to end."""

    run_id: Text | None = None
    rule: Text | None = None
    ranks: list[Annotated[int, Field(ge=0)]] = []
    hosts: list[Text] = []
    for_s: Annotated[float, Field(gt=0, le=MAX_SILENCE_S)] = 3600.0
    by: Text = ""
    reason: Text = ""


def apply_change(alerting: Alerting, change: AlertChange) -> str:
    """Apply a change and return what was done, in one line.

    Raises:
        BadInputError: There is no such alert or silence.
    """
    if change.what == "silence":
        silence = alerting.silence(
            run_id=change.run_id,
            rule=change.rule,
            ranks=tuple(change.ranks),
            hosts=tuple(change.hosts),
            for_s=change.for_s,
            by=change.by,
            reason=change.reason,
        )
        return f"silence {silence.name} until {format_time(silence.until_ns)} (UTC)"
    if change.what == "unsilence":
        if alerting.end_silence(change.name) is None:
            raise BadInputError(f"no silence {change.name!r}: `rankscope alerts` lists them")
        return f"silence {change.name} is over"
    if change.what == "resolve":
        alert = alerting.resolve(change.name)
    else:
        alert = alerting.acknowledge(change.name, by=change.by)
    if alert is None:
        raise BadInputError(f"no alert {change.name!r}: `rankscope alerts` lists their names")
    if change.what == "resolve":
        return f"resolved: {alert.text}"
    return f"acknowledged by {alert.acknowledged_by or 'someone'}: {alert.text}"


def describe_silence(silence: Silence) -> str:
    """Return which alerts a silence covers: "run job, rule slow-compute, ranks 0-7"."""
    ranks = format_ranges(sorted(silence.ranks), max_ranges=MAX_NAMED)
    parts = (
        ("run", silence.run_id),
        ("rule", silence.rule),
        ("rank" if len(silence.ranks) == 1 else "ranks", silence.ranks and ranks),
        ("host", silence.hosts and format_names(silence.hosts)),
    )
    return ", ".join(f"{name} {value}" for name, value in parts if value) or "everything"


def change_alerts(store_url: str, change: AlertChange) -> str:
    """Apply a change to a store, as `change_stored` does."""

    def apply(store: Store) -> str:
        return apply_change(Alerting(store, page_url=lambda *_: ""), change)

    return change_stored(store_url, PATH, change, apply)


def alert_router(alerting: Alerting) -> APIRouter:
    """Return the route ``POST /v1/alerts``, for administrators."""
    return change_router(
        PATH,
        AlertChange.model_validate,
        lambda change: apply_change(alerting, change),
        summary="Silence, acknowledge or resolve alerts",
    )
