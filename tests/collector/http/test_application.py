from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fastapi import APIRouter
from starlette.routing import Mount, Route

from rankscope.collector.http.access import Access
from rankscope.collector.http.application import create_app, create_server
from tests.support.collector.asgi import BASE, Client

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

TOKEN = "correct-horse"
OPEN = {"/healthz", "/readyz", "/login"}


def pages(environ: dict[str, str], start_response: Callable[..., object]) -> Iterable[bytes]:
    """A dashboard that shows a run's data on every path."""
    start_response("200 OK", [("Content-Type", "text/html")])
    return [f"data of {environ['PATH_INFO']}".encode()]


def ready() -> str | None:
    return None


@pytest.fixture
def client() -> Client:
    return Client(create_server(Access(port=8050, token=TOKEN), pages=pages, not_ready=ready))


def test_no_route_of_the_application_answers_without_a_token(client: Client) -> None:
    # Walks the application's own map, so that a route added later is tested too.
    app = create_app(Access(port=8050, token=TOKEN), pages=pages, not_ready=ready)
    paths = {route.path for route in app.routes if isinstance(route, Route)}
    mounts = [route for route in app.routes if isinstance(route, Mount)]
    assert paths >= OPEN
    assert len(mounts) == 1

    for path in [*(paths - OPEN), "/", "/_dash-layout", "/runs", "/docs", "/openapi.json"]:
        for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"):
            answer = client.request(method, path)
            assert answer.status_code == 401, f"{method} {path}"
            assert "data" not in answer.text


def test_the_pages_answer_with_the_token(client: Client) -> None:
    answer = client.get("/timeline", headers={"authorization": f"Bearer {TOKEN}"})

    assert answer.text == "data of /timeline"


def test_the_interface_describes_itself_to_readers(client: Client) -> None:
    answer = client.get("/v1/openapi.json", headers={"authorization": f"Bearer {TOKEN}"})

    described = answer.json()["paths"]["/v1/clock"]["post"]["responses"]["200"]
    schema = described["content"]["application/json"]["schema"]
    probed = client.post("/v1/clock", headers={"authorization": f"Bearer {TOKEN}"}).json()
    assert set(probed) == set(schema["required"]) == set(schema["properties"])


def test_who_asks_the_clock_is_told_when_to_ask_again(client: Client) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}

    pauses_ns = [client.post("/v1/clock", headers=headers).json()["pause_ns"] for _ in range(3)]

    # One alone may ask as often as it likes: an agent's own pauses are of 50 ms and more.
    assert all(0 < pause_ns < 50_000_000 for pause_ns in pauses_ns)


def test_further_routes_come_before_the_pages() -> None:
    router = APIRouter()

    @router.get("/v1/colour")
    def colour() -> dict[str, str]:
        return {"colour": "blue"}

    access = Access(port=8050, token=TOKEN)
    server = create_server(access, pages=pages, not_ready=ready, routers=[router])
    answer = Client(server).get("/v1/colour", headers={"authorization": f"Bearer {TOKEN}"})

    assert answer.json() == {"colour": "blue"}


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("TRACE", "/v1/clock", "POST"),
        ("GET", "/v1/clock", "POST"),
        ("BREW", "/healthz", "GET"),
        ("PUT", "/login", "GET, POST"),
        ("GET", "/logout", "POST"),
    ],
)
def test_a_route_takes_its_own_methods_and_no_page_the_others(
    client: Client, method: str, path: str, allow: str
) -> None:
    answer = client.request(method, path, headers={"authorization": f"Bearer {TOKEN}"})

    assert (answer.status_code, answer.headers["allow"]) == (405, allow)
    assert "data" not in answer.text


def test_the_pages_take_any_method_where_no_route_is(client: Client) -> None:
    for path in ("/", "/timeline", "/v1/nothing"):
        answer = client.post(path, headers={"authorization": f"Bearer {TOKEN}"})
        assert answer.text == f"data of {path}"


def test_no_page_describes_the_interface(client: Client) -> None:
    # With the token, these fall through to the dashboard instead of FastAPI's own pages.
    for path in ("/docs", "/redoc", "/openapi.json"):
        answer = client.get(path, headers={"authorization": f"Bearer {TOKEN}"})
        assert answer.text == f"data of {path}"


def test_health_and_readiness_are_two_questions() -> None:
    server = create_server(
        Access(port=8050, token=TOKEN), pages=pages, not_ready=lambda: "the tail of /x stopped"
    )
    client = Client(server)
    assert client.get("/healthz").status_code == 200
    answer = client.get("/readyz")

    assert answer.status_code == 503
    assert "/x" not in answer.text


def test_signing_in_by_the_form_opens_the_page_that_was_asked_for(client: Client) -> None:
    form = client.get("/login", params={"next": "/timeline?run=AR"})
    assert 'value="/timeline?run=AR"' in form.text

    answer = client.post(
        "/login",
        data={"token": f" {TOKEN}\n", "next": "/timeline?run=AR"},
        headers={"origin": BASE},
    )

    assert answer.status_code == 303
    assert answer.headers["location"] == "/timeline?run=AR"
    assert client.get("/timeline?run=AR").text == "data of /timeline"


def test_signing_in_with_a_wrong_token_opens_nothing(client: Client) -> None:
    answer = client.post("/login", data={"token": "wrong", "next": "/"})

    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers
    assert "changes at each start" in answer.text


def test_the_login_page_shows_what_it_was_given_as_text(client: Client) -> None:
    answer = client.get("/login", params={"next": '/"><script>alert(1)</script>'})

    assert "<script>" not in answer.text


def test_an_endless_login_form_is_not_read_to_its_end(client: Client) -> None:
    answer = client.post("/login", content=b"token=" + TOKEN.encode() + b"&x=" + b"a" * 100_000)

    assert answer.status_code == 401
