"""Configuration of alerts: rules and receivers in a TOML file, with defaults that need none."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path  # noqa: TC003  # pydantic reads it
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import to_json

from rankscope.analysis.alert_rules import AlertRules
from rankscope.analysis.report.report import Severity
from rankscope.collector.errors import TokenFileError
from rankscope.collector.http.tokens import read_private
from rankscope.collector.notify.webhook import (
    ALERTS_PATH,
    DEFAULT_NAME,
    Webhook,
    is_alertmanager,
)
from rankscope.tracer.spool import read_regular_file

from ..errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope.collector.notify.receiver import Receiver

MAX_FILE_BYTES = 1 << 20
MAX_SECRET_BYTES = 4096
"""Longer than any receiver's URL."""

RECEIVER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class ReceiverKind(StrEnum):
    """Way to reach a receiver."""

    WEBHOOK = "webhook"
    ALERTMANAGER = "alertmanager"
    APPRISE = "apprise"
    """Slack, mail, PagerDuty, Teams and others, by a URL of the library apprise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverConfig:
    """One receiver."""

    name: str
    kind: ReceiverKind = ReceiverKind.WEBHOOK
    url: str = ""
    url_file: Path | None = None
    """File of mode 0600 with the URL, because most URLs have a secret."""

    bearer_file: Path | None = None
    """File of mode 0600 with the token that is sent as ``Authorization: Bearer``."""

    least_severity: Severity = Severity.WARNING
    rules: tuple[str, ...] = ()
    """Rules whose alerts it gets; empty: all."""

    heartbeat_s: float = 0.0
    """Interval of heartbeats, whose absence is the alarm; 0: none."""

    def __post_init__(self) -> None:
        if not RECEIVER_NAME.fullmatch(self.name):
            raise ValueError(f"name {self.name!r} must be letters, digits, '.', '_' and '-'")
        if bool(self.url) == (self.url_file is not None):
            raise ValueError("give either url or url_file")
        if self.bearer_file is not None and self.kind is ReceiverKind.APPRISE:
            raise ValueError("bearer_file is for kind webhook or alertmanager")
        if self.least_severity not in {Severity.WARNING, Severity.CRITICAL}:
            raise ValueError("least_severity must be 'warning' or 'critical'")
        known = {each.name.replace("_", "-") for each in fields(AlertRules)}
        for rule in self.rules:
            if rule not in known:
                raise ValueError(f"rules has {rule!r}, expected one of {', '.join(sorted(known))}")
        if self.heartbeat_s and self.heartbeat_s < MIN_HEARTBEAT_S:
            raise ValueError(f"heartbeat_s must be 0 or at least {MIN_HEARTBEAT_S:.0f}")

    def wants(self, *, rule: str, severity: str) -> bool:
        """Return whether it gets alerts of this rule and severity."""
        is_grave = severity == Severity.CRITICAL or self.least_severity is Severity.WARNING
        return is_grave and (not self.rules or rule in self.rules)


MIN_HEARTBEAT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertConfig:
    """Rules and receivers."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    url: str = ""
    """Address of the dashboard in links; "": the address on which the server listens."""

    group_interval_s: float = 300.0
    """Time after a message about a run and a cause in which further alerts of the same are
    collected. Source: the default of Alertmanager's ``group_interval``."""

    rules: AlertRules = field(default_factory=AlertRules)
    receivers: tuple[ReceiverConfig, ...] = ()

    def __post_init__(self) -> None:
        names = [receiver.name for receiver in self.receivers]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"receivers: two have the name {name!r}")


def read_alert_config(path: Path) -> AlertConfig:
    """Read a configuration file.

    Raises:
        BadInputError: The file can't be read, or has an unknown key, a wrong type or a wrong
            value. The message names the key and its line.
    """
    try:
        text = read_regular_file(path, max_bytes=MAX_FILE_BYTES).decode()
        document = tomllib.loads(text)
    except OSError as error:
        raise BadInputError(
            f"--config {path} can't be read ({error.strerror or error}): check the path"
        ) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadInputError(f"--config {path} is not TOML: {error}") from error
    if isinstance(document.get("rules"), dict):
        # Rules are written with dashes, as alerts name them.
        document["rules"] = {key.replace("-", "_"): v for key, v in document["rules"].items()}
    try:
        return TypeAdapter(AlertConfig).validate_json(to_json(document))
    except ValidationError as invalid:
        first = invalid.errors(include_url=False)[0]
        path_in_file = [_to_rule(key) for key in first["loc"]]
        reason = first["msg"].removeprefix("Value error, ")
        if first["type"] == "unexpected_keyword_argument":
            reason = f"unknown key; expected one of {', '.join(_keys_beside(first['loc']))}"
        raise BadInputError(
            f"--config {path}, line {_line_of(text, path_in_file)}:"
            f" {'.'.join(map(str, path_in_file)) or 'the file'}: {reason}"
        ) from invalid


