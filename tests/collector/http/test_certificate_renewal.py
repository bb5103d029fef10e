from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.http.tls import Renewal, load_tls
from tests.collector.http.test_tls_served import NAME, REQUEST, ask, refused, trusting
from tests.support.collector.authority import Authority
from tests.support.collector.running_edge import read_to_end, running, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.collector.http.tls import TlsFiles
    from tests.support.collector.running_edge import Running


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def watched(files: TlsFiles, said: list[str]) -> Renewal:
    return Renewal(files, load_tls(files), tell=said.append)


def serial_of(server: Running, authority: Authority) -> str:
    """Return the serial number of the certificate that a new visitor is shown."""
    with (
        server.connect() as plain,
        trusting(authority).wrap_socket(plain, server_hostname=NAME) as visitor,
    ):
        visitor.sendall(REQUEST)
        read_to_end(visitor)
        shown = visitor.getpeercert()
    assert shown is not None
    return str(shown["serialNumber"])


def test_who_comes_after_a_renewal_sees_the_new_certificate(authority: Authority) -> None:
    said: list[str] = []
    renewal = watched(authority.issue(NAME, days=3), said)
    with running(tls=renewal.served.context, renewal=renewal) as server:
        before = serial_of(server, authority)
        with (
            server.connect() as plain,
            trusting(authority).wrap_socket(plain, server_hostname=NAME) as standing,
        ):
            # WHEN the files are written anew, under the same names
            authority.issue(NAME, days=9)
            wait_until(lambda: bool(said))

            # THEN new visitors see it, and one who was there goes on
            assert serial_of(server, authority) != before
            standing.sendall(REQUEST)
            assert read_to_end(standing).startswith(b"HTTP/1.1 200")
    assert len(said) == 1
    assert said[0].startswith("the renewed certificate is served; it ends ")


def test_a_broken_pair_is_told_once_and_the_old_one_is_served(authority: Authority) -> None:
    said: list[str] = []
    files = authority.issue(NAME)
    renewal = watched(files, said)
    with running(tls=renewal.served.context, renewal=renewal) as server:
        before = serial_of(server, authority)

        # WHEN another certificate's key takes the key's place
        other = authority.issue(NAME, file="other")
        other.key.replace(files.key)
        wait_until(lambda: bool(said))

        assert "is not served, the old one is" in said[0]
        assert "the key is not this certificate's" in said[0]
        assert serial_of(server, authority) == before
        # AND when the certificate follows, the pair is served
        other.cert.replace(files.cert)
        wait_until(lambda: len(said) > 1)
        assert said[1].startswith("the renewed certificate is served")
        assert serial_of(server, authority) != before
    assert len(said) == 2


def test_files_that_are_away_for_a_moment_change_nothing(authority: Authority) -> None:
    said: list[str] = []
    files = authority.issue(NAME)
    renewal = watched(files, said)
    kept = files.cert.read_bytes()

    files.cert.unlink()
    assert not renewal.take()
    assert not renewal.take()
    assert len(said) == 1

    files.cert.write_bytes(kept)
    assert renewal.take()
    assert not renewal.take()


def test_another_authority_for_clients_counts_from_then_on(
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
    with running(tls=renewal.served.context, renewal=renewal) as server:
        assert refused(server, client)

        trusted.write_bytes(authority.file.read_bytes())
        wait_until(lambda: bool(said))

        assert ask(server, client).endswith(b"0")
