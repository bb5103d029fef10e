"""Browser sessions with the whole application: login, logout and protection."""

from __future__ import annotations

from http.cookies import SimpleCookie
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.http.access import Access, Throttle
from rankscope.collector.http.application import create_server
from rankscope.collector.http.refusals import Refusal, Refusals
from tests.support.collector.asgi import BASE, Client

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.collector.conftest import FakeClock

TOKEN = "correct-horse"
COOKIE = "rankscope_session_8050"
OURS = {"origin": BASE}


def pages(environ: dict[str, str], start_response: Callable[..., object]) -> Iterable[bytes]:
    """Dashboard that shows all runs on every path."""
    start_response("200 OK", [("Content-Type", "text/html")])
    return [f"data of {environ['PATH_INFO']}".encode()]


@pytest.fixture
def refusals() -> Refusals:
    return Refusals()


@pytest.fixture
def access(clock: FakeClock) -> Access:
    return Access(
        port=8050,
        token=TOKEN,
        logins=Throttle(monotonic_ns=clock),
        bearers=Throttle(tries=100, monotonic_ns=clock),
    )


@pytest.fixture
def client(access: Access, refusals: Refusals) -> Client:
    return Client(
        create_server(access, pages=pages, not_ready=lambda: "/secret/folder", refusals=refusals)
    )


def log_in(client: Client, token: str = TOKEN) -> str | None:
    """Log in and return the browser's session."""
    answer = client.post("/login", data={"token": token}, headers=OURS)
    return (
        None
        if answer.status_code != 303
        else SimpleCookie(answer.headers["set-cookie"])[COOKIE].value
    )


def test_a_session_is_never_chosen_by_the_browser(client: Client, access: Access) -> None:
    # GIVEN a cookie that an attacker set, WHEN its victim logs in
    planted = {"cookie": f"{COOKIE}=planted", **OURS}
    answer = client.post("/login", data={"token": TOKEN}, headers=planted)

    # THEN the session is a new one, and the attacker's is invalid
    given = SimpleCookie(answer.headers["set-cookie"])[COOKIE].value
    assert given != "planted"
    assert access.sessions.find(given) is not None
    assert access.sessions.find("planted") is None


def test_a_new_login_ends_the_previous_session(client: Client, access: Access) -> None:
    first = log_in(client)
    second = log_in(client)

    assert first is not None
    assert second is not None
    assert access.sessions.find(first) is None
    assert access.sessions.find(second) is not None


def test_a_stolen_cookie_is_invalid_after_the_logout(client: Client) -> None:
    stolen = {"cookie": f"{COOKIE}={log_in(client)}"}
    thief = Client(client.app)
    assert thief.get("/", headers=stolen).status_code == 200

    answer = client.post("/logout", headers=OURS)

    assert answer.status_code == 303
    assert SimpleCookie(answer.headers["set-cookie"])[COOKIE]["max-age"] == "0"
    assert thief.get("/", headers=stolen).status_code == 401
    assert client.get("/").status_code == 401


def test_a_page_of_another_site_cannot_log_a_user_out(client: Client) -> None:
    log_in(client)

    for headers in ({}, {"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
        assert client.post("/logout", headers=headers).status_code == 403
    assert client.get("/").status_code == 200


def test_the_login_page_offers_the_logout_to_signed_in_users(client: Client) -> None:
    assert "Sign out" not in client.get("/login").text
    log_in(client)
    assert 'action="/logout"' in client.get("/login").text


@pytest.mark.parametrize(("base", "is_secure"), [(BASE, False), ("https://127.0.0.1:8050", True)])
def test_the_cookie_is_http_only_and_secure_under_tls(
    client: Client, base: str, *, is_secure: bool
) -> None:
    by_form = client.post(f"{base}/login", data={"token": TOKEN}, headers={"origin": base})
    by_address = client.get(f"{base}/?token={TOKEN}")

    for answer in (by_form, by_address):
        cookie = SimpleCookie(answer.headers["set-cookie"])[COOKIE]
        assert cookie["httponly"] is True
        assert cookie["samesite"] == "Strict"
        assert cookie["path"] == "/"
        assert not cookie["domain"]
        assert bool(cookie["secure"]) is is_secure


def test_under_tls_a_plain_http_origin_of_the_same_name_is_foreign(client: Client) -> None:
    secure = "https://127.0.0.1:8050"
    headers = {"origin": BASE}

    assert client.post(f"{secure}/login", data={"token": TOKEN}, headers=headers).status_code == 403


def test_many_invalid_logins_wait_after_the_tenth(
    client: Client, clock: FakeClock, refusals: Refusals
) -> None:
    statuses = [
        client.post("/login", data={"token": f"guess {number}"}, headers=OURS).status_code
        for number in range(30)
    ] + [client.get("/", params={"token": f"guess {number}"}).status_code for number in range(20)]

    assert statuses == [401] * 10 + [429] * 40
    answer = client.post("/login", data={"token": "guess 50"}, headers=OURS)
    assert answer.headers["retry-after"] == "60"
    assert refusals.counts == {Refusal.WRONG_LOGIN: 10, Refusal.THROTTLED: 41}
    clock.advance_s(60)
    assert client.post("/login", data={"token": "guess"}, headers=OURS).status_code == 401


def test_invalid_logins_do_not_lock_the_valid_token_out(client: Client) -> None:
    for number in range(20):
        client.post("/login", data={"token": f"guess {number}"}, headers=OURS)

    assert log_in(client) is not None


def test_invalid_tokens_in_a_header_are_throttled_and_a_valid_one_never(client: Client) -> None:
    wrong = [
        client.get("/", headers={"authorization": f"Bearer guess-{number}"}).status_code
        for number in range(103)
    ]

    assert wrong == [401] * 100 + [429] * 3
    assert client.get("/", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
    # Requests without a token are not failures.
    assert client.get("/").status_code == 401


def test_the_reason_for_not_being_ready_is_shown_to_readers_only(client: Client) -> None:
    assert client.get("/readyz").text == "not ready\n"
    assert client.get("/readyz", headers={"authorization": "Bearer wrong"}).text == "not ready\n"
    answer = client.get("/readyz", headers={"authorization": f"Bearer {TOKEN}"})

    assert (answer.status_code, answer.text) == (503, "not ready: /secret/folder\n")
    log_in(client)
    assert "/secret/folder" in client.get("/readyz").text


def test_only_declared_host_names_are_accepted(access: Access) -> None:
    server = create_server(
        access, pages=pages, not_ready=lambda: None, names=frozenset({"scope.example"})
    )
    client = Client(server)
    statuses = {
        host: client.get("/healthz", headers={"host": host}).status_code
        for host in ("scope.example", "SCOPE.example:8443", "evil.example", "127.0.0.1", "", "[")
    }

    assert statuses == {
        "scope.example": 200,
        "SCOPE.example:8443": 200,
        "evil.example": 400,
        "127.0.0.1": 400,
        "": 400,
        "[": 400,
    }
