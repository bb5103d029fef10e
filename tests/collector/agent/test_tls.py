"""The agent's side of TLS: valid certificates only, and never plain text instead."""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.agent.errors import AgentConfigError, LinkError
from rankscope.collector.agent.link import Deadlines, Link, TlsFiles
from tests.support.collector.authority import Authority
from tests.support.collector.fake_collector import FakeCollector

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rankscope.collector.http.tls import TlsFiles as ServerFiles

TOKEN = {"RANKSCOPE_TOKEN": "test-token"}
LONG = Deadlines(connect_s=60, stall_s=60, answer_s=60)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def serving(
    files: ServerFiles, *, client_ca: Path | None = None, only: ssl.TLSVersion | None = None
) -> FakeCollector:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)
    if client_ca is not None:
        context.load_verify_locations(client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    if only is not None:
        context.minimum_version = only
        context.maximum_version = only
    return FakeCollector(context=context)


def ask(url: str, tls: TlsFiles) -> int:
    link = Link([url], agent="host/1", environment=TOKEN, tls=tls, deadlines=LONG)
    try:
        return link.get("/v1/resume?run_id=run").status
    finally:
        link.close()


def test_a_collector_with_a_valid_certificate_is_used(authority: Authority) -> None:
    with serving(authority.issue("localhost")) as collector:
        assert ask(collector.url, TlsFiles(ca=authority.file)) == 200


def test_the_agent_presents_its_certificate_if_one_is_required(authority: Authority) -> None:
    own = authority.issue("agent", file="agent")
    with serving(authority.issue("localhost"), client_ca=authority.file) as collector:
        tls = TlsFiles(ca=authority.file, certificate=own.cert, key=own.key)
        assert ask(collector.url, tls) == 200
        with pytest.raises(LinkError):
            ask(collector.url, TlsFiles(ca=authority.file))


def test_a_certificate_renewed_while_the_agent_runs_is_used_from_then_on(
    authority: Authority, tmp_path: Path
) -> None:
    # GIVEN an agent whose own certificate has expired
    own = authority.issue("agent", from_day=-9, days=3, file="agent")
    tls = TlsFiles(ca=authority.file, certificate=own.cert, key=own.key)
    with serving(authority.issue("localhost"), client_ca=authority.file) as collector:
        link = Link([collector.url], agent="a", environment=TOKEN, tls=tls, deadlines=LONG)
        with pytest.raises(LinkError):
            link.get("/v1/resume?run_id=run")

        # WHEN it is renewed, first one file and then the other
        renewed = authority.issue("agent", file="renewed")
        renewed.cert.replace(own.cert)
        with pytest.raises(LinkError):
            link.get("/v1/resume?run_id=run")
        renewed.key.replace(own.key)

        # THEN the next connection uses it
        assert link.get("/v1/resume?run_id=run").status == 200
        link.close()


def test_a_replaced_ca_file_is_used_for_the_next_connection(
    authority: Authority, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other")
    with serving(other.issue("localhost")) as collector:
        tls = TlsFiles(ca=authority.file)
        link = Link([collector.url], agent="a", environment=TOKEN, tls=tls, deadlines=LONG)
        with pytest.raises(LinkError, match="certificate"):
            link.get("/v1/resume?run_id=run")

        other.file.replace(authority.file)

        assert link.get("/v1/resume?run_id=run").status == 200
        link.close()


@pytest.mark.parametrize("fault", ["expired", "other-name", "other-authority", "unknown-authority"])
def test_an_invalid_certificate_is_rejected_before_anything_is_sent(
    fault: str, authority: Authority, tmp_path: Path
) -> None:
    names = ["elsewhere.example"] if fault == "other-name" else ["localhost"]
    files = authority.issue(*names, from_day=-9 if fault == "expired" else -1, days=3)
    trusted: Path | None = authority.file
    if fault == "other-authority":
        (tmp_path / "other").mkdir()
        trusted = Authority(tmp_path / "other").file
    elif fault == "unknown-authority":
        trusted = None
    with serving(files) as collector:
        with pytest.raises(LinkError, match="certificate"):
            ask(collector.url, TlsFiles(ca=trusted))
        assert collector.requests == []


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
def test_old_versions_of_tls_are_rejected(version: ssl.TLSVersion, authority: Authority) -> None:
    with serving(authority.issue("localhost"), only=version) as collector:
        with pytest.raises(LinkError):
            ask(collector.url, TlsFiles(ca=authority.file))
        assert collector.requests == []


@pytest.fixture
def plain_port() -> Iterator[tuple[int, bytearray]]:
    """Serve a port without TLS; yield the port and the bytes that it received."""
    received = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        received.extend(connection.recv(65536))
                        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

        threading.Thread(target=listen, daemon=True).start()
        yield server.getsockname()[1], received
        server.shutdown(socket.SHUT_RDWR)


def test_a_collector_without_tls_receives_no_token(
    authority: Authority, plain_port: tuple[int, bytearray]
) -> None:
    port, received = plain_port

    with pytest.raises(LinkError):
        ask(f"https://localhost:{port}", TlsFiles(ca=authority.file))

    assert b"test-token" not in received
    assert received[:1] == b"\x16"  # a TLS handshake, and nothing else


@pytest.mark.parametrize("name", ["missing.pem", "no-certificate.pem"])
def test_a_file_without_a_certificate_is_an_error_at_the_start(name: str, tmp_path: Path) -> None:
    (tmp_path / "no-certificate.pem").write_text("hello")

    with pytest.raises(AgentConfigError, match="certificates can't be used"):
        Link(["https://x"], agent="a", environment=TOKEN, tls=TlsFiles(ca=tmp_path / name))
