from __future__ import annotations

import dataclasses
import ssl
import time
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.errors import TlsError
from rankscope.collector.http.tls import load_tls
from tests.support.collector.authority import Authority

if TYPE_CHECKING:
    from pathlib import Path

DAY_S = 86_400


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_a_certificate_has_names_and_an_expiry_time(authority: Authority) -> None:
    tls = load_tls(authority.issue("Scope.Example", "*.pool.example", "10.0.0.7", days=9))

    assert tls.names == {"scope.example", "10.0.0.7"}
    # Issued yesterday for nine days.
    assert tls.expires_s == pytest.approx(time.time_ns() / 1e9 + 8 * DAY_S, abs=120)
    assert tls.context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert tls.context.verify_mode is ssl.CERT_NONE


def test_with_a_clients_ca_every_client_must_show_a_certificate(authority: Authority) -> None:
    files = dataclasses.replace(authority.issue("a.example"), client_ca=authority.file)

    assert load_tls(files).context.verify_mode is ssl.CERT_REQUIRED


def test_an_expired_or_early_certificate_is_refused_at_the_start(authority: Authority) -> None:
    with pytest.raises(TlsError, match=r"server\.pem: certificate has expired"):
        load_tls(authority.issue("a.example", from_day=-10, days=9))
    with pytest.raises(TlsError, match="certificate is not yet valid"):
        load_tls(authority.issue("a.example", from_day=2))


def test_a_key_of_another_certificate_is_refused(authority: Authority) -> None:
    first, second = authority.issue("a.example"), authority.issue("a.example", file="other")

    with pytest.raises(TlsError, match="the key does not match the certificate"):
        load_tls(dataclasses.replace(first, key=second.key))


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o620])
def test_a_key_that_others_can_read_is_refused(authority: Authority, mode: int) -> None:
    files = authority.issue("a.example")
    files.key.chmod(mode)

    with pytest.raises(TlsError, match=f"mode {mode:04o}.: chmod 600"):
        load_tls(files)


def test_a_missing_or_broken_file_is_named(authority: Authority, tmp_path: Path) -> None:
    files = authority.issue("a.example")
    missing = tmp_path / "missing.pem"
    broken = tmp_path / "broken.pem"
    broken.write_text("hello")
    broken.chmod(0o600)

    for change in ({"cert": missing}, {"key": missing}, {"client_ca": missing}):
        with pytest.raises(TlsError, match=r"missing\.pem: no such file|server\.pem: no such file"):
            load_tls(dataclasses.replace(files, **change))
    for change in ({"cert": broken}, {"key": broken}, {"client_ca": broken}):
        with pytest.raises(TlsError):
            load_tls(dataclasses.replace(files, **change))


def test_a_key_with_a_password_is_refused_without_a_prompt(
    authority: Authority, tmp_path: Path
) -> None:
    from cryptography.hazmat.primitives import serialization

    files = authority.issue("a.example")
    key = serialization.load_pem_private_key(files.key.read_bytes(), password=None)
    locked = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    files.key.write_bytes(locked)

    with pytest.raises(TlsError, match="the key has a password"):
        load_tls(files)
