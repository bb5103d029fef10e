"""Receivers that the library apprise reaches: Slack, mail, PagerDuty, Teams and many others."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import sys
import threading
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import CollectorError
from .receiver import RETRY_DELAYS_S, Answer, Receiver
from .webhook_address import AddressRefusedError, check_addresses, is_internal_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

KINDS = {"critical": "failure", "warning": "warning"}
"""Apprise's type of a message by severity. It chooses colour and symbol."""

MESSAGE_S = 20.0
"""Time for one message. Some services take several requests for it."""

_guarded = threading.local()
"""``sending``: what the receiver of this thread sends; None or missing if it sends nothing."""

_hook_lock = threading.Lock()
_has_hook = False


class ReceiverUrlError(CollectorError):
    """The URL of a receiver is not one of apprise's."""

    def __init__(self, name: str) -> None:
        # Not the URL: it has the secret.
        super().__init__(
            f"receiver {name!r}: its URL is none that apprise knows; see"
            " https://github.com/caronc/apprise/wiki, for instance slack://TOKEN_A/TOKEN_B/TOKEN_C"
        )


class _ConnectionRefusedError(AddressRefusedError, OSError):
    """As the libraries of the receivers expect it: an error of the network."""


@dataclass(slots=True)
class _Sending:
    """A message that is being sent."""

    is_internal: bool
    refusal: str | None = None
    """Why a connection was refused."""

    is_late: bool = False
    sockets: list[socket.socket] = field(default_factory=list)
    """Second descriptors of its connections: the plugin may put TLS on the first ones."""

    def end(self) -> None:
        """Shut its connections down, from any thread."""
        self.is_late = True
        for sock in self.sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class AppriseReceiver(Receiver):
    """Receiver of alerts that apprise sends to.

    It connects to no metadata service, and to internal addresses only if its URL names one or the
    operator declared it internal, whatever a name resolves to and wherever a redirect leads: each
    connection of its thread is checked.

    Args:
        name: Its name.
        url: Apprise's URL.
        is_internal: Whether it may have an internal address although its name is public.
        timeout_s: Time for one message. Apprise's own timeouts are of each read.
        retry_delays_s: Pauses before each retry. Apprise does not say why a message was not
            accepted, so each failure is retried.

    Raises:
        ReceiverUrlError: The URL is not one of apprise's.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        is_internal: bool = False,
        timeout_s: float = MESSAGE_S,
        retry_delays_s: Sequence[float] = RETRY_DELAYS_S,
    ) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of what apprise imports
            import apprise  # slow, so only if it is needed

            logging.getLogger("apprise").disabled = True  # it logs URLs, with their secrets
            # The plugin itself: `Apprise.notify` sends in another thread, whose connections would
            # not be checked.
            plugin = apprise.Apprise.instantiate(url)
        if plugin is None:
            raise ReceiverUrlError(name)
        self._plugin = plugin
        host = str(getattr(plugin, "host", "") or "")
        self._is_internal = is_internal or (bool(host) and is_internal_name(host))
        self._timeout_s = timeout_s
        _add_hook()
        super().__init__(name, retry_delays_s=retry_delays_s)

    def send(self, document: Mapping[str, Any]) -> Answer:
        """Send a message once."""
        title, body = format_message(document)
        kind = KINDS.get(str(document.get("severity")), "info")
        if document.get("state") == "resolved":
            kind = "success"
        sending = _Sending(self._is_internal)
        watchdog = threading.Timer(self._timeout_s, sending.end)
        watchdog.daemon = True
        _guarded.sending = sending
        try:
            watchdog.start()
            is_sent = bool(
                # Without its format, a mail would show the text as HTML.
                self._plugin.notify(title=title, body=body, notify_type=kind, body_format="text")
            )
        except Exception as error:  # noqa: BLE001  # a plugin may raise anything
            return Answer(is_delivered=False, is_final=False, text=type(error).__name__)
        finally:
            _guarded.sending = None
            watchdog.cancel()
            for sock in sending.sockets:
                sock.close()
        if sending.refusal is not None:
            return Answer(is_delivered=False, is_final=True, text=f"not sent: {sending.refusal}")
        text = "accepted" if is_sent else "not accepted, or no answer"
        return Answer(is_delivered=is_sent, is_final=is_sent, text=text)


def format_message(document: Mapping[str, Any]) -> tuple[str, str]:
    """Return a message as title and text for people.

    Args:
        document: Message from `rankscope.server.alerting`.
    """
    state = "" if document.get("state") == "firing" else f" {document.get('state')}"
    where = document.get("run") or "the server"
    alerts = document.get("alerts", [document])
    more = f" (+{len(alerts) - 1})" if len(alerts) > 1 else ""
    cause = document.get("cause") or document.get("rule")
    title = f"[{document.get('severity')}{state}] {where}: {cause}{more}"
    lines = []
    for alert in alerts:
        lines.append(str(alert.get("text")))
        for label in ("hosts", "cost", "action"):
            if alert.get(label):
                value = alert[label]
                shown = ", ".join(value) if isinstance(value, list) else value
                lines.append(f"{label}: {shown}")
        if alert.get("url"):
            lines.append(str(alert["url"]))
        lines.append("")
    return title, "\n".join(lines).strip()


def _add_hook() -> None:
    """Check the connections of receivers' threads, once for the process."""
    global _has_hook  # noqa: PLW0603  # a hook can't be removed
    with _hook_lock:
        if not _has_hook:
            sys.addaudithook(_check_connection)
            _has_hook = True


def _check_connection(event: str, arguments: tuple[Any, ...]) -> None:
    """Raise if a receiver's thread connects to an address that is not allowed."""
    if event != "socket.connect":
        return
    sending: _Sending | None = getattr(_guarded, "sending", None)
    if sending is None:
        return
    sock, address = arguments
    sending.sockets.append(socket.socket(fileno=os.dup(sock.fileno())))
    if sending.is_late:
        raise _ConnectionRefusedError("no time is left for this message")
    try:
        text = str(ipaddress.ip_address(str(address[0]).partition("%")[0]))
        check_addresses("receiver.invalid", [text], is_tls=True, is_internal=sending.is_internal)
    except (AddressRefusedError, ValueError, TypeError) as error:
        reason = str(error) if isinstance(error, AddressRefusedError) else "not a network address"
        sending.refusal = reason
        raise _ConnectionRefusedError(reason) from None
