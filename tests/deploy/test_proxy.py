"""deploy/nginx, checked by nginx's grammar, and run by nginx in front of a server."""

from __future__ import annotations

import os
import re
import shutil
import socket
import ssl
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import crossplane  # type: ignore[import-untyped]
import httpx
import pytest

from rankscope.collector.http.access import Access, TrustedProxy
from rankscope.collector.http.application import create_server
from rankscope.collector.http.refusals import Refusals
from rankscope.collector.http.tls import load_tls
from tests.deploy.files import DEPLOY, SERVER_XML, services, texts, xml
from tests.support.collector.authority import Authority
from tests.support.collector.running_server import read_to_end, running
from tests.support.missing_tools import skip_for_missing
from tests.support.ports import fixed_port
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

PROXY = DEPLOY / "nginx" / "nginx.conf"
CLICKHOUSE = DEPLOY / "nginx" / "clickhouse.conf"
TOKEN = "correct-horse"
BEARER = {"authorization": f"Bearer {TOKEN}"}


def parsed(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = crossplane.parse(
        str(path), single=True, strict=True, check_ctx=path == PROXY, ignore=["include"]
    )
    return document


def blocks(directives: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [directive for directive in directives if directive["directive"] == name]


@pytest.mark.parametrize("path", [PROXY, CLICKHOUSE])
def test_every_directive_is_known_and_in_an_allowed_block(path: Path) -> None:
    document = parsed(path)

    assert document["status"] == "ok", document["errors"]


def test_the_cluster_has_every_server_behind_one_name() -> None:
    (http_port,) = texts(xml(SERVER_XML), "http_port")
    (upstream,) = blocks(parsed(CLICKHOUSE)["config"][0]["parsed"], "upstream")

    servers = {server["args"][0] for server in blocks(upstream["block"], "server")}
    running_servers = [name for name in services("cluster") if name.startswith("clickhouse")]
    assert servers == {f"{name}:{http_port}" for name in running_servers}
    proxy = services("cluster")["cluster-proxy"]
    assert proxy["networks"]["default"]["aliases"] == ["clickhouse"]


@pytest.mark.parametrize("profile", ["single", "cluster"])
def test_each_upstream_is_the_name_of_a_service(profile: str) -> None:
    (http,) = blocks(parsed(PROXY)["config"][0]["parsed"], "http")
    hosts = {
        server["args"][0]
        for upstream in blocks(http["block"], "upstream")
        for server in blocks(upstream["block"], "server")
    }

    names: set[str] = set()
    for name, service in services(profile).items():
        networks: Mapping[str, Any] = service.get("networks", {}).get("default", {})
        port = (service.get("environment") or {}).get("PORT")
        names |= {f"{alias}:{port}" for alias in [name, *networks.get("aliases", [])]}
    assert hosts <= names


class Proxied:
    """A server with nginx in front."""

    def __init__(self, folder: Path, *, pages_port: int, agents_port: int, server: str) -> None:
        self.pages = f"https://localhost:{pages_port}"
        self.agents = f"https://localhost:{agents_port}"
        self.server = server
        self.context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        self.visitors: list[str] = []

    def client(self, base_url: str) -> httpx.Client:
        return httpx.Client(base_url=base_url, verify=self.context, timeout=60)

    def connect(self, base_url: str) -> ssl.SSLSocket:
        port = int(base_url.rpartition(":")[2])
        plain = socket.create_connection(("127.0.0.1", port), timeout=60)
        return self.context.wrap_socket(plain, server_hostname="localhost")


def pages(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
    body = environ["wsgi.input"].read()
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [f"{environ['REMOTE_ADDR']} {environ['wsgi.url_scheme']} {len(body)}".encode()]


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    folder = tmp_path_factory.mktemp("nginx")
    files = Authority(folder).issue("localhost")
    proxy = TrustedProxy(addresses=frozenset({"127.0.0.1"}))
    visitors: list[str] = []
    refusals = Refusals(lambda _, fields: visitors.append(str(fields["visitor"])))
    access = Access(port=0, token=TOKEN, proxy=proxy)
    app = create_server(access, pages=pages, not_ready=lambda: None, refusals=refusals)
    with running(app, tls=load_tls(files).context) as server:
        site = Proxied(
            folder,
            pages_port=fixed_port(),
            agents_port=fixed_port(),
            server=f"https://localhost:{server.port}",
        )
        site.visitors = visitors
        text = PROXY.read_text()
        for before, after in (
            (r"resolver .*", ""),
            (r"/tmp/", f"{folder}/"),
            (r"server \w+:\d+(.*) resolve;", rf"server 127.0.0.1:{server.port}\1;"),
            (r"listen 8443", f"listen 127.0.0.1:{site.agents.rpartition(':')[2]}"),
            (r"listen 8050", f"listen 127.0.0.1:{site.pages.rpartition(':')[2]}"),
            (r"/tls/server.crt", str(files.cert)),
            (r"/tls/server.key", str(files.key)),
            (r"/tls/ca.crt", str(folder / "ca.pem")),
            (r"/dev/std\w+", str(folder / "log")),
            (r"(client_\w+_timeout) 10s", r"\1 1s"),
        ):
            text, number = re.subn(before, after, text)
            assert number, before
        (folder / "nginx.conf").write_text(text)
        with nginx(folder):
            wait_until(lambda: is_up(site))
            yield site


@contextmanager
def nginx(folder: Path) -> Iterator[None]:
    """Run nginx with the configuration in a folder."""
    program = shutil.which("nginx")
    if program is None:
        skip_for_missing("there is no nginx: run tests/deploy/install_servers.sh")
    directives = "daemon off;" + (" user root;" if os.geteuid() == 0 else "")
    command = [program, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-g", directives]
    with subprocess.Popen([*command, "-e", str(folder / "log")]) as process:
        try:
            yield
        finally:
            process.terminate()


def is_up(site: Proxied) -> bool:
    try:
        with site.client(site.pages) as client:
            return client.get("/healthz").status_code == 200
    except httpx.TransportError:
        return False


def test_a_user_signs_in_through_the_proxy_and_other_sites_are_refused(proxied: Proxied) -> None:
    with proxied.client(proxied.pages) as client:
        origin = {"origin": proxied.pages}
        opened = client.post("/login", data={"token": TOKEN}, headers=origin)
        assert opened.status_code == 303
        assert "; Secure" in opened.headers["set-cookie"]

        assert client.get("/timeline").text == "127.0.0.1 https 0"
        updated = client.post("/_dash-update-component", content=b"{}", headers=origin)
        assert updated.text == "127.0.0.1 https 2"
        foreign = {"origin": "https://evil.example"}
        assert client.post("/_dash-update-component", headers=foreign).status_code == 403


def test_no_client_can_name_another_address_through_the_proxy(proxied: Proxied) -> None:
    forged = {"authorization": "Bearer wrong", "x-forwarded-for": "10.9.9.9"}
    with proxied.client(proxied.pages) as client:
        assert client.get("/", headers=forged).status_code == 401
    assert "10.9.9.9" not in proxied.visitors
    # The proxy itself can.
    with proxied.client(proxied.server) as client:
        assert client.get("/", headers=forged).status_code == 401
    assert proxied.visitors[-1] == "10.9.9.9"


def test_slow_headers_and_bodies_end_the_connection(proxied: Proxied) -> None:
    begins = (
        (proxied.pages, b"GET / HT"),
        (proxied.agents, b"GET / HT"),
        (proxied.agents, b"POST / HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer "
         + TOKEN.encode() + b"\r\ncontent-length: 9000\r\n\r\nab"),
    )  # fmt: skip
    for base_url, begin in begins:
        with proxied.connect(base_url) as slow:
            slow.sendall(begin)
            answer = read_to_end(slow)
            assert answer == b"" or answer.startswith(b"HTTP/1.1 408"), begin


def test_agents_stream_their_bodies_and_long_ones_are_refused(proxied: Proxied) -> None:
    with proxied.client(proxied.agents) as client:
        sent = client.post("/", content=b"x" * 2**20, headers=BEARER)
        assert sent.text.endswith(str(2**20))
        assert client.post("/", content=b"x" * (2**20 + 1), headers=BEARER).status_code == 413
        assert client.post("/", content=pieces(), headers=BEARER).status_code == 413
    # Neither nginx nor the server waits for the body.
    with proxied.connect(proxied.agents) as connection:
        connection.sendall(
            b"POST /v1/spans HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9000000\r\n\r\n"
        )
        assert connection.recv(12) == b"HTTP/1.1 401"
    with proxied.connect(proxied.agents) as connection:
        connection.sendall(
            b"POST /v1/spans HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999\r\n\r\n"
        )
        assert connection.recv(12) == b"HTTP/1.1 413"


def pieces() -> Iterator[bytes]:
    """Yield a body of 3 MiB without a declared length."""
    for _ in range(48):
        yield b"x" * 2**16


def test_a_flood_of_logins_is_limited_by_the_proxy(proxied: Proxied) -> None:
    with proxied.client(proxied.pages) as client:
        statuses = [client.get("/login").status_code for _ in range(20)]

        assert statuses[0] == 200
        assert statuses[-1] == 429
        assert client.get("/healthz").status_code == 200
