"""Posts alerts to one address, from a thread of its own: nothing else ever waits for it."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import threading
from dataclasses import dataclass
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..errors import CollectorError
from ..read.alerts import Delivery
from .webhook_address import (
    AddressRefusedError,
    PinnedConnection,
    PinnedTlsConnection,
    check_addresses,
    is_obscured_address,
    resolve_host,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .webhook_address import Resolve


TIMEOUT_S = 5.0
RETRY_DELAYS_S = (1.0, 5.0, 15.0)
CAPACITY = 100
"""Alerts that wait at most; the newest is given up beyond that."""

TOO_MANY_REQUESTS = 429
RETRIED_FROM = 500
SUCCESS = range(200, 300)
REFUSED = 403
"""What stands for an answer where the host leads to an address that is not posted to."""


class WebhookUrlError(CollectorError):
    """The webhook's address is not one that can be posted to."""

    def __init__(self, url: str, reason: str) -> None:
        # Not the whole address: chat services put their secret into its path.
        super().__init__(
            f"alert webhook at {urlsplit(url).netloc or url!r}: {reason};"
            " give an address as https://host/path"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Post:
    body: bytes
    on_done: Callable[[Delivery], None]


class Webhook:
    """One receiver of alerts.

    Args:
        url: ``https``, or ``http`` inside; redirects are not followed. One that ends in
            ``/api/v2/alerts`` is an Alertmanager's, and gets alerts in its form.
        is_internal: Whether the host may be inside although its name does not say so.
        timeout_s: Of connecting and of each read.
        retry_delays_s: Pauses before each further try after an unanswered post, status 429,
            or 500 and above; any other status that is no success is final.
        resolve: Tells a host's addresses; asked anew for each post, which then goes there.

    Raises:
        WebhookUrlError: Another scheme, no host, or an address that nothing is posted to.
    """

    def __init__(
        self,
        url: str,
        *,
        is_internal: bool = False,
        timeout_s: float = TIMEOUT_S,
        retry_delays_s: Sequence[float] = RETRY_DELAYS_S,
        resolve: Resolve = resolve_host,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"}:
            raise WebhookUrlError(url, f"scheme {parts.scheme!r} is not http or https")
        try:
            port = parts.port
        except ValueError:
            raise WebhookUrlError(url, "the port is no number") from None
        if not parts.hostname:
            raise WebhookUrlError(url, "it names no host")
        if is_obscured_address(parts.hostname):
            raise WebhookUrlError(url, "the address is in no plain writing")
        self._is_alertmanager = is_alertmanager(url)
        self._is_https = parts.scheme == "https"
        self._is_inside = is_internal
        self._resolve = resolve
        self._host = parts.hostname
        self._port = port or (443 if self._is_https else 80)
        try:
            self._address()
        except AddressRefusedError as error:
            raise WebhookUrlError(url, str(error)) from None
        except OSError:
            pass  # a name server that is not there yet: each post asks again
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._timeout_s = timeout_s
        self._retry_delays_s = tuple(retry_delays_s)
        self._posts: queue.Queue[_Post | None] = queue.Queue(CAPACITY)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="webhook", daemon=True)
        self._thread.start()

    def post(self, document: dict[str, Any], *, on_done: Callable[[Delivery], None]) -> None:
        """Send ``document`` as JSON some time soon; never waits.

        Args:
            document: The body, as `rankscope.server.alerting.alert_document` writes it.
            on_done: Called once with what became of it, from the webhook's thread, or from this
                one when too many wait already.
        """
        body = alertmanager_alerts(document) if self._is_alertmanager else document
        post = _Post(body=json.dumps(body).encode(), on_done=on_done)
        try:
            self._posts.put_nowait(post)
        except queue.Full:
            on_done(Delivery.UNDELIVERED)

    def close(self, timeout_s: float = TIMEOUT_S) -> None:
        """Let a post that is under way finish, start no more, and end the thread."""
        self._closing.set()
        with contextlib.suppress(queue.Full):  # then the thread sees `_closing` after its post
            self._posts.put_nowait(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closing.is_set():
            post = self._posts.get()
            if post is None:
                return
            delivery = self._deliver(post.body)
            if delivery is not Delivery.PENDING:
                post.on_done(delivery)

    def _deliver(self, body: bytes) -> Delivery:
        """Try until it is taken, refused for good, or the last try is used up."""
        for delay_s in (*self._retry_delays_s, None):
            status = self._send(body)
            if status in SUCCESS:
                return Delivery.DELIVERED
            is_final = status is not None and not _is_passing(status)
            if is_final or delay_s is None:
                return Delivery.UNDELIVERED
            if self._closing.wait(delay_s):
                return Delivery.PENDING
        return Delivery.UNDELIVERED

    def _send(self, body: bytes) -> int | None:
        """Return the answer's status; None where none came. The answer's body is not read."""
        try:
            address = self._address()
        except AddressRefusedError:
            return REFUSED
        except OSError:
            return None
        kind = PinnedTlsConnection if self._is_https else PinnedConnection
        connection = kind(self._host, self._port, address=address, timeout_s=self._timeout_s)
        headers = {"content-type": "application/json", "user-agent": "rankscope"}
        try:
            connection.request("POST", self._target, body, headers)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def _address(self) -> str:
        """Return the address that is posted to.

        Raises:
            AddressRefusedError: The host stands for one that is not.
            OSError: It stands for none.
        """
        return check_addresses(
            self._host,
            self._resolve(self._host, self._port),
            is_tls=self._is_https,
            is_internal=self._is_inside,
        )


def _is_passing(status: int) -> bool:
    return status == TOO_MANY_REQUESTS or status >= RETRIED_FROM


ALERTS_PATH = "/api/v2/alerts"
"""A webhook whose path ends so is an Alertmanager's."""


def is_alertmanager(url: str) -> bool:
    """Return whether what listens at ``url`` takes alerts in Alertmanager's form."""
    return urlsplit(url).path.rstrip("/").endswith(ALERTS_PATH)


def alertmanager_alerts(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return an alert document as the body of ``POST /api/v2/alerts``.

    Its labels tell one alert from another: rule, run and first step, as in the store. It
    carries no end, so it stands for Alertmanager's ``resolve_timeout``.

    Args:
        document: As `rankscope.server.alerting.alert_document` writes it.
    """
    finding = document["finding"]
    first_step, last_step = document["steps"]
    return [
        {
            "labels": {
                "alertname": document["rule"],
                "run": document["run"],
                "first_step": str(first_step),
                "cause": finding["cause"],
                "severity": "warning",
            },
            "annotations": {
                "summary": document["text"],
                "steps": f"{first_step}-{last_step}",
                "ranks": _ranges(finding["ranks"]),
                "evidence": finding["evidence"],
            },
            "generatorURL": document["url"],
        }
    ]


def _ranges(ranks: Sequence[int]) -> str:
    """Return ascending ranks as ``0, 4-7, 9``: a stage of a large job has thousands of them."""
    apart = groupby(enumerate(ranks), key=lambda each: each[1] - each[0])
    runs = [[str(rank) for _, rank in own] for _, own in apart]
    parts = [[f"{run[0]}-{run[-1]}"] if len(run) > 2 else run for run in runs]  # noqa: PLR2004
    return ", ".join(chain.from_iterable(parts))
