"""Listeners of a server, and the checks before other hosts may reach it."""

from __future__ import annotations

import errno
import socket
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING

from rankscope.collector.http.gate import LOOPBACK_NAMES
from rankscope.collector.http.server import Listener
from rankscope.collector.http.tls import CertificateRenewal, TlsFiles, load_tls
from rankscope.collector.http.tokens import TokenState, default_tokens_path, read_tokens

from ..errors import BadInputError
from ..terminal.lines import say

if TYPE_CHECKING:
    from collections.abc import Iterator
    from ipaddress import IPv4Address, IPv6Address
    from pathlib import Path

    from rankscope.collector.http.tls import ServerTls

DEFAULT_PORT = 8050
LAST_PORT = 8099
BACKLOG = 1024
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenOptions:
    """Flags of `rankscope serve` about who can reach it.

    Raises:
        BadInputError: The host is no IP address, a name is none, or a file of TLS is missing.
    """

    host: str = LOOPBACK
    port: int | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    server_names: tuple[str, ...] = ()
    """Host names of this server besides those of its certificate."""

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise BadInputError("--tls-cert and --tls-key must be given together")
        if self.tls_cert is None and self.tls_client_ca is not None:
            raise BadInputError("--tls-client-ca needs --tls-cert and --tls-key")
        if any(not name or "/" in name or name.startswith("*") for name in self.server_names):
            raise BadInputError("--server-name must be a host name, such as scope.example.org")
        try:
            _ = self.address
        except ValueError:
            raise BadInputError(
                f"--host {self.host!r} is not an IP address: give one of this machine (0.0.0.0 for"
                " all), and give host names with --server-name"
            ) from None

    @property
    def address(self) -> IPv4Address | IPv6Address:
        """Address to listen on."""
        return ip_address(LOOPBACK if self.host == "localhost" else self.host)

    @property
    def tls(self) -> TlsFiles | None:
        """Files of a server with TLS; None without TLS."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return TlsFiles(cert=self.tls_cert, key=self.tls_key, client_ca=self.tls_client_ca)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Open listeners of a server, and the addresses and names for it."""

    listeners: tuple[Listener, ...]
    url: str
    """For users and agents; without a trailing slash."""

    local_url: str
    """For commands on this host: without TLS, because they do not know the CA; on loopback."""

    port: int
    names: frozenset[str]
    renewal: CertificateRenewal | None
    """Renewal of the server's certificate; None without TLS."""


@contextmanager
def open_endpoint(options: ListenOptions) -> Iterator[Endpoint]:
    """Listen on the address of the flags until the block ends.

    Raises:
        BadInputError: No port is free; or other hosts could reach the address, and TLS, a token
            or a host name is missing.
        TlsError: The certificate or its key cannot be used.
        TokenFileError: The file of tokens is invalid, or its permissions are too open.
    """
    address, files = options.address, options.tls
    tls = None if files is None else load_tls(files)
    if not address.is_loopback:
        _check_protected(options, tls)
    names = _names(options, address, tls)
    with ExitStack() as stack:
        bound = stack.enter_context(listen(str(address), options.port))
        renewal = None if files is None or tls is None else CertificateRenewal(files, tls, log=say)
        context = None if tls is None else tls.context
        listeners = [Listener(bound=bound, tls=context)]
        if tls is not None or not address.is_loopback:
            inner = stack.enter_context(listen(LOOPBACK, 0))
            listeners.append(Listener(bound=inner))
        port = bound.getsockname()[1]
        yield Endpoint(
            listeners=tuple(listeners),
            url=_url(_shown_name(options, address, tls), port, is_secure=tls is not None),
            local_url=_url(*listeners[-1].bound.getsockname()[:2], is_secure=False),
            port=port,
            names=names,
            renewal=renewal,
        )


def listen(host: str, port: int | None) -> socket.socket:
    """Return a listening socket.

    Args:
        host: An address of this machine.
        port: The port. None: `DEFAULT_PORT`, or the next free one, which is logged.

    Raises:
        BadInputError: The address does not belong to this machine, or no port is free.
    """
    if port is not None:
        found = _bind(host, port)
        if found is None:
            raise BadInputError(
                f"port {port} on {host} is in use: give another --port, or leave it out"
            )
        return found
    for candidate in range(DEFAULT_PORT, LAST_PORT + 1):
        found = _bind(host, candidate)
        if found is not None:
            if candidate != DEFAULT_PORT:
                say(f"port {DEFAULT_PORT} is in use: listening on {candidate}")
            return found
    raise BadInputError(f"ports {DEFAULT_PORT} to {LAST_PORT} on {host} are in use: give --port")


def _check_protected(options: ListenOptions, tls: ServerTls | None) -> None:
    """Raise if other hosts could reach the server without TLS or without a token."""
    problem = f"--host {options.host} would expose all runs to the network"
    if tls is None:
        raise BadInputError(
            f"{problem} without TLS: give --tls-cert and --tls-key, and create tokens with"
            " `rankscope token create`; or leave out --host and connect through"
            f" `ssh -L {DEFAULT_PORT}:{LOOPBACK}:{DEFAULT_PORT}`"
        )
    path, now_ns = default_tokens_path(), time.time_ns()
    if not any(record.state(now_ns) is TokenState.LIVE for record in read_tokens(path)):
        raise BadInputError(
            f"{problem}, and {path} has no valid token: create one with"
            " `rankscope token create --role ingest` (or read, sql or admin)"
        )


def _names(
    options: ListenOptions, address: IPv4Address | IPv6Address, tls: ServerTls | None
) -> frozenset[str]:
    of_certificate = frozenset() if tls is None else tls.names
    given = frozenset(name.lower() for name in options.server_names)
    own = frozenset() if address.is_unspecified else frozenset({str(address)})
    if not address.is_loopback and not (of_certificate | given):
        raise BadInputError(
            "the certificate contains no host name: give the name of this server with --server-name"
        )
    return LOOPBACK_NAMES | of_certificate | given | own


def _shown_name(
    options: ListenOptions, address: IPv4Address | IPv6Address, tls: ServerTls | None
) -> str:
    """Return the host name for which a browser accepts the certificate."""
    if options.server_names:
        return options.server_names[0]
    if tls is None or str(address) in tls.names or not tls.names:
        return str(address)
    return min(tls.names, key=lambda name: (_is_address(name), name))


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _bind(address: str, port: int) -> socket.socket | None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # asyncio sets TCP_NODELAY only on what is declared as TCP: without it, an answer's body waits
    # 40 ms for the client to confirm its header.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # A server that has just stopped leaves connections in TIME_WAIT on its port.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((address, port))
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        if error.errno in {errno.EADDRINUSE, errno.EACCES}:
            return None
        if error.errno == errno.EADDRNOTAVAIL:
            raise BadInputError(f"--host {address} is not an address of this machine") from None
        raise
    return bound


def _url(host: str, port: int, *, is_secure: bool) -> str:
    scheme = "https" if is_secure else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
