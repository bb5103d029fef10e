"""Where the server listens: a loopback address and a port that is free."""

from __future__ import annotations

import errno
import socket
from ipaddress import ip_address

from rankscope.errors import BadInputError
from rankscope.terminal import say

DEFAULT_PORT = 8050
LAST_PORT = 8099
BACKLOG = 128


def listen(host: str, port: int | None) -> socket.socket:
    """Return a bound socket on ``host``.

    Args:
        host: A loopback address or ``localhost``.
        port: The port asked for; None: `DEFAULT_PORT`, or the next free one, and says so.

    Raises:
        BadInputError: ``host`` is no loopback address, or no port is free.
    """
    address = _loopback(host)
    if port is not None:
        found = _bind(address, port)
        if found is None:
            raise BadInputError(
                f"port {port} on {address} is taken: give another --port, or leave it out"
            )
        return found
    for candidate in range(DEFAULT_PORT, LAST_PORT + 1):
        found = _bind(address, candidate)
        if found is not None:
            if candidate != DEFAULT_PORT:
                say(f"port {DEFAULT_PORT} is taken, serving on {candidate}")
            return found
    raise BadInputError(f"ports {DEFAULT_PORT} to {LAST_PORT} on {address} are taken: give --port")


def _loopback(host: str) -> str:
    address = "127.0.0.1" if host == "localhost" else host
    try:
        is_loopback = ip_address(address).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise BadInputError(
            f"--host {host} would open every run to the network: this rankscope serves loopback"
            " addresses only, because TLS and access tokens are not configured;"
            " leave --host out and reach it through `ssh -L 8050:127.0.0.1:8050`"
        )
    return address


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
        raise
    return bound


def url_of(bound: socket.socket) -> str:
    """Return the address of the server on ``bound``, without a slash at its end."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
