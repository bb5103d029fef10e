"""TLS of the server: loading and checking of certificates, and their renewal.

A certificate is checked at the start by a handshake in memory between a client and a server.
"""

from __future__ import annotations

import os
import ssl
import stat
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rankscope.tracer.spool import open_regular_file

from ..errors import TlsError
from ..file_change import read_file_stamps

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ..file_change import FileStamps


MAX_ROUNDS = 8
"""Rounds of a handshake in memory. TLS 1.3 takes three, TLS 1.2 four."""

MESSAGES = {
    "KEY_VALUES_MISMATCH": "the key does not match the certificate",
    "NO_START_LINE": "it is not a PEM file",
}
"""Plain messages for reasons of OpenSSL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Files of the flags ``--tls-cert``, ``--tls-key`` and ``--tls-client-ca``."""

    cert: Path
    """PEM file: the server's certificate, then the intermediate certificates."""

    key: Path
    """PEM file without a password, readable by its owner alone."""

    client_ca: Path | None = None
    """PEM file of the CA that must have signed client certificates. None: not required."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """TLS context of the server, with names and expiry of its certificate."""

    context: ssl.SSLContext
    names: frozenset[str]
    """Host names and addresses of the certificate, in lower case, without wildcards."""

    expires_s: int
    """Unix time at which the certificate expires."""


def load_tls(files: TlsFiles) -> ServerTls:
    """Return a TLS context of the server, for TLS 1.2 and newer.

    Raises:
        TlsError: A file cannot be read, others can read the key, the key does not match, or the
            certificate is expired, not yet valid or not for servers.
    """
    _check_key_file(files.key)
    for path in filter(None, (files.cert, files.client_ca)):
        try:
            os.close(open_regular_file(path))
        except OSError as error:
            raise TlsError(path, str(error.strerror).lower()) from None
    facts = _own_certificate(files)
    names = {value.lower() for _, value in facts.get("subjectAltName", ())}
    context = _context(files)
    if files.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(files.client_ca)
        except OSError as error:
            raise TlsError(files.client_ca, _reason(error)) from None
    return ServerTls(
        context=context,
        names=frozenset(name for name in names if "*" not in name),
        expires_s=int(ssl.cert_time_to_seconds(facts["notAfter"])),
    )


def _context(files: TlsFiles) -> ssl.SSLContext:
    def has_password() -> str:
        raise TlsError(files.key, "the key has a password: give a key without one")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Renegotiation costs the server much more than the client.
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        # Without a callback, OpenSSL would ask for a password at the terminal and wait forever.
        context.load_cert_chain(files.cert, files.key, password=has_password)
    except OSError as error:
        raise TlsError(files.cert, _reason(error)) from None
    return context


def _check_key_file(path: Path) -> None:
    try:
        found = path.stat()
    except OSError as error:
        raise TlsError(path, str(error.strerror).lower()) from None
    if not stat.S_ISREG(found.st_mode):
        raise TlsError(path, "it is not a regular file")
    # Certificate managers let a group read it.
    if found.st_mode & 0o027:
        mode = stat.S_IMODE(found.st_mode)
        raise TlsError(path, f"others can read or write the key (mode {mode:04o}): chmod 600 it")
    if not os.access(path, os.R_OK):
        raise TlsError(path, "this user cannot read it")


def _own_certificate(files: TlsFiles) -> dict[str, Any]:
    """Return the fields of the certificate, as a client that trusts only it sees them."""
    server = _context(files)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    # The certificate is its own trust anchor: this checks its dates and uses, not its issuer.
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        client.load_verify_locations(files.cert)
        return _handshake(client, server)
    except ssl.SSLCertVerificationError as error:
        raise TlsError(files.cert, error.verify_message) from None
    except OSError as error:
        raise TlsError(files.cert, _reason(error)) from None


def _handshake(client: ssl.SSLContext, server: ssl.SSLContext) -> dict[str, Any]:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(to_client, to_server)
    far = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(MAX_ROUNDS):
        for side in (near, far):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return near.getpeercert() or {}


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        # Some errors have no reason, although their stub declares it.
        reason: str | None = getattr(error, "reason", None)
        if reason is None:
            return "it is not a PEM file with a certificate and its key"
        return MESSAGES.get(reason, reason.lower().replace("_", " "))
    return str(error.strerror).lower()


class CertificateRenewal:
    """Reload of a certificate when its files have changed, looked at in each handshake.

    A renewed certificate is checked as at the start and used for new connections. If it is
    invalid, this is logged once and the old one stays in use: certificate managers write the
    certificate and its key one after the other.

    Args:
        served: What was loaded from them. Its context is the listener's.
    """

    def __init__(self, files: TlsFiles, served: ServerTls, *, log: Callable[[str], None]) -> None:
        self._files = files
        self._log = log
        self._stamps = self._read_stamps()
        self.served = served
        served.context.sni_callback = self._use_newest

    def reload(self) -> bool:
        """Load the files if they have changed; return whether a new certificate is in use."""
        stamps = self._read_stamps()
        if stamps == self._stamps:
            return False
        self._stamps = stamps
        try:
            fresh = load_tls(self._files)
        except TlsError as error:
            self._log(f"the changed certificate is invalid, the old one stays in use: {error}")
            return False
        self.served = fresh
        ends = datetime.fromtimestamp(fresh.expires_s, UTC)
        self._log(f"the renewed certificate is in use; it expires {ends:%Y-%m-%d %H:%M} UTC")
        return True

    def _use_newest(self, connection: ssl.SSLObject, *_: object) -> None:
        # OpenSSL calls it in each handshake, also for a client that names no host.
        self.reload()
        connection.context = self.served.context

    def _read_stamps(self) -> FileStamps:
        client_ca = self._files.client_ca
        named = [self._files.cert, self._files.key, *([] if client_ca is None else [client_ca])]
        return read_file_stamps(*named)
