"""Where the server listens, and what must be set before others than this host may reach it."""

from __future__ import annotations

import errno
import socket
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING

from rankscope.collector.http.certificate_renewal import Renewal
from rankscope.collector.http.gate import LOOPBACK_NAMES
from rankscope.collector.http.limits import MOST_FROM_ONE_ADDRESS
from rankscope.collector.http.socket_server import Door
from rankscope.collector.http.tls import TlsFiles, load_tls
from rankscope.collector.http.token_file import default_tokens_path, read_tokens
from rankscope.collector.http.tokens import TokenState

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
HERE = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenOptions:
    """Flags of `rankscope serve` that say who can reach it."""

    host: str = HERE
    port: int | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    server_names: tuple[str, ...] = ()
    """Host names of this server, besides those of its certificate."""

    connections_per_address: int = MOST_FROM_ONE_ADDRESS
    """At one time; behind a load balancer every visitor has the balancer's address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Open doors, and by which names they are asked for."""

    doors: tuple[Door, ...]
    url: str
    """For people and agents; without a slash at its end."""

    local_url: str
    """For commands on this host, which trust no certificate of ours; plain, on loopback."""

    port: int
    names: frozenset[str]
    renewal: Renewal | None
    """Of the server's certificate; None without TLS."""

    connections_per_address: int


@contextmanager
def listening(options: ListenOptions) -> Iterator[Listening]:
    """Listen as asked for as long as the block runs.

    Raises:
        BadInputError: The address is none, others could reach it and TLS, a token or a name is
            missing, or no port is free.
        TlsError: The certificate can't be served.
        TokenFileError: The file of tokens can't be trusted.
    """
    address = _address(options.host)
    tls = _load_tls(options)
    if not address.is_loopback:
        _check_guarded(options, tls)
    names = _names(options, address, tls)
    with ExitStack() as stack:
        bound = stack.enter_context(listen(str(address), options.port))
        renewal = None if tls is None else Renewal(_tls_files(options), tls, tell=say)
        context = None if tls is None else tls.context
        doors = [Door(bound=bound, tls=context, renewal=renewal)]
        if tls is not None or not address.is_loopback:
            inner = stack.enter_context(socket.create_server((HERE, 0), backlog=BACKLOG))
            doors.append(Door(bound=inner))
        port = bound.getsockname()[1]
        yield Listening(
            doors=tuple(doors),
            url=_url(_shown_name(options, address, tls), port, is_secure=tls is not None),
            local_url=_url(*doors[-1].bound.getsockname()[:2], is_secure=False),
            port=port,
            names=names,
            renewal=renewal,
            connections_per_address=options.connections_per_address,
        )


def listen(host: str, port: int | None) -> socket.socket:
    """Return a bound socket on ``host``.

    Args:
        host: An address of this machine.
        port: The port asked for; None: `DEFAULT_PORT`, or the next free one, and says so.

    Raises:
        BadInputError: The address is not this machine's, or no port is free.
    """
    if port is not None:
        found = _bind(host, port)
        if found is None:
            raise BadInputError(
                f"port {port} on {host} is taken: give another --port, or leave it out"
            )
        return found
    for candidate in range(DEFAULT_PORT, LAST_PORT + 1):
        found = _bind(host, candidate)
        if found is not None:
            if candidate != DEFAULT_PORT:
                say(f"port {DEFAULT_PORT} is taken, serving on {candidate}")
            return found
    raise BadInputError(f"ports {DEFAULT_PORT} to {LAST_PORT} on {host} are taken: give --port")


def _address(host: str) -> IPv4Address | IPv6Address:
    try:
        return ip_address(HERE if host == "localhost" else host)
    except ValueError:
        raise BadInputError(
            f"--host {host!r} is no address: give one of this machine's (0.0.0.0 for all of them),"
            " and the name that it is called by as --server-name"
        ) from None


def _load_tls(options: ListenOptions) -> ServerTls | None:
    cert, key = options.tls_cert, options.tls_key
    if cert is None and key is None:
        if options.tls_client_ca is not None:
            raise BadInputError("--tls-client-ca needs --tls-cert and --tls-key too")
        return None
    if cert is None or key is None:
        raise BadInputError("--tls-cert and --tls-key belong together: give both")
    return load_tls(_tls_files(options))


def _tls_files(options: ListenOptions) -> TlsFiles:
    """Return the files of a server with TLS."""
    cert, key = options.tls_cert, options.tls_key
    if cert is None or key is None:
        raise BadInputError("--tls-cert and --tls-key belong together: give both")
    return TlsFiles(cert=cert, key=key, client_ca=options.tls_client_ca)


def _check_guarded(options: ListenOptions, tls: ServerTls | None) -> None:
    """Refuse to open the runs to a network without TLS, and without a token that is kept."""
    what = f"--host {options.host} would open every run to the network"
    if tls is None:
        raise BadInputError(
            f"{what} without TLS: give --tls-cert and --tls-key, and make tokens with"
            " `rankscope token create`; or leave --host out and reach it through"
            f" `ssh -L {DEFAULT_PORT}:{HERE}:{DEFAULT_PORT}`"
        )
    path, now_ns = default_tokens_path(), time.time_ns()
    if not any(record.state(now_ns) is TokenState.LIVE for record in read_tokens(path)):
        raise BadInputError(
            f"{what}, and {path} holds no live token: make one with"
            " `rankscope token create --role ingest` (or read, or admin)"
        )


def _names(
    options: ListenOptions, address: IPv4Address | IPv6Address, tls: ServerTls | None
) -> frozenset[str]:
    of_certificate = frozenset() if tls is None else tls.names
    given = frozenset(name.lower() for name in options.server_names)
    if any(not name or "/" in name or name.startswith("*") for name in given):
        raise BadInputError("--server-name takes a plain host name, such as scope.example.org")
    own = frozenset() if address.is_unspecified else frozenset({str(address)})
    if not address.is_loopback and not (of_certificate | given):
        raise BadInputError(
            "the certificate says no name that this server could be asked by:"
            " give --server-name as well"
        )
    return LOOPBACK_NAMES | of_certificate | given | own


def _shown_name(
    options: ListenOptions, address: IPv4Address | IPv6Address, tls: ServerTls | None
) -> str:
    """Return the name by which a browser would find its certificate in order."""
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
    bound = socket.socket(family, socket.SOCK_STREAM)
    # A server that was just stopped leaves connections in TIME_WAIT on its port.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((address, port))
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        if error.errno in {errno.EADDRINUSE, errno.EACCES}:
            return None
        if error.errno == errno.EADDRNOTAVAIL:
            raise BadInputError(f"--host {address} is no address of this machine") from None
        raise
    return bound


def _url(host: str, port: int, *, is_secure: bool) -> str:
    scheme = "https" if is_secure else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
