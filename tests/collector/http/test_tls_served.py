from __future__ import annotations

import dataclasses
import socket
import ssl
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.http.tls import CertificateRenewal, load_tls
from tests.support.collector.authority import Authority
from tests.support.collector.running_server import Running, read_to_end, running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rankscope.collector.http.tls import TlsFiles
    from tests.support.collector.running_server import Running

pytestmark = pytest.mark.slow


NAME = "scope.example"
REQUEST = b"GET / HTTP/1.1\r\nhost: scope.example\r\nconnection: close\r\n\r\n"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def server(authority: Authority) -> Iterator[Running]:
    with running(tls=load_tls(authority.issue(NAME)).context) as served:
        yield served


def ask(server: Running, client: ssl.SSLContext, *, name: str = NAME) -> bytes:
    with (
        server.connect() as plain,
        client.wrap_socket(plain, server_hostname=name) as connection,
    ):
        connection.sendall(REQUEST)
        return read_to_end(connection)


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.file))


def test_a_client_that_trusts_the_authority_is_answered(
    server: Running, authority: Authority
) -> None:
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        client = trusting(authority)
        client.maximum_version = version
        assert ask(server, client).endswith(b"0")


def test_a_client_that_checks_trusts_no_other_authority_and_no_other_name(
    server: Running, authority: Authority, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other")

    with pytest.raises(ssl.SSLCertVerificationError, match="unable to get local issuer"):
        ask(server, trusting(other))
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        ask(server, trusting(authority), name="evil.example")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
def test_an_old_tls_is_refused(
    server: Running, authority: Authority, version: ssl.TLSVersion
) -> None:
    client = trusting(authority)
    client.minimum_version = client.maximum_version = version
    client.set_ciphers("DEFAULT@SECLEVEL=0")  # otherwise the client itself refuses

    with pytest.raises(ssl.SSLError, match=r"(?i)version|protocol"):
        ask(server, client)


def test_plain_http_to_the_tls_port_is_answered_with_nothing(server: Running) -> None:
    with server.connect() as connection:
        connection.sendall(REQUEST)

        assert not read_to_end(connection).startswith(b"HTTP")


def test_a_client_without_tls_close_does_not_break_the_shutdown(
    authority: Authority,
) -> None:
    # GIVEN a client that was answered and has not sent close_notify
    with running(tls=load_tls(authority.issue(NAME)).context) as server:
        connection = trusting(authority).wrap_socket(server.connect(), server_hostname=NAME)
        connection.sendall(REQUEST)
        assert connection.recv(2**16).startswith(b"HTTP/1.1 200")
        # WHEN the server ends THEN there is no error, which `running` asserts
    connection.close()


def test_mutual_tls_refuses_clients_without_a_valid_certificate(
    authority: Authority, tmp_path: Path
) -> None:
    files = dataclasses.replace(authority.issue(NAME), client_ca=authority.file)
    with running(tls=load_tls(files).context) as server:
        # No certificate, one of another authority, an expired one: refused. Ours: answered.
        assert refused(server, trusting(authority))
        (tmp_path / "other").mkdir()
        foreign = trusting(authority)
        shown = Authority(tmp_path / "other").issue("agent")
        foreign.load_cert_chain(shown.cert, shown.key)
        assert refused(server, foreign)
        late = trusting(authority)
        expired = authority.issue("agent", file="late", from_day=-9, days=8)
        late.load_cert_chain(expired.cert, expired.key)
        assert refused(server, late)
        known = trusting(authority)
        ours = authority.issue("agent", file="agent")
        known.load_cert_chain(ours.cert, ours.key)
        assert ask(server, known).endswith(b"0")


def refused(server: Running, client: ssl.SSLContext) -> bool:
    """Return whether a request failed. Under TLS 1.3, a client learns of it after the handshake."""
    try:
        return ask(server, client) == b""
    except (ssl.SSLError, ConnectionError):
        return True


def test_the_socket_of_a_client_is_plain_until_the_handshake(server: Running) -> None:
    with server.connect() as connection:
        connection.shutdown(socket.SHUT_WR)

        assert read_to_end(connection) == b""


def watched(files: TlsFiles, said: list[str]) -> CertificateRenewal:
    return CertificateRenewal(files, load_tls(files), log=said.append)


def serial_of(server: Running, authority: Authority) -> str:
    """Return the serial number of the certificate of a new connection."""
    with (
        server.connect() as plain,
        trusting(authority).wrap_socket(plain, server_hostname=NAME) as connection,
    ):
        connection.sendall(REQUEST)
        read_to_end(connection)
        shown = connection.getpeercert()
    assert shown is not None
    return str(shown["serialNumber"])


def test_new_connections_get_a_renewed_certificate(authority: Authority) -> None:
    said: list[str] = []
    renewal = watched(authority.issue(NAME, days=3), said)
    with running(tls=renewal.served.context) as server:
        before = serial_of(server, authority)
        with (
            server.connect() as plain,
            trusting(authority).wrap_socket(plain, server_hostname=NAME) as standing,
        ):
            # WHEN the files are replaced
            authority.issue(NAME, days=9)

            # THEN new connections get the new certificate, and an open one stays open
            assert serial_of(server, authority) != before
            standing.sendall(REQUEST)
            assert read_to_end(standing).startswith(b"HTTP/1.1 200")
    assert len(said) == 1
    assert said[0].startswith("the renewed certificate is in use; it expires ")


def test_an_invalid_pair_is_logged_once_and_the_old_one_stays_in_use(authority: Authority) -> None:
    said: list[str] = []
    files = authority.issue(NAME)
    renewal = watched(files, said)
    with running(tls=renewal.served.context) as server:
        before = serial_of(server, authority)

        # WHEN the key is replaced by that of another certificate
        other = authority.issue(NAME, file="other")
        other.key.replace(files.key)

        assert [serial_of(server, authority) for _ in range(2)] == [before, before]
        assert len(said) == 1
        assert "is invalid, the old one stays in use" in said[0]
        assert "the key does not match the certificate" in said[0]
        # AND when the certificate is replaced too, the pair is in use
        other.cert.replace(files.cert)
        assert serial_of(server, authority) != before
        assert said[1].startswith("the renewed certificate is in use")
    assert len(said) == 2


def test_files_that_are_missing_for_a_moment_change_nothing(authority: Authority) -> None:
    said: list[str] = []
    files = authority.issue(NAME)
    renewal = watched(files, said)
    kept = files.cert.read_bytes()

    files.cert.unlink()
    assert not renewal.reload()
    assert not renewal.reload()
    assert len(said) == 1

    files.cert.write_bytes(kept)
    assert renewal.reload()
    assert not renewal.reload()


def test_a_changed_authority_for_clients_is_used_from_then_on(
    authority: Authority, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other")
    trusted = tmp_path / "clients.pem"
    trusted.write_bytes(other.file.read_bytes())
    said: list[str] = []
    renewal = watched(replace(authority.issue(NAME), client_ca=trusted), said)
    client = trusting(authority)
    shown = authority.issue("agent", file="agent")
    client.load_cert_chain(shown.cert, shown.key)
    with running(tls=renewal.served.context) as server:
        assert refused(server, client)

        trusted.write_bytes(authority.file.read_bytes())

        assert ask(server, client).endswith(b"0")
