"""Where alerts may be posted to: what a name stands for is looked at, and that alone is asked.

The server stands inside a network that its receiver may not reach by right: a name that somebody
else controls must lead to no machine inside, and nothing to the cloud's metadata.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
from http.client import HTTPConnection, HTTPSConnection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Address = ipaddress.IPv4Address | ipaddress.IPv6Address
    Resolve = Callable[[str, int], Sequence[str]]

INSIDE_ENDINGS = (".localhost", ".local", ".internal", ".lan", ".home.arpa", ".svc")
"""Of names that no public name server answers for."""

NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class AddressRefusedError(Exception):
    """The webhook's host stands for an address that is not posted to."""


def resolve_host(host: str, port: int) -> list[str]:
    """Return the addresses of a host, in the order in which they are to be tried.

    Raises:
        OSError: It has none.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]).partition("%")[0] for *_, address in found]


def check_addresses(host: str, addresses: Sequence[str], *, is_tls: bool, is_internal: bool) -> str:
    """Return the address to connect to.

    Inside are loopback and private addresses. They may be told plainly, or by a name of the
    inside; a name of the outside that leads inside may be somebody else's. Plain HTTP stays
    inside. Link-local addresses, among them the clouds' metadata, and those of no single machine
    are never posted to.

    Args:
        host: As the webhook's address names it.
        addresses: All that it stands for; each must be fit.
        is_tls: Whether the post is encrypted.
        is_internal: Whether the operator says that the host is inside, whatever its name.

    Raises:
        AddressRefusedError: One of them is not fit.
    """
    may_be_inside = is_internal or is_internal_name(host)
    for text in addresses:
        address = _embedded_ipv4(ipaddress.ip_address(text))
        if _is_unusable(address):
            raise AddressRefusedError(f"{address} is of no receiver")
        if not address.is_global and not may_be_inside:
            raise AddressRefusedError(
                f"the name leads to {address}, inside: write that address, or set"
                " RANKSCOPE_ALERT_WEBHOOK_INSIDE=1"
            )
        if address.is_global and not is_tls:
            raise AddressRefusedError("what goes outside goes by https")
    if not addresses:
        raise AddressRefusedError("it has no address")
    return addresses[0]


def is_internal_name(host: str) -> bool:
    """Tell whether a host is an address in plain writing, or a name of the inside."""
    if _plain(host) is not None:
        return True
    name = host.lower().rstrip(".")
    return "." not in name or name.endswith(INSIDE_ENDINGS)


def is_obscured_address(host: str) -> bool:
    """Tell whether a host is an address in other than plain writing: 127.1, 2130706433, 0x7f.1."""
    last = host.rstrip(".").rpartition(".")[2].lower()
    is_number = last.isdigit() or last.startswith("0x")
    return is_number and _plain(host) is None


class PinnedConnection(HTTPConnection):
    """Speaks to one address, whatever its host's name stands for by then."""

    def __init__(self, host: str, port: int, *, address: str, timeout_s: float) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self._address = address

    def connect(self) -> None:
        """Connect to the address."""
        self.sock = socket.create_connection((self._address, self.port), self.timeout)


class PinnedTlsConnection(HTTPSConnection):
    """The same over TLS; the certificate must be the name's."""

    def __init__(self, host: str, port: int, *, address: str, timeout_s: float) -> None:
        self._tls = ssl.create_default_context()
        super().__init__(host, port, timeout=timeout_s, context=self._tls)
        self._address = address

    def connect(self) -> None:
        """Connect to the address, and shake hands with the name."""
        plain = socket.create_connection((self._address, self.port), self.timeout)
        self.sock = self._tls.wrap_socket(plain, server_hostname=self.host)


def _plain(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _embedded_ipv4(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 one stands for, where it does."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


def _is_unusable(address: Address) -> bool:
    return (
        address.is_link_local
        or address.is_multicast
        or address.is_unspecified
        or (address.is_reserved and not address.is_loopback)
    )
