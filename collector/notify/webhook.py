"""Webhook: posts alerts to one URL, signed with a secret, also in the form of Alertmanager."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import time
from datetime import UTC, datetime
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..errors import CollectorError
from ..timed_connection import TimedConnection
from .receiver import RETRY_DELAYS_S, TIMEOUT_S, Answer, Receiver
from .webhook_address import (
    AddressRefusedError,
    check_addresses,
    is_obscured_address,
    resolve_host,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .webhook_address import Resolve


TOO_MANY_REQUESTS = 429
RETRIED_FROM = 500
SUCCESS = range(200, 300)

DEFAULT_NAME = "webhook"
"""Name of the receiver that the flag ``--alert-webhook`` gives."""

TIMESTAMP_HEADER, SIGNATURE_HEADER = "x-rankscope-timestamp", "x-rankscope-signature"
"""Headers of a signed post: the Unix time in seconds, and ``sha256=`` with the HMAC-SHA256 of
``TIMESTAMP.BODY`` in hexadecimal digits. The receiver refuses an old timestamp, so that a recorded
post can't be sent again later. Source: as GitHub and Slack sign theirs."""

ALERTS_PATH = "/api/v2/alerts"
"""End of the URL of an Alertmanager. Source: Alertmanager's API, version 2."""

ACTIVE_NS = 4 * 60_000_000_000
"""Time for which an alert stays active if it is not sent again: four times the minute after which
it is. Source: Prometheus does the same."""

NS_PER_S = 1_000_000_000


class WebhookUrlError(CollectorError):
    """The URL of the webhook is invalid or not allowed."""

    def __init__(self, url: str, reason: str) -> None:
        # Not the whole URL: chat services put a secret into its path.
        super().__init__(
            f"alert webhook at {urlsplit(url).netloc or url!r}: {reason};"
            " give a URL as https://host/path"
        )


class Webhook(Receiver):
    """Receiver of alerts.

    Args:
        url: ``https`` URL, or ``http`` for internal addresses. Redirects are not followed. A URL
            that ends in ``/api/v2/alerts`` is an Alertmanager's and gets alerts in its form.
        is_internal: Whether the host may have an internal address although its name is public.
        timeout_s: Time for one attempt, from connecting to the last header of the answer. The name
            is resolved before, within the resolver's own time.
        retry_delays_s: Pauses before each retry after no answer, status 429, or 500 and above.
            Any other status that is not a success is final.
        name: Its name.
        secret: Key that signs each post; b"": posts are not signed.
        resolve: Returns the addresses of a host. Called for each post, which uses the result.

    Raises:
        WebhookUrlError: The URL has another scheme, no host, or an address that is not allowed.
    """

    def __init__(  # noqa: PLR0913  # as the configuration names them
        self,
        url: str,
        *,
        is_internal: bool = False,
        timeout_s: float = TIMEOUT_S,
        retry_delays_s: Sequence[float] = RETRY_DELAYS_S,
        resolve: Resolve = resolve_host,
        name: str = DEFAULT_NAME,
        secret: bytes = b"",
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"}:
            raise WebhookUrlError(url, f"scheme {parts.scheme!r} is not http or https")
        try:
            port = parts.port
        except ValueError:
            raise WebhookUrlError(url, "the port is not a number") from None
        if not parts.hostname:
            raise WebhookUrlError(url, "it has no host")
        if is_obscured_address(parts.hostname):
            raise WebhookUrlError(url, "write the address in its usual form")
        self.is_alertmanager = is_alertmanager(url)
        """Whether the receiver is an Alertmanager, which forgets what is not sent again."""

        self._is_https = parts.scheme == "https"
        self._is_inside = is_internal
        self._resolve = resolve
        self._url = url
        self._host = parts.hostname
        self._port = port or (443 if self._is_https else 80)
        try:
            self._address()
        except AddressRefusedError as error:
            raise WebhookUrlError(url, str(error)) from None
        except OSError:
            pass  # the name server may not be up yet: each post resolves again
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._timeout_s = timeout_s
        self._secret = secret
        super().__init__(name, retry_delays_s=retry_delays_s)

    def send(self, document: Mapping[str, Any]) -> Answer:
        """Post a document as JSON once. The body of the answer is not read."""
        alerts = document.get("alerts", [document])
        body = json.dumps(
            [alert for each in alerts for alert in alertmanager_alerts(each)]
            if self.is_alertmanager
            else document
        ).encode()
        try:
            address = self._address()
        except AddressRefusedError as error:
            return Answer(is_delivered=False, is_final=True, text=f"not sent: {error}")
        except OSError as error:
            return _unanswered(error)
        connection = TimedConnection(self._url, timeout_s=self._timeout_s, address=address)
        headers = {"content-type": "application/json", "user-agent": "rankscope"}
        try:
            connection.request("POST", self._target, body, headers | self._signature(body))
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            return _unanswered(error)
        finally:
            connection.close()
        status = answer.status
        return Answer(
            is_delivered=status in SUCCESS,
            is_final=not (status == TOO_MANY_REQUESTS or status >= RETRIED_FROM),
            text=f"status {status}",
        )

    def _signature(self, body: bytes) -> dict[str, str]:
        if not self._secret:
            return {}
        timestamp = str(time.time_ns() // NS_PER_S)
        digest = hmac.new(self._secret, f"{timestamp}.".encode() + body, hashlib.sha256)
        return {TIMESTAMP_HEADER: timestamp, SIGNATURE_HEADER: f"sha256={digest.hexdigest()}"}

    def _address(self) -> str:
        """Return the address to post to.

        Raises:
            AddressRefusedError: The host has an address that is not allowed.
            OSError: The host has no address.
        """
        return check_addresses(
            self._host,
            self._resolve(self._host, self._port),
            is_tls=self._is_https,
            is_internal=self._is_inside,
        )


def _unanswered(error: Exception) -> Answer:
    reason = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
    return Answer(is_delivered=False, is_final=False, text=f"no answer ({reason})")


def is_alertmanager(url: str) -> bool:
    """Return whether a URL is that of an Alertmanager."""
    return urlsplit(url).path.rstrip("/").endswith(ALERTS_PATH)


def alertmanager_alerts(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return an alert as the body of ``POST /api/v2/alerts`` (``postableAlerts``).

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
    annotations |= {key: document[key] for key in ("cost", "action") if document.get(key)}
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
    if document["steps"] is not None:
        first_step, last_step = document["steps"]
        annotations["steps"] = f"{first_step}-{last_step}"
    ends_ns = document["resolved_ns"]
    return [
        {
            "labels": labels,
            "annotations": annotations,
            "startsAt": _rfc3339(document["at_ns"]),
            "endsAt": _rfc3339(time.time_ns() + ACTIVE_NS if ends_ns is None else ends_ns),
            "generatorURL": document["url"],
        }
    ]


def _rfc3339(unix_ns: int) -> str:
    return datetime.fromtimestamp(unix_ns / NS_PER_S, tz=UTC).isoformat()


def _ranges(ranks: Sequence[int]) -> str:
    """Return ascending ranks as ``0, 4-7, 9``: a stage of a large job has thousands of them."""
    groups = groupby(enumerate(ranks), key=lambda each: each[1] - each[0])
    runs = [[str(rank) for _, rank in own] for _, own in groups]
    parts = [[f"{run[0]}-{run[-1]}"] if len(run) > 2 else run for run in runs]  # noqa: PLR2004
    return ", ".join(chain.from_iterable(parts))
