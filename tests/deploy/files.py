"""Files of the deployment, read by real parsers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as Xml

import yaml

from tests.support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

DEPLOY = ROOT / "deploy"
COMPOSE = ROOT / "docker-compose.yml"
USERS_XML = DEPLOY / "clickhouse" / "users.d" / "rankscope.xml"
SERVER_XML = DEPLOY / "clickhouse" / "config.d" / "server.xml"
CLUSTER_XML = DEPLOY / "clickhouse" / "cluster.d" / "cluster.xml"
KEEPER_XML = DEPLOY / "clickhouse" / "keeper" / "keeper.xml"
PREPARE = DEPLOY / "prepare.sh"

VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?P<rest>:[^}]*)?\}")


def compose() -> dict[str, Any]:
    """Return docker-compose.yml with its anchors merged."""
    document: dict[str, Any] = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))
    return document


def services(profile: str | None = None) -> dict[str, Any]:
    """Return the services, or those of one profile."""
    found: dict[str, Any] = compose()["services"]
    if profile is None:
        return found
    return {name: one for name, one in found.items() if profile in profiles_of(name, one)}


def profiles_of(name: str, service: dict[str, Any]) -> set[str]:
    """Return the profiles of a service. Each service must have one."""
    assert service.get("profiles"), f"{name} would start in every profile"
    return set(service["profiles"])


def xml(path: Path) -> Xml.Element:
    """Return the root element of a ClickHouse configuration."""
    root = Xml.fromstring(path.read_text(encoding="utf-8"))
    assert root.tag == "clickhouse"
    return root


def texts(root: Xml.Element, path: str) -> list[str]:
    """Return the text of every element at ``path``."""
    return [(found.text or "").strip() for found in root.iterfind(path)]


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Return the targets of a container's mounts from this repository, by source."""
    pairs = [volume.split(":") for volume in service.get("volumes", [])]
    return {source: target for source, target, *_ in pairs if source.startswith("./")}


def prepared_variables() -> set[str]:
    """Return the variables that deploy/prepare.sh writes into .env."""
    script = PREPARE.read_text(encoding="utf-8")
    (listed,) = re.findall(r"for name in ([A-Z_ ]+); do", script)
    return {*listed.split(), *re.findall(r"(RANKSCOPE_\w+)=%s", script)}
