"""Browsers signed in by a token of role read, and by a trusted proxy."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.http.access import Access, TrustedProxy
from rankscope.collector.http.application import create_server
from rankscope.collector.http.tokens import Role, TokenFile, edit_tokens, make_token, mark_revoked
from tests.collector.http.test_login import OURS, pages
from tests.support.collector.asgi import Client

if TYPE_CHECKING:
    from pathlib import Path

DELETE = "/v1/runs?run_id=a"


def signed_in(tmp_path: Path, role: Role) -> tuple[Client, int, str]:
    """Return a client after its login with a token, the login's status and the token's id."""
    path = tmp_path / "tokens.json"
    with edit_tokens(path) as records:
        token, record = make_token(
            records, role=role, run_prefix="", holder="ann", days=1, now_ns=time.time_ns()
        )
        records.append(record)
    access = Access(port=8050, tokens=TokenFile(path))
    client = Client(create_server(access, pages=pages, not_ready=lambda: None))
    answer = client.post("/login", data={"token": token}, headers=OURS)
    return client, answer.status_code, record.token_id


@pytest.mark.parametrize("role", [Role.READ, Role.SQL, Role.ADMIN])
def test_a_created_token_opens_a_session_that_reads_until_it_is_revoked(
    tmp_path: Path, role: Role
) -> None:
    client, status, token_id = signed_in(tmp_path, role)

    assert status == 303
    assert client.get("/").text == "data of /"
    assert client.request("DELETE", DELETE, headers=OURS).status_code == 403

    with edit_tokens(tmp_path / "tokens.json") as records:
        records[:] = mark_revoked(records, token_id, now_ns=time.time_ns())
    assert client.get("/").status_code == 401


@pytest.mark.parametrize(
    ("address", "headers", "status"),
    [
        ("10.0.0.7", {"x-forwarded-user": "ann@example.org"}, 200),
        ("10.0.0.8", {"x-forwarded-user": "ann@example.org"}, 401),
        ("10.0.0.7", {}, 401),
        ("10.0.0.7", {"x-forwarded-user": "a\\b c"}, 401),
    ],
    ids=["a signed-in user", "another client", "no user", "no name"],
)
def test_only_the_proxys_own_address_names_a_user_who_may_read(
    address: str, headers: dict[str, str], status: int
) -> None:
    proxy = TrustedProxy(header="x-forwarded-user", addresses=frozenset({"10.0.0.7"}))
    server = create_server(Access(port=8050, proxy=proxy), pages=pages, not_ready=lambda: None)
    without = create_server(Access(port=8050), pages=pages, not_ready=lambda: None)

    client = Client(server, peer=address)
    assert client.get("/", headers=headers).status_code == status
    refused = client.request("DELETE", DELETE, headers={**headers, **OURS}).status_code
    assert refused == (403 if status == 200 else 401)
    assert Client(without, peer=address).get("/", headers=headers).status_code == 401


def test_a_user_named_twice_is_not_signed_in() -> None:
    proxy = TrustedProxy(header="x-forwarded-user", addresses=frozenset({"10.0.0.7"}))
    server = create_server(Access(port=8050, proxy=proxy), pages=pages, not_ready=lambda: None)

    headers = [("X-Forwarded-User", "ann"), ("x-forwarded-user", "eve")]

    assert Client(server, peer="10.0.0.7").get("/", headers=headers).status_code == 401
