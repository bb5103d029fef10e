"""Client, origin, token and cookies of a request, and the types of ASGI."""

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

NETWORK_BITS = 64
"""Length of an IPv6 network. A host usually owns all addresses of its /64."""


def request_client(scope: Scope) -> str:
    """Return the key of a request's client; "" if unknown."""
    client = scope.get("client")
    return "" if client is None else client_key(str(client[0]))


def is_secure(scope: Scope) -> bool:
    """Return whether a request came over TLS."""
    return str(scope.get("scheme", "http")) == "https"


def read_headers(scope: Scope) -> dict[str, str]:
    """Return the headers by lower-case name."""
    return {
        name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
    }


def request_token(headers: dict[str, str]) -> str:
    """Return the token in a request's headers; "" if there is none.

    Clients of ClickHouse send a user and a password. The token is the password, in basic
    authentication or ``X-ClickHouse-Key``; the user is ignored.
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
    """Return the name in a ``Host`` header, without port and brackets; "" if it is invalid.

    A user, a path or a port that is not a number make it invalid: a proxy may read such a header
    in another way than this function.
    """
    found = HOST_FORM.fullmatch(host)
    return "" if found is None else (found["address"] or found["name"]).lower()


def is_foreign(scope: Scope, headers: dict[str, str], *, requires_origin: bool) -> bool:
    """Return whether a page of another site sent the request.

    Args:
        requires_origin: Whether a request without an origin counts as foreign.

    Source: OWASP, cross-site request forgery prevention, fetch metadata.
    """
    origin = headers.get("origin")
    if origin is not None:
        scheme, _, place = origin.partition("://")
        # A plain HTTP page of the same name could come from anyone in the network between.
        is_weaker = is_secure(scope) and scheme != "https"
        return is_weaker or place != headers.get("host", "")
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in {"same-origin", "none"}
    return requires_origin


def is_navigation(headers: dict[str, str]) -> bool:
    """Return whether a browser opens a page, so that it can be redirected to the login."""
    mode = headers.get("sec-fetch-mode")
    wants_html = "text/html" in headers.get("accept", "")
    return wants_html and mode in {None, "navigate"}


def cookie_in(headers: Mapping[str, str], name: str) -> str:
    """Return the value of a cookie; "" if there is none."""
    try:
        cookies = SimpleCookie(headers.get("cookie", ""))
    except CookieError:
        return ""
    return cookies[name].value if name in cookies else ""


def _query(scope: Scope) -> list[tuple[str, str]]:
    return parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)


def query_tokens(scope: Scope) -> list[str]:
    """Return the values of ``token=`` in the URL."""
    return [value for key, value in _query(scope) if key == "token"]


def clean_url(scope: Scope) -> str:
    """Return the path and query without the token. It is always a path of this server."""
    path = "/" + quote(scope["path"].lstrip("/\\"))
    query = urlencode([(key, value) for key, value in _query(scope) if key != "token"])
    return f"{path}?{query}" if query else path


def client_key(address: str) -> str:
    """Return the key by which a client is counted: its IPv4 address, or its IPv6 network."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ip_network((found, NETWORK_BITS), strict=False))
