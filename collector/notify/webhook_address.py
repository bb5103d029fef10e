"""Addresses to which alerts may be posted (protection against server-side request forgery).

The server runs in a private network. A name that an outsider controls must not lead to a machine
in it, and nothing may lead to the metadata service of a cloud. So the addresses of a name are
checked, and the post goes to the checked address. The rule is separate from the webhook so that it
can be read and tested alone.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Address = ipaddress.IPv4Address | ipaddress.IPv6Address
    Resolve = Callable[[str, int], Sequence[str]]

INSIDE_ENDINGS = (".localhost", ".local", ".internal", ".lan", ".home.arpa", ".svc")
"""Suffixes of names that no public name server resolves."""

NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


INTERNAL = tuple(
    ipaddress.ip_network(text)
    for text in ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "::1", "fc00::/7")
)
"""Loopback, private and unique-local networks. Any other network that is not global, such as that
between a carrier and its customers (100.64.0.0/10), has no receiver of ours.

Source: RFC 1918, 4193, 6598, 6890.
"""

METADATA = tuple(
    ipaddress.ip_network(text)
    for text in (
        "168.63.129.16",  # Azure: docs "What is IP address 168.63.129.16?"
        "100.100.100.200",  # Alibaba Cloud: docs "Instance metadata"
        "192.0.0.192",  # Oracle Cloud: docs "Instance metadata service"
        "fd00:ec2::/32",  # AWS: EC2 user guide, fd00:ec2::254; fd00:ec2::23 of EKS
        "fd20:ce::/32",  # Google Cloud: docs "About VM metadata", fd20:ce::254
        "fd00:c1::/32",  # Oracle Cloud: fd00:c1::a9fe:a9fe
        "fd00:42::/32",  # Scaleway: docs "Instance metadata", fd00:42::42
        "fd00:a9fe:a9fe::/48",  # Akamai (Linode): docs "Metadata service", fd00:a9fe:a9fe::1
    )
)
"""Metadata services of clouds that are neither link-local nor outside `INTERNAL` and global. They
give credentials of the machine to any client on it."""


class AddressRefusedError(Exception):
    """The webhook's host has an address that is not allowed."""


def resolve_host(host: str, port: int) -> list[str]:
    """Return the addresses of a host, in the order in which to try them.

    Raises:
        OSError: The host has no address.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]).partition("%")[0] for *_, address in found]


def check_addresses(host: str, addresses: Sequence[str], *, is_tls: bool, is_internal: bool) -> str:
    """Return the address to connect to.

    Loopback and private addresses are internal. They may be given as addresses or by internal
    names; a public name with an internal address may belong to an attacker. Plain HTTP is allowed
    to internal addresses only. The metadata services of clouds, link-local addresses and those of
    no single machine are never allowed.

    Args:
        host: Host of the webhook's URL.
        addresses: All addresses of the host. Each must be allowed.
        is_tls: Whether the post is encrypted.
        is_internal: Whether the operator declared the host internal.

    Raises:
        AddressRefusedError: An address is not allowed.
    """
    may_be_inside = is_internal or is_internal_name(host)
    for text in addresses:
        address = _embedded_ipv4(ipaddress.ip_address(text))
        if _is_unusable(address):
            raise AddressRefusedError(f"{address} cannot be a receiver")
        if not address.is_global and not may_be_inside:
            raise AddressRefusedError(
                f"the public name has the internal address {address}: give that address, or set"
                " RANKSCOPE_ALERT_WEBHOOK_INSIDE=1"
            )
        if address.is_global and not is_tls:
            raise AddressRefusedError("a public address needs https")
    if not addresses:
        raise AddressRefusedError("the host has no address")
    return addresses[0]


def is_internal_name(host: str) -> bool:
    """Return whether a host is an address, or a name that is only valid internally."""
    if _plain(host) is not None:
        return True
    name = host.lower().rstrip(".")
    return "." not in name or name.endswith(INSIDE_ENDINGS)


def is_obscured_address(host: str) -> bool:
    """Return whether a host is an address in an unusual form: 127.1, 2130706433, 0x7f.1."""
    last = host.rstrip(".").rpartition(".")[2].lower()
    is_number = last.isdigit() or last.startswith("0x")
    return is_number and _plain(host) is None


def _plain(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _embedded_ipv4(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address contains; else the address itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


def _is_unusable(address: Address) -> bool:
    if address.is_multicast or any(address in network for network in METADATA):
        return True
    if any(address in network for network in INTERNAL):
        return False
    is_site_local = isinstance(address, ipaddress.IPv6Address) and address.is_site_local
    return not address.is_global or address.is_reserved or is_site_local
