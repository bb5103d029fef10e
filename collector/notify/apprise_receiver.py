"""Receivers that the library apprise reaches: Slack, mail, PagerDuty, Teams and many others."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

from ..errors import CollectorError
from .receiver import RETRY_DELAYS_S, Answer, Receiver

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

KINDS = {"critical": "failure", "warning": "warning"}
"""Apprise's type of a message by severity. It chooses colour and symbol."""


class ReceiverUrlError(CollectorError):
    """The URL of a receiver is not one of apprise's."""

    def __init__(self, name: str) -> None:
        # Not the URL: it has the secret.
        super().__init__(
            f"receiver {name!r}: its URL is none that apprise knows; see"
            " https://github.com/caronc/apprise/wiki, for instance slack://TOKEN_A/TOKEN_B/TOKEN_C"
        )


class AppriseReceiver(Receiver):
    """Receiver of alerts that apprise sends to. Redirects are not followed.

    Args:
        url: Apprise's URL.
        retry_delays_s: Pauses before each retry. Apprise does not say why a message was not
            accepted, so each failure is retried.

    Raises:
        ReceiverUrlError: The URL is not one of apprise's.
    """

    def __init__(
        self, name: str, url: str, *, retry_delays_s: Sequence[float] = RETRY_DELAYS_S
    ) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of what apprise imports
            import apprise  # slow, so only if it is needed

            logging.getLogger("apprise").disabled = True  # it logs URLs, with their secrets
            asset = apprise.AppriseAsset(http_redirects=False)
            plugin = apprise.Apprise.instantiate(url, asset=asset)
        if plugin is None:
            raise ReceiverUrlError(name)
        self._plugin = plugin
        super().__init__(name, retry_delays_s=retry_delays_s)

    def send(self, document: Mapping[str, Any]) -> Answer:
        """Send a message once."""
        title, body = format_message(document)
        kind = KINDS.get(str(document.get("severity")), "info")
        if document.get("state") == "resolved":
            kind = "success"
        try:
            is_sent = bool(
                # Without its format, a mail would show the text as HTML.
                self._plugin.notify(title=title, body=body, notify_type=kind, body_format="text")
            )
        except Exception as error:  # noqa: BLE001  # a plugin may raise anything
            return Answer(is_delivered=False, is_final=False, text=type(error).__name__)
        text = "accepted" if is_sent else "not accepted, or no answer"
        return Answer(is_delivered=is_sent, is_final=is_sent, text=text)


def format_message(document: Mapping[str, Any]) -> tuple[str, str]:
    """Return a message as title and text for people.

    Args:
        document: Message from `rankscope.server.alerting`.
    """
    state = "" if document.get("state") == "firing" else f" {document.get('state')}"
    where = document.get("run") or ", ".join(document.get("hosts") or ()) or "the server"
    alerts = document.get("alerts", [document])
    more = f" (+{len(alerts) - 1})" if len(alerts) > 1 else ""
    cause = document.get("cause") or document.get("rule")
    title = f"[{document.get('severity')}{state}] {where}: {cause}{more}"
    lines = []
    for alert in alerts:
        lines.append(str(alert.get("text")))
        if alert.get("state") == "resolved" and alert.get("resolved_because"):
            lines.append(f"resolved: {alert['resolved_because']}")
        for label in ("hosts", "cost", "action"):
            if alert.get(label):
                value = alert[label]
                shown = ", ".join(value) if isinstance(value, list) else value
                lines.append(f"{label}: {shown}")
        lines += [f"$ {command}" for command in alert.get("commands") or ()]
        if (finding := alert.get("finding")) and finding.get("help"):
            lines.append(f"proof and what to do: {finding['help']}")
        if alert.get("url"):
            lines.append(f"in the timeline: {alert['url']}" if finding else str(alert["url"]))
        lines.append("")
    return title, "\n".join(lines).strip()
