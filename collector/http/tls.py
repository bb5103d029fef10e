"""TLS of the server: one context, checked by shaking hands with itself before anybody comes."""

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


MAX_FLIGHTS = 8
"""Looks at either side until a handshake in memory is over; TLS 1.3 takes three, 1.2 four."""

WORDS = {
    "KEY_VALUES_MISMATCH": "the key is not this certificate's",
    "NO_START_LINE": "it is no PEM file",
}
"""By OpenSSL's reason, what a person can do something about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The flags ``--tls-cert``, ``--tls-key`` and ``--tls-client-ca``."""

    cert: Path
    """PEM: the server's certificate, then those between it and the CA's."""

    key: Path
    """PEM, without a password, readable by its owner alone."""

    client_ca: Path | None = None
    """PEM of the CA whose certificates clients must show; None: they show none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """A context that is ready to serve, and what its certificate says of itself."""

    context: ssl.SSLContext
    names: frozenset[str]
    """Host names and addresses of the certificate, in small letters, patterns (``*.``) left out."""

    expires_s: int
    """Unix time."""


def load_tls(files: TlsFiles) -> ServerTls:
    """Return the context of a server, TLS 1.2 and newer.

    Raises:
        TlsError: A file can't be read, the key is open to others or another certificate's, or
            the certificate is expired, not yet valid, or not for servers.
    """
    _check_key_file(files.key)
    for path in filter(None, (files.cert, files.client_ca)):
        _check_plain(path)
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
        raise TlsError(files.key, "the key wants a password; give one without")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A client that asks for a new handshake again and again costs it little and us much.
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        # Left to itself, OpenSSL would ask for a password at the terminal and wait for ever.
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
        raise TlsError(path, "it is no plain file")
    # A group may own it (certificate managers do so); everybody may not read it.
    if found.st_mode & 0o027:
        mode = stat.S_IMODE(found.st_mode)
        raise TlsError(path, f"the key is open to others (mode {mode:04o}): chmod 600 it")
    if not os.access(path, os.R_OK):
        raise TlsError(path, "it can't be read by this user")


def _check_plain(path: Path) -> None:
    try:
        os.close(open_regular_file(path))
    except OSError as error:
        raise TlsError(path, str(error.strerror).lower()) from None


def _own_certificate(files: TlsFiles) -> dict[str, Any]:
    """Return the certificate's fields, as a client that trusts it alone sees them."""
    server = _context(files)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    # The certificate itself is the anchor, whoever signed it: only its own dates and uses count.
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
    for _ in range(MAX_FLIGHTS):
        for side in (near, far):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return near.getpeercert() or {}


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        reason: str | None = getattr(
            error, "reason", None
        )  # some have none, whatever their stub says
        if reason is None:
            return "it is no PEM file with a certificate and its key"
        return WORDS.get(reason, reason.lower().replace("_", " "))
    return str(error.strerror).lower()


class CertificateRenewal:
    """Watches the files of a certificate.

    A renewed pair is loaded and checked as at the start, into a context of its own, and served
    to those who come from then on. One that can't be served is told once, and the old one
    stays: certificate managers write two files one after the other.

    Args:
        files: The flags of the server.
        served: What was loaded from them.
        tell: Takes one line for the person at the log.
    """

    def __init__(self, files: TlsFiles, served: ServerTls, *, tell: Callable[[str], None]) -> None:
        self._files = files
        self._tell = tell
        self._marks = self._look()
        self.served = served

    def take(self) -> bool:
        """Load the files if they have changed; return whether others are served from now on."""
        marks = self._look()
        if marks == self._marks:
            return False
        self._marks = marks
        try:
            fresh = load_tls(self._files)
        except TlsError as error:
            self._tell(f"the certificate was changed and is not served, the old one is: {error}")
            return False
        self.served = fresh
        ends = datetime.fromtimestamp(fresh.expires_s, UTC)
        self._tell(f"the renewed certificate is served; it ends {ends:%Y-%m-%d %H:%M} UTC")
        return True

    def _look(self) -> FileStamps:
        client_ca = self._files.client_ca
        named = [self._files.cert, self._files.key, *([] if client_ca is None else [client_ca])]
        return read_file_stamps(*named)
