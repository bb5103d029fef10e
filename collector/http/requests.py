"""What a request says of itself: who asks, from where, with which token."""

from __future__ import annotations

import base64
import binascii
import re
from http.cookies import CookieError, SimpleCookie
from ipaddress import IPv4Address, ip_address, ip_network
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, urlencode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, MutableMapping

    Scope = MutableMapping[str, Any]
    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


HOST_FORM = re.compile(
    r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::[0-9]{0,5})?"
)


def request_client(scope: Scope) -> str:
    """Return whose request it is; "" where that is not known."""
    client = scope.get("client")
    return "" if client is None else client_key(str(client[0]))


def is_secure(scope: Scope) -> bool:
    """Return whether a request came by TLS."""
    return str(scope.get("scheme", "http")) == "https"


def headers_of(scope: Scope) -> dict[str, str]:
    """Return the headers by name, in small letters."""
    return {
        name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
    }


def request_token(headers: dict[str, str]) -> str:
    """Return the token that a request shows; "" where it shows none.

    ClickHouse's clients have a name and a password: the token is the password, in basic
    authentication or in ``X-ClickHouse-Key``, and any name will do.
    """
    scheme, _, shown = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return shown.strip()
    if scheme.lower() == "basic":
        try:
            pair = base64.b64decode(shown.strip(), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError, ValueError):
            return ""
        return pair.partition(":")[2]
    return headers.get("x-clickhouse-key", "").strip()


def host_name(host: str) -> str:
    """Return the name in a ``Host`` header, without port and brackets; "" where it is no host.

    A user before it, a path behind it or a port that is no number make it none: what they hide
    from us another program on the way may see.
    """
    found = HOST_FORM.fullmatch(host)
    return "" if found is None else (found["address"] or found["name"]).lower()


def is_foreign(scope: Scope, headers: dict[str, str], *, requires_origin: bool) -> bool:
    """Return whether another site's page sent the request (OWASP's fetch-metadata rule).

    Args:
        scope: The request's.
        headers: The request's.
        requires_origin: Count a request that says nothing of its origin as foreign.
    """
    origin = headers.get("origin")
    if origin is not None:
        scheme, _, place = origin.partition("://")
        # The plain page of the same name is anybody's who sits on the way.
        is_weaker = is_secure(scope) and scheme != "https"
        return is_weaker or place != headers.get("host", "")
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in {"same-origin", "none"}
    return requires_origin


def is_navigation(headers: dict[str, str]) -> bool:
    """Return whether a browser opens a page, which a login can follow."""
    mode = headers.get("sec-fetch-mode")
    wants_html = "text/html" in headers.get("accept", "")
    return wants_html and mode in {None, "navigate"}


def cookie_in(headers: Mapping[str, str], name: str) -> str:
    """Return a cookie's value; "" where there is none of that name."""
    try:
        cookies = SimpleCookie(headers.get("cookie", ""))
    except CookieError:
        return ""
    return cookies[name].value if name in cookies else ""


def _query(scope: Scope) -> list[tuple[str, str]]:
    return parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)


def query_tokens(scope: Scope) -> list[str]:
    """Return what stands in the address as ``token=``."""
    return [value for key, value in _query(scope) if key == "token"]


def clean_url(scope: Scope) -> str:
    """Return the path and query asked for, without the token; always a path of this server."""
    path = "/" + quote(scope["path"].lstrip("/\\"))
    query = urlencode([(key, value) for key, value in _query(scope) if key != "token"])
    return f"{path}?{query}" if query else path


NETWORK_BITS = 64
"""Of an IPv6 address: whoever has one has all that begin so."""


def client_key(address: str) -> str:
    """Return who is counted for an address: an IPv4 address, or the network of an IPv6 one."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ip_network((found, NETWORK_BITS), strict=False))
