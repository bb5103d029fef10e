from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import pytest
from starlette.responses import PlainTextResponse

from rankscope.collector.http.access import Access
from rankscope.collector.http.gate import AccessGate, safe_next
from tests.support.collector.asgi import BASE, Client, in_a_loop

if TYPE_CHECKING:
    from httpx import Response

    from rankscope.collector.http.requests import Message, Receive, Scope, Send

TOKEN = "correct-horse"
BROWSER = {"accept": "text/html,application/xhtml+xml", "sec-fetch-mode": "navigate"}


async def everything(scope: Scope, receive: Receive, send: Send) -> None:
    """Application that answers every path, so that only the gate refuses."""
    await PlainTextResponse(f"saw {scope['path']}")(scope, receive, send)


@pytest.fixture
def access() -> Access:
    return Access(port=8050, token=TOKEN)


@pytest.fixture
def client(access: Access) -> Client:
    return Client(AccessGate(everything, access))


def signed_in(client: Client) -> Client:
    client.get("/", params={"token": TOKEN})
    return client


@pytest.mark.parametrize(
    "path", ["/", "/runs", "/_dash-layout", "/unknown/deep", "/docs", "/LOGIN"]
)
def test_a_path_without_credentials_is_refused(client: Client, path: str) -> None:
    answer = client.get(path)

    assert answer.status_code == 401
    assert "saw" not in answer.text


@pytest.mark.parametrize(
    "path",
    [
        "/healthz",
        "/readyz",
        "/login",
        "/_favicon.ico",
        "/assets/app.css",
        "/_dash-component-suites/dash/deps/react.js",
    ],
)
def test_probes_login_and_static_files_need_no_credentials(client: Client, path: str) -> None:
    assert client.get(path).text == f"saw {path}"


def test_static_files_are_read_only(client: Client) -> None:
    assert client.post("/assets/app.css").status_code == 401


def test_a_browser_is_redirected_to_the_login_and_back(client: Client) -> None:
    answer = client.get("/timeline?run=AR&step=3", headers=BROWSER)

    assert answer.status_code == 303
    assert answer.headers["location"] == "/login?next=%2Ftimeline%3Frun%3DAR%26step%3D3"


def test_a_valid_bearer_token_is_accepted(client: Client) -> None:
    assert client.get("/runs", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200


def basic(password: str, *, user: str = "anyone") -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def test_a_clickhouse_client_sends_the_token_as_its_password(client: Client) -> None:
    for headers in (
        {"authorization": basic(TOKEN)},
        {"authorization": basic(TOKEN, user="")},
        {"x-clickhouse-user": "default", "x-clickhouse-key": TOKEN},
    ):
        assert client.get("/runs", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        *(
            {"authorization": value.encode("latin-1")}
            for value in ("Bearer wrong", "Bearer", "Bearer ", f"Basic {TOKEN}", TOKEN, "")
        ),
        {"authorization": "Bearer ünïcode".encode("latin-1")},
        *({"cookie": cookie} for cookie in ("=", "a b;c", 'rankscope_session_8050="', "\x7f")),
        {"cookie": f"rankscope_session_8050={TOKEN}"},
        {"authorization": basic("wrong")},
        {"authorization": basic("")},
        {"authorization": "Basic"},
        {"authorization": "Basic ////"},
        {"authorization": "Basic " + base64.b64encode(TOKEN.encode()).decode()},
        {"authorization": basic("wrong"), "x-clickhouse-key": TOKEN},
        {"x-clickhouse-key": "wrong"},
        {"x-clickhouse-user": TOKEN},
    ],
)
def test_malformed_or_invalid_credentials_are_refused(
    client: Client, headers: dict[str, str | bytes]
) -> None:
    assert client.get("/runs", headers=headers).status_code == 401


def test_a_post_of_another_site_with_a_stored_password_is_refused(client: Client) -> None:
    headers = {"authorization": basic(TOKEN), "origin": "http://evil.example"}

    assert client.post("/", headers=headers).status_code == 403


def test_a_token_in_the_url_opens_a_session_and_is_removed_from_the_url(client: Client) -> None:
    answer = client.get("/timeline", params={"run": "AR", "token": TOKEN, "step": "3"})

    assert answer.status_code == 303
    assert answer.headers["location"] == "/timeline?run=AR&step=3"
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith("rankscope_session_8050=")
    assert cookie.endswith("; Path=/; HttpOnly; SameSite=Strict")
    assert TOKEN not in cookie
    assert client.get("/timeline?run=AR&step=3").status_code == 200


