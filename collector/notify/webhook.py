"""Webhook: posts alerts to one URL as JSON, also in the form of Alertmanager."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..errors import CollectorError
from ..http_client import request_once
from .receiver import RETRY_DELAYS_S, TIMEOUT_S, Answer, Receiver

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


TOO_MANY_REQUESTS = 429
RETRIED_FROM = 500
SUCCESS = range(200, 300)

DEFAULT_NAME = "webhook"
"""Name of the receiver that the flag ``--alert-webhook`` gives."""

ALERTS_PATH = "/api/v2/alerts"
"""End of the URL of an Alertmanager. Source: Alertmanager's API, version 2."""

ACTIVE_NS = 4 * 60_000_000_000
"""Time for which an alert stays active if it is not sent again: four times the minute after which
it is. Source: Prometheus does the same."""

NS_PER_S = 1_000_000_000


class WebhookUrlError(CollectorError):
    """The URL of the webhook is invalid."""

    def __init__(self, url: str, reason: str) -> None:
        # Not the whole URL: chat services put a secret into its path.
        super().__init__(
            f"alert webhook at {urlsplit(url).netloc or url!r}: {reason};"
            " give a URL as https://host/path"
        )


class Webhook(Receiver):
    """Receiver of alerts.

    Args:
        url: ``http`` or ``https`` URL. Redirects are not followed. A URL that ends in
            ``/api/v2/alerts`` is an Alertmanager's and gets alerts in its form.
        bearer: Token for the header ``Authorization: Bearer``; "": none is sent.
        timeout_s: Time of one attempt.
        retry_delays_s: Pauses before each retry after no answer, status 429, or 500 and above.
            Any other status that is not a success is final.

    Raises:
        WebhookUrlError: The URL has another scheme, no host, or an invalid port.
    """

    def __init__(
        self,
        url: str,
        *,
        bearer: str = "",
        timeout_s: float = TIMEOUT_S,
        retry_delays_s: Sequence[float] = RETRY_DELAYS_S,
        name: str = DEFAULT_NAME,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"}:
            raise WebhookUrlError(url, f"scheme {parts.scheme!r} is not http or https")
        try:
            _ = parts.port
        except ValueError:
            raise WebhookUrlError(url, "the port is not a number") from None
        if not parts.hostname:
            raise WebhookUrlError(url, "it has no host")
        self.is_alertmanager = is_alertmanager(url)
        """Whether the receiver is an Alertmanager, which forgets what is not sent again."""

        self._url = url
        self._headers = {"content-type": "application/json", "user-agent": "rankscope"}
        if bearer:
            self._headers["authorization"] = f"Bearer {bearer}"
        self._timeout_s = timeout_s
        super().__init__(name, retry_delays_s=retry_delays_s)

    def send(self, document: Mapping[str, Any]) -> Answer:
        """Post a document as JSON once. The body of the answer is not read."""
        body = json.dumps(
            [alertmanager_alert(alert) for alert in document.get("alerts", [document])]
            if self.is_alertmanager
            else document
        )
        try:
            status = request_once(
                "POST",
                self._url,
                timeout_s=self._timeout_s,
                headers=self._headers,
                body=body.encode(),
                max_answer_bytes=0,
            ).status
        except (OSError, ValueError) as error:
            # Not the text of the error: it may have the URL, and so a secret.
            reason = getattr(error, "strerror", None) or type(error).__name__
            return Answer(is_delivered=False, is_final=False, text=f"no answer ({reason})")
        return Answer(
            is_delivered=status in SUCCESS,
            is_final=not (status == TOO_MANY_REQUESTS or status >= RETRIED_FROM),
            text=f"status {status}",
        )


def is_alertmanager(url: str) -> bool:
    """Return whether a URL is that of an Alertmanager."""
    return urlsplit(url).path.rstrip("/").endswith(ALERTS_PATH)


def alertmanager_alert(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return an alert in the form of ``POST /api/v2/alerts`` (``postableAlert``).

    The labels identify an alert, and never change. An active one ends `ACTIVE_NS` after it was sent
    last, so it stays active as long as it is repeated; a resolved one ends at its own time.

    Args:
        document: Alert from `rankscope.server.alerting.alert_document`.
    """
    finding = document.get("finding") or {}
    labels = {
        "alertname": document["rule"],
        "run": document["run"],
        "key": document["key"],
        "severity": document["severity"],
    }
    annotations = {"summary": document["text"]}
    shown = ("cost", "action", "resolved_because")
    annotations |= {key: document[key] for key in shown if document.get(key)}
    if document.get("commands"):
        annotations["commands"] = "\n".join(document["commands"])
    if document.get("hosts"):
        annotations["hosts"] = ", ".join(document["hosts"])
    if finding:
        # A drop may get its finding later, and is the same alert then.
        if document["rule"] == "finding":
            labels["cause"] = finding["cause"]
        annotations |= {
            "cause": finding["cause"],
            "ranks": _ranges(finding["ranks"]),
            "evidence": finding["evidence"],
            "help": finding["help"],
        }
        if finding.get("picture"):
            annotations["picture"] = finding["picture"]
    if document["steps"] is not None:
        first_step, last_step = document["steps"]
        annotations["steps"] = f"{first_step}-{last_step}"
    ends_ns = document["resolved_ns"]
    return {
        "labels": labels,
        "annotations": annotations,
        "startsAt": _rfc3339(document["at_ns"]),
        "endsAt": _rfc3339(time.time_ns() + ACTIVE_NS if ends_ns is None else ends_ns),
        "generatorURL": document["url"],
    }


def _rfc3339(unix_ns: int) -> str:
    return datetime.fromtimestamp(unix_ns / NS_PER_S, tz=UTC).isoformat()


def _ranges(ranks: Sequence[int]) -> str:
    """Return ascending ranks as ``0, 4-7, 9``: a stage of a large job has thousands of them."""
    groups = groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])
    runs = [[str(rank) for _, rank in group] for _, group in groups]
    parts = [[f"{run[0]}-{run[-1]}"] if len(run) > 2 else run for run in runs]  # noqa: PLR2004
    return ", ".join(chain.from_iterable(parts))
