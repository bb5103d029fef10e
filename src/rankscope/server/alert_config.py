"""Configuration of alerts: rules and receivers in a TOML file, with defaults that need none."""

from __future__ import annotations

import re
import tomllib
import types
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from rankscope.analysis.alert_rules import AlertRules
from rankscope.analysis.report.report import Severity
from rankscope.collector.errors import TokenFileError
from rankscope.collector.http.tokens import read_private
from rankscope.collector.notify.webhook import DEFAULT_NAME, Webhook, is_alertmanager
from rankscope.tracer.spool import read_regular_file

from ..errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankscope.collector.notify.receiver import Receiver

MAX_FILE_BYTES = 1 << 20
MAX_SECRET_BYTES = 4096
"""Longer than any receiver's URL."""

INTERNAL_VARIABLE = "RANKSCOPE_ALERT_WEBHOOK_INSIDE"
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

    secret_file: Path | None = None
    """File of mode 0600 with the key that signs the posts of a webhook."""

    internal: bool = False
    """Whether the host may have an internal address although its name is public."""

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
        if self.secret_file is not None and self.kind is not ReceiverKind.WEBHOOK:
            raise ValueError("secret_file is for a webhook only")
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
    try:
        config: AlertConfig = _build(AlertConfig, document, ())
    except _ConfigError as error:
        key = ".".join(map(str, error.path)) or "the file"
        line = _line_of(text, error.path)
        raise BadInputError(f"--config {path}, line {line}: {key}: {error}") from error
    return config


def with_webhook(config: AlertConfig, url: str | None) -> AlertConfig:
    """Return the configuration with the receiver of the flag ``--alert-webhook``."""
    if url is None:
        return config
    import os
    from dataclasses import replace

    receiver = ReceiverConfig(
        name=DEFAULT_NAME, url=url, internal=os.environ.get(INTERNAL_VARIABLE) == "1"
    )
    try:
        return replace(config, receivers=(*config.receivers, receiver))
    except ValueError as error:
        raise BadInputError(f"--alert-webhook and --config: {error}; rename one") from error


def open_receiver(config: ReceiverConfig) -> Receiver:
    """Return a receiver, whose thread runs from now on.

    Raises:
        BadInputError: A file can't be read, or others can read it.
        WebhookUrlError: The URL of a webhook is not allowed.
        ReceiverUrlError: The URL is not one of apprise's.
    """
    url = config.url or _read_secret(config.name, "url_file", config.url_file).decode()
    if config.kind is ReceiverKind.APPRISE:
        from rankscope.collector.notify.apprise_receiver import AppriseReceiver

        return AppriseReceiver(config.name, url, is_internal=config.internal)
    if config.kind is ReceiverKind.ALERTMANAGER and not is_alertmanager(url):
        url = url.rstrip("/") + "/api/v2/alerts"
    secret = b""
    if config.secret_file is not None:
        secret = _read_secret(config.name, "secret_file", config.secret_file)
    return Webhook(url, is_internal=config.internal, name=config.name, secret=secret)


def _read_secret(name: str, key: str, path: Path | None) -> bytes:
    """Return the content of a file that only its owner can read."""
    if path is None:
        raise BadInputError(f"receiver {name!r} has no {key}")
    try:
        return read_private(path, max_bytes=MAX_SECRET_BYTES).strip()
    except (TokenFileError, OSError) as error:
        raise BadInputError(f"receiver {name!r}: {key} {path} can't be used: {error}") from error


class _ConfigError(Exception):
    """A value that is not allowed, at a path of keys and positions."""

    def __init__(self, path: Sequence[str | int], reason: str) -> None:
        super().__init__(reason)
        self.path = tuple(path)


def _build(kind: type[Any], value: object, path: tuple[str | int, ...]) -> Any:  # noqa: ANN401
    """Return a value of the file as its type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):  # only "X | None"
        return _build(next(each for each in arguments if each is not type(None)), value, path)
    if origin is tuple:
        if not isinstance(value, list):
            raise _ConfigError(path, f"expected a list, got {_type_name(value)}")
        return tuple(_build(arguments[0], each, (*path, k)) for k, each in enumerate(value))
    if is_dataclass(kind):
        return _build_record(kind, value, path)
    if issubclass(kind, StrEnum):
        known = [each.value for each in kind]
        if value not in known:
            raise _ConfigError(path, f"expected one of {', '.join(known)}, got {value!r}")
        return kind(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    wanted = str if kind is Path else kind
    if type(value) is not wanted:
        raise _ConfigError(path, f"expected {_NAMES[wanted]}, got {_type_name(value)}")
    return kind(value)


def _build_record(kind: type[Any], value: object, path: tuple[str | int, ...]) -> Any:  # noqa: ANN401
    if not isinstance(value, dict):
        raise _ConfigError(path, f"expected a table, got {_type_name(value)}")
    hints = get_type_hints(kind)
    # Rules are written with dashes, as alerts name them.
    names = {
        each.name.replace("_", "-") if kind is AlertRules else each.name: each.name
        for each in fields(kind)
    }
    for key in value:
        if key not in names:
            raise _ConfigError(
                (*path, key), f"unknown key; expected one of {', '.join(sorted(names))}"
            )
    if "name" in names and "name" not in value:
        raise _ConfigError(path, "has no name")
    given = {names[key]: _build(hints[names[key]], value[key], (*path, key)) for key in value}
    try:
        return kind(**given)
    except ValueError as error:
        raise _ConfigError(path, str(error)) from error


_NAMES: Mapping[type[Any], str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string in quotes",
    list: "a list",
    dict: "a table",
}


def _type_name(value: object) -> str:
    return _NAMES.get(type(value), type(value).__name__)


_HEADER = re.compile(r"\s*(\[\[?)\s*([^\]]+?)\s*\]")
_KEY = re.compile(r"""\s*["']?([A-Za-z0-9_-]+)["']?\s*[.=]""")


def _line_of(text: str, path: tuple[str | int, ...]) -> int:
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
            found = here
        elif key is not None:
            found = (*here, key[1])
        else:
            continue
        if path[: len(found)] == found and len(found) > depth:
            best, depth = number, len(found)
    return best