def test_a_token_in_the_url_never_redirects_to_another_host(client: Client) -> None:
    # For "//evil.example/", a redirect to the same path would leave this server.
    answer = client.get(f"{BASE}//evil.example/?token={TOKEN}")

    assert answer.headers["location"] == "/evil.example/"


def test_an_invalid_token_in_the_url_is_refused(client: Client) -> None:
    answer = client.get("/", params={"token": TOKEN + "x"})

    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers


def post(client: Client, **headers: str) -> Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return client.post("/_dash-update-component", headers=named)


def test_a_post_from_our_own_page_is_accepted(client: Client) -> None:
    assert post(signed_in(client), origin=BASE).status_code == 200
    assert post(signed_in(client), sec_fetch_site="same-origin").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "null"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
    ],
)
def test_a_post_with_the_cookie_but_of_foreign_or_unknown_origin_is_forbidden(
    client: Client, headers: dict[str, str]
) -> None:
    assert post(signed_in(client), **headers).status_code == 403


def test_a_post_with_a_bearer_needs_no_origin_but_must_not_have_a_foreign_one(
    client: Client,
) -> None:
    bearer = f"Bearer {TOKEN}"

    assert post(client, authorization=bearer).status_code == 200
    assert post(client, authorization=bearer, origin="http://evil.example").status_code == 403


def test_a_login_sent_by_another_site_is_forbidden(client: Client) -> None:
    answer = client.post("/login", headers={"origin": "http://evil.example"})

    assert answer.status_code == 403


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:8050", "10.0.0.7:8050", "", "[::1", "me@127.0.0.1:8050",
        "127.0.0.1/evil", "127.0.0.1:80x", "127.0.0.1:-1", "localhost.", "127.0.0.1, evil.example",
    ],
)  # fmt: skip
def test_a_rebound_host_name_is_refused_even_with_a_token(client: Client, host: str) -> None:
    answer = client.get("/", headers={"host": host, "authorization": f"Bearer {TOKEN}"})

    assert answer.status_code == 400


@pytest.mark.parametrize("host", ["localhost:8050", "127.0.0.1", "[::1]:8050", "LocalHost:9000"])
def test_loopback_names_are_accepted_on_any_port(client: Client, host: str) -> None:
    # An ssh tunnel changes the port.
    assert client.get("/healthz", headers={"host": host}).status_code == 200


def test_web_sockets_are_refused(access: Access) -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    async def connect() -> None:
        await AccessGate(everything, access)({"type": "websocket"}, receive, send)

    in_a_loop(connect())

    assert [message["type"] for message in sent] == ["websocket.close"]


def test_every_answer_has_the_security_headers(client: Client) -> None:
    for path in ("/healthz", "/", "/assets/app.js"):
        headers = client.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"
    assert client.get("/").headers["cache-control"] == "no-store"


def test_the_login_page_forbids_scripts_even_if_pages_allow_them(access: Access) -> None:
    client = Client(AccessGate(everything, access, policy="script-src 'self'"))

    assert client.get("/").headers["content-security-policy"] == "script-src 'self'"
    assert "script-src" not in client.get("/login").headers["content-security-policy"]
    assert "form-action 'self'" in client.get("/login").headers["content-security-policy"]


def test_own_tokens_are_random_and_not_in_their_repr() -> None:
    first, second = Access(port=1), Access(port=1)
    assert first.token != second.token
    assert len(first.token) >= 43  # 32 random bytes in base64
    assert TOKEN not in repr(Access(port=1, token=TOKEN))


@pytest.mark.parametrize(
    ("url", "safe"),
    [
        ("/timeline?run=AR", "/timeline?run=AR"),
        ("//evil.example/", "/"),
        ("/\\evil.example/", "/"),
        ("https://evil.example/", "/"),
        ("javascript:alert(1)", "/"),
        ("/\r\nset-cookie: a=b", "/"),
        ("", "/"),
    ],
)
def test_the_login_redirects_to_paths_of_this_server_only(url: str, safe: str) -> None:
    assert safe_next(url) == safe
