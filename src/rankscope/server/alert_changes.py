"""Silences, acknowledgements and ends of alerts, by a command or by the server with the store."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rankscope.analysis.report.text import format_time
from rankscope.collector.errors import StoreHeldError
from rankscope.collector.store.location import read_server_file
from rankscope.collector.store.store import open_store

from ..errors import BadInputError
from .alerting import Alerting
from .holder import ask_holder, refusal

if TYPE_CHECKING:
    from fastapi import APIRouter

PATH = "/v1/alerts"
TIMEOUT_S = 60
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
    rank: Annotated[int, Field(ge=0)] | None = None
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
            rank=change.rank,
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


def change_alerts(store_url: str, change: AlertChange) -> str:
    """Apply a change to a store, through the server that holds it if there is one.

    Raises:
        BadInputError: There is no such alert or silence.
        FailedError: The server that holds the store did not answer, or refused.
        StoreError: The store could not be opened or written.
    """
    try:
        with open_store(store_url) as store:
            return apply_change(Alerting(store, page_url=lambda *_: ""), change)
    except StoreHeldError as held:
        server = read_server_file(held.path)
        if server is None or server.token is None:
            raise
    body = change.model_dump_json()
    answer = ask_holder(server, "POST", PATH, timeout_s=TIMEOUT_S, body=body)
    if answer.status == HTTPStatus.NOT_FOUND:
        raise BadInputError(str(json.loads(answer.body)["detail"]))
    if answer.status != HTTPStatus.OK:
        raise refusal(server, answer)
    return str(json.loads(answer.body)["done"])


def change_router(alerting: Alerting) -> APIRouter:
    """Return the route ``POST /v1/alerts``, for administrators."""
    from fastapi import APIRouter, Body, HTTPException

    router = APIRouter(tags=["alerts"])

    def change(body: Annotated[dict[str, object], Body()]) -> dict[str, str]:
        try:
            return {"done": apply_change(alerting, AlertChange.model_validate(body))}
        except ValidationError as error:
            raise HTTPException(422, f"{error.error_count()} wrong values") from error
        except BadInputError as error:
            raise HTTPException(404, str(error)) from error

    change.__annotations__ = {
        "body": Annotated[dict[str, object], Body()],
        "return": dict[str, str],
    }
    # Only now: FastAPI reads the annotations here, and cannot resolve the text of local names.
    router.post(PATH, summary="Silence, acknowledge or resolve alerts")(change)
    return router
