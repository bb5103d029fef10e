"""nginx.conf, checked by nginx's grammar, and by nginx if it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import crossplane  # type: ignore[import-untyped]
import pytest

from tests.deploy.files import DEPLOY, SERVER_XML, services, texts, xml

if TYPE_CHECKING:
    from pathlib import Path

CONFIGURATION = DEPLOY / "nginx" / "nginx.conf"


def parsed(path: Path) -> dict[str, Any]:
    # `resolve` of an upstream's server is newer than the last release of the grammar.
    found: dict[str, Any] = crossplane.parse(str(path), single=True, strict=True)
    return found


def blocks(directives: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [one for one in directives if one["directive"] == name]


def stream() -> list[dict[str, Any]]:
    (found,) = blocks(parsed(CONFIGURATION)["config"][0]["parsed"], "stream")
    directives: list[dict[str, Any]] = found["block"]
    return directives


def test_every_directive_is_known_and_in_an_allowed_block() -> None:
    document = parsed(CONFIGURATION)

    assert document["status"] == "ok", document["errors"]


def test_the_grammar_finds_a_mistake(tmp_path: Path) -> None:
    broken = tmp_path / "nginx.conf"
    broken.write_text(CONFIGURATION.read_text().replace("proxy_timeout", "proxy_timeoutt"))

    assert parsed(broken)["status"] == "failed"


def test_the_balancer_has_every_collector_and_every_server() -> None:
    (http_port,) = texts(xml(SERVER_XML), "http_port")
    upstreams = {
        one["args"][0]: {server["args"][0] for server in blocks(one["block"], "server")}
        for one in blocks(stream(), "upstream")
    }

    running = services("cluster")
    assert upstreams["collectors"] == {f"{name}:8443" for name in running if "collector-" in name}
    assert upstreams["servers"] == {
        f"{name}:{http_port}" for name in running if name.startswith("clickhouse")
    }


def test_each_port_has_an_upstream_and_agents_use_the_published_one() -> None:
    servers = [one["block"] for one in blocks(stream(), "server")]
    leads = {
        blocks(one, "listen")[0]["args"][0]: blocks(one, "proxy_pass")[0]["args"][0]
        for one in servers
    }

    assert leads == {"8443": "collectors", "8123": "servers"}
    (published,) = services("cluster")["balancer"]["ports"]
    assert published.endswith(":8443:8443")


def nginx_has_streams() -> bool:
    """Return whether nginx is installed with the stream module built in, as in its own image."""
    if shutil.which("nginx") is None:
        return False
    built = subprocess.run(["nginx", "-V"], capture_output=True, text=True, check=False).stderr
    return "--with-stream" in built.split()


@pytest.mark.skipif(
    not nginx_has_streams(), reason="no nginx with streams: crossplane alone reads the file"
)
def test_nginx_itself_accepts_the_configuration(tmp_path: Path) -> None:
    # Container names cannot be resolved here, and nginx before 1.27.3 has no free `resolve`.
    alone = re.sub(r"server [\w-]+:(\d+)(.*?) resolve;", r"server 127.0.0.1:\1\2;",
                   CONFIGURATION.read_text())  # fmt: skip
    (tmp_path / "nginx.conf").write_text(alone)
    done = subprocess.run(
        ["nginx", "-t", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