def _to_rule(key: int | str) -> int | str:
    is_rule = key in {rule.name for rule in fields(AlertRules)}
    return str(key).replace("_", "-") if is_rule else key


def _keys_beside(path: Sequence[int | str]) -> list[str]:
    """Return the keys that the table of an unknown key may have."""
    match path[:-1]:
        case ():
            table: Any = AlertConfig
        case ("rules",):
            table = AlertRules
        case ("rules", rule):
            table = getattr(AlertRules(), str(rule))
        case _:
            table = ReceiverConfig
    return sorted(str(_to_rule(key.name)) for key in fields(table))


def with_webhook(config: AlertConfig, url: str | None) -> AlertConfig:
    """Return the configuration with the receiver of the flag ``--alert-webhook``."""
    if url is None:
        return config
    receiver = ReceiverConfig(name=DEFAULT_NAME, url=url)
    try:
        return replace(config, receivers=(*config.receivers, receiver))
    except ValueError as error:
        raise BadInputError(f"--alert-webhook and --config: {error}; rename one") from error


def open_receiver(config: ReceiverConfig) -> Receiver:
    """Return a receiver, whose thread runs from now on.

    Raises:
        BadInputError: A file can't be read, or others can read it.
        WebhookUrlError: The URL of a webhook is invalid.
        ReceiverUrlError: The URL is not one of apprise's.
    """
    url, who = config.url, f"receiver {config.name!r}:"
    if config.url_file is not None:
        url = read_secret(f"{who} url_file", config.url_file)
    if config.kind is ReceiverKind.APPRISE:
        from rankscope.collector.notify.apprise_receiver import AppriseReceiver

        return AppriseReceiver(config.name, url)
    if config.kind is ReceiverKind.ALERTMANAGER and not is_alertmanager(url):
        url = url.rstrip("/") + ALERTS_PATH
    bearer = ""
    if config.bearer_file is not None:
        bearer = read_secret(f"{who} bearer_file", config.bearer_file, encoding="ascii")
    return Webhook(url, name=config.name, bearer=bearer)


def read_secret(what: str, path: Path, *, encoding: str = "utf-8") -> str:
    """Return the line in a file that only its owner can read.

    Args:
        what: Name of the file in messages.

    Raises:
        BadInputError: It can't be read, others can read it, or it has another content.
    """
    try:
        secret = read_private(path, max_bytes=MAX_SECRET_BYTES).decode(encoding).strip()
    except UnicodeDecodeError:
        secret = ""
    except (TokenFileError, OSError) as error:
        raise BadInputError(f"{what} {path} can't be used: {error}") from error
    if not secret or not secret.isprintable():
        raise BadInputError(f"{what} {path} is not one line in {encoding}")
    return secret


_HEADER = re.compile(r"\s*(\[\[?)\s*([^\]]+?)\s*\]")
_KEY = re.compile(r"""\s*["']?([A-Za-z0-9_-]+)["']?\s*[.=]""")


def _line_of(text: str, path: Sequence[str | int]) -> int:
    """Return the line of a key, or of the table that should have it; the parser keeps none."""
    here: tuple[str | int, ...] = ()
    counts: dict[str, int] = {}
    best, depth = 1, 0
    for number, line in enumerate(text.splitlines(), start=1):
        header, key = _HEADER.match(line), _KEY.match(line)
        if header is not None:
            parts = tuple(part.strip(" \"'") for part in header[2].split("."))
            here = parts
            if header[1] == "[[":
                counts[header[2]] = counts.get(header[2], -1) + 1
                here = (*parts, counts[header[2]])
            at = here
        elif key is not None:
            at = (*here, key[1])
        else:
            continue
        if tuple(path[: len(at)]) == at and len(at) > depth:
            best, depth = number, len(at)
    return best
