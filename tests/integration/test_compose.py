"""docker-compose.yml says what is true of this repository; no Docker is needed to tell."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from collector.location import ServerLocation, parse_store_url
from rankscope.commands import app

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    found: dict[str, Any] = document["services"]
    return found


def test_the_store_is_the_server_that_stands_beside_it(services: dict[str, Any]) -> None:
    url = services["rankscope"]["environment"]["RANKSCOPE_STORE"]
    there = services["clickhouse"]["environment"]

    location = parse_store_url(url.replace("${CLICKHOUSE_PASSWORD}", "secret"))

    assert isinstance(location, ServerLocation)
    assert (location.host, location.port) == ("127.0.0.1", 8123)
    assert location.user == there["CLICKHOUSE_USER"]
    assert location.database == there["CLICKHOUSE_DB"]
    assert services["clickhouse"]["ports"] == ["127.0.0.1:8123:8123"]


def test_no_password_is_written_down(services: dict[str, Any]) -> None:
    assert services["clickhouse"]["environment"]["CLICKHOUSE_PASSWORD"].startswith(
        "${CLICKHOUSE_PASSWORD:?"
    )


def test_the_image_copies_every_package_and_runs_a_command_that_exists(
    services: dict[str, Any],
) -> None:
    recipe = services["rankscope"]["build"]["dockerfile_inline"]
    copied = {
        name
        for line in re.findall(r"^COPY (.+)$", recipe, re.MULTILINE)
        for name in shlex.split(line)[:-1]
    }
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks"}

    assert packages <= copied
    assert all((ROOT / name).exists() for name in copied)
    program, command, *_ = services["rankscope"]["command"]
    assert program == "rankscope"
    assert command in {
        known.name or known.callback.__name__
        for known in app.registered_commands
        if known.callback is not None
    }
