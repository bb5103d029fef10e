from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from a2wsgi import WSGIMiddleware
from fastapi import APIRouter, FastAPI
from starlette.requests import Request

from rankscope.collector.http.access import Access
from rankscope.collector.http.application import (
    DEFAULT_MAX_BYTES,
    BodyLimit,
    create_server,
    deletion_router,
)
from rankscope.collector.http.gate import GRANT_KEY
from rankscope.collector.http.refusals import Refusal, Refusals
from rankscope.collector.http.tokens import FULL_GRANT, Grant, Role
from rankscope.collector.retention.deletion import Deletions
from tests.collector.http.test_login import pages
from tests.support.collector.asgi import BASE, Client
from tests.support.collector.running_server import answer_on, echo, read_to_end, running

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from rankscope.collector.http.requests import AsgiApp, Receive, Scope, Send
    from rankscope.collector.store.store import Store
    from tests.support.collector.running_server import Running


TOKEN = "correct-horse"


def ready() -> str | None:
    return None


@pytest.fixture
def client() -> Client:
    return Client(create_server(Access(port=8050, token=TOKEN), pages=pages, not_ready=ready))


def test_openapi_is_served_to_readers(client: Client) -> None:
    answer = client.get("/v1/openapi.json", headers={"authorization": f"Bearer {TOKEN}"})

    described = answer.json()["paths"]["/v1/clock"]["post"]["responses"]["200"]
    schema = described["content"]["application/json"]["schema"]
    probed = client.post("/v1/clock", headers={"authorization": f"Bearer {TOKEN}"}).json()
    assert set(probed) == set(schema["required"]) == set(schema["properties"])


def test_the_clock_answers_with_the_pause_until_the_next_probe(client: Client) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}

    pauses_ns = [client.post("/v1/clock", headers=headers).json()["pause_ns"] for _ in range(3)]

    # A single client may probe without a pause: agents pause for 50 ms or more themselves.
    assert all(0 < pause_ns < 50_000_000 for pause_ns in pauses_ns)


def test_further_routes_are_matched_before_the_pages() -> None:
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
def test_a_wrong_method_of_a_route_is_405_and_reaches_no_page(
    client: Client, method: str, path: str, allow: str
) -> None:
    answer = client.request(method, path, headers={"authorization": f"Bearer {TOKEN}"})

    assert (answer.status_code, answer.headers["allow"]) == (405, allow)
    assert "data" not in answer.text


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_the_pages_answer_on_other_paths_with_the_token(client: Client, method: str) -> None:
    # Among them those on which FastAPI has pages of its own.
    for path in ("/", "/timeline", "/v1/nothing", "/docs", "/redoc", "/openapi.json"):
        answer = client.request(method, path, headers={"authorization": f"Bearer {TOKEN}"})
        assert answer.text == f"data of {path}"


def test_pages_are_compressed_for_a_client_that_accepts_it(client: Client) -> None:
    headers = {"authorization": f"Bearer {TOKEN}", "accept-encoding": "gzip"}
    packed = client.get("/timeline", headers=headers)
    plain = client.get("/timeline", headers={**headers, "accept-encoding": "identity"})

    assert packed.headers["content-encoding"] == "gzip"
    assert packed.headers["vary"] == "Accept-Encoding"
    assert "content-encoding" not in plain.headers
    assert packed.text == plain.text == "data of /timeline"


def test_health_and_readiness_are_separate() -> None:
    server = create_server(
        Access(port=8050, token=TOKEN), pages=pages, not_ready=lambda: "the tail of /x stopped"
    )
    client = Client(server)
    assert client.get("/healthz").status_code == 200
    answer = client.get("/readyz")

    assert answer.status_code == 503
    assert "/x" not in answer.text


def test_login_by_the_form_redirects_to_the_requested_page(client: Client) -> None:
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


def test_login_with_an_invalid_token_fails(client: Client) -> None:
    answer = client.post("/login", data={"token": "wrong", "next": "/"})

    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers
    assert "changes at each start" in answer.text


def test_the_login_page_escapes_its_parameters(client: Client) -> None:
    answer = client.get("/login", params={"next": '/"><script>alert(1)</script>'})

    assert "<script>" not in answer.text


def test_an_endless_login_form_is_not_read_to_the_end(client: Client) -> None:
    answer = client.post("/login", content=b"token=" + TOKEN.encode() + b"&x=" + b"a" * 100_000)

    assert answer.status_code == 401


CAPS = {"/wide": 3 * DEFAULT_MAX_BYTES}
POST = b"POST / HTTP/1.1\r\nhost: a\r\n"


@pytest.fixture
def refusals() -> Refusals:
    return Refusals()


@pytest.fixture
def server(refusals: Refusals) -> Iterator[Running]:
    with running(BodyLimit(echo, refusals, max_bytes=CAPS)) as served:
        yield served


def test_a_body_of_the_limit_is_accepted_and_one_byte_more_is_413(
    server: Running, refusals: Refusals
) -> None:
    for path, cap in ((b"/", DEFAULT_MAX_BYTES), (b"/wide/x", 3 * DEFAULT_MAX_BYTES)):
        for num_bytes, status in ((cap, b"200"), (cap + 1, b"413")):
            with server.connect() as connection:
                head = b"POST %b HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n"
                connection.sendall(head % (path, num_bytes) + b"x" * num_bytes)
                first = connection.recv(12)
                assert first == b"HTTP/1.1 " + status
    assert refusals.counts == {Refusal.BODY_TOO_LARGE: 2}


@pytest.mark.parametrize("declared", [b"1099511627776", b"9" * 4000])
def test_a_huge_content_length_is_refused_before_the_body_is_read(
    server: Running, declared: bytes
) -> None:
    with server.connect() as connection:
        connection.sendall(POST + b"content-length: " + declared + b"\r\n\r\n")

        assert connection.recv(4096)[:10] == b"HTTP/1.1 4"


def test_an_endless_chunked_body_is_refused_at_the_limit(
    server: Running, refusals: Refusals
) -> None:
    with server.connect() as connection:
        connection.sendall(POST + b"transfer-encoding: chunked\r\n\r\n")
        # The answer is complete although the body never ends; then the connection ends.
        with pouring(connection):
            answer = read_to_end(connection)

    assert answer.startswith(b"HTTP/1.1 413")
    assert answer.endswith(b"too long\n")
    assert refusals.counts == {Refusal.BODY_TOO_LARGE: 1}


def test_two_lengths_or_a_length_and_chunks_are_refused(server: Running) -> None:
    for lengths in (
        b"content-length: 3\r\ncontent-length: 5\r\n",
        b"content-length: -1\r\n",
        b"content-length: 0x10\r\n",
        b"content-length: 3\r\ntransfer-encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n",
    ):
        with server.connect() as connection:
            # The rest would be the next request for a proxy that uses the length.
            connection.sendall(POST + lengths + b"\r\n0\r\n\r\nGET / HTTP/1.1\r\nhost: a\r\n\r\n")
            answer = read_to_end(connection)
            assert answer.startswith(b"HTTP/1.1 400")
            assert answer.count(b"HTTP/1.1") == 1


def test_a_disconnect_within_a_body_is_not_an_error(
    refusals: Refusals, caplog: pytest.LogCaptureFixture
) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def reader(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        try:
            await Request(scope, receive, send).body()
        finally:
            ended.set()

    with running(BodyLimit(reader, refusals)) as server:
        with server.connect() as connection:
            connection.sendall(POST + b"content-length: 9000\r\n\r\nab")
            assert begun.wait(60)
        assert ended.wait(60)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_page_whose_body_is_too_long_ends_and_the_next_request_is_answered(
    refusals: Refusals,
) -> None:
    def page(environ: dict[str, Any], start_response: Callable[..., object]) -> list[bytes]:
        body = environ["wsgi.input"].read()
        start_response("200 OK", [("content-length", str(len(str(len(body)))))])
        return [str(len(body)).encode()]

    application: Any = page  # a2wsgi declares its own type for environments
    pages: Any = WSGIMiddleware(application, workers=1)
    with running(BodyLimit(pages, refusals)) as server:
        with server.connect() as connection:
            connection.sendall(POST + b"transfer-encoding: chunked\r\n\r\n")
            with pouring(connection):
                assert read_to_end(connection).startswith(b"HTTP/1.1 413")
        with server.connect() as connection:
            connection.sendall(POST + b"content-length: 3\r\n\r\nabc")
            assert answer_on(connection) == b"3"


@contextmanager
def pouring(connection: socket.socket) -> Iterator[None]:
    """Send pieces of 64 KiB beside the block, until it or the connection ends."""
    ended = threading.Event()

    def pour() -> None:
        with suppress(OSError):
            while not ended.is_set():
                connection.sendall(b"10000\r\n" + b"x" * 2**16 + b"\r\n")

    sender = threading.Thread(target=pour)
    sender.start()
    yield
    ended.set()
    sender.join()


def client_of(store: Store, *, grant: Grant = FULL_GRANT) -> Client:
    """Return a client that the gate has accepted with this grant."""
    app = FastAPI()
    app.include_router(deletion_router(store, Deletions(store)))

    async def granted(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, GRANT_KEY: grant}, receive, send)

    gate: AsgiApp = granted
    return Client(gate)


@pytest.mark.parametrize(
    ("num_descriptions", "num_rows"), [(1, {"runs": 1, "spans": 2}), (0, {"spans": 2})]
)
def test_a_run_is_deleted_and_its_rows_are_counted(
    store: Store, run_id: str, num_descriptions: int, num_rows: dict[str, int]
) -> None:
    store.insert_rows("runs", [{"run_id": run_id}] * num_descriptions)
    store.insert_rows("spans", [{"run_id": run_id, "row": 0}, {"run_id": run_id, "row": 1}])

    answer = client_of(store).request("DELETE", f"/v1/runs?run_id={run_id}")

    assert answer.status_code == 200
    document = answer.json()
    assert (document["schema"], document["run"]) == (1, run_id)
    assert document["num_rows"] == num_rows
    assert Deletions(store).deleted_ns(run_id) == document["at_ns"]


def test_deleting_a_run_again_is_not_an_error(store: Store, run_id: str) -> None:
    store.insert_rows("runs", [{"run_id": run_id}])
    client = client_of(store)
    first = client.request("DELETE", f"/v1/runs?run_id={run_id}").json()

    again = client.request("DELETE", f"/v1/runs?run_id={run_id}")

    assert again.status_code == 200
    assert again.json() == {**first, "num_rows": {}}


@pytest.mark.parametrize(
    ("query", "status"),
    [("run_id=unknown", 404), ("run_id=a%20b", 400), ("run_id=", 400), ("", 422)],
)
def test_an_unknown_or_invalid_run_is_refused(store: Store, query: str, status: int) -> None:
    answer = client_of(store).request("DELETE", f"/v1/runs?{query}")

    assert answer.status_code == status


def test_a_token_for_other_runs_deletes_nothing(store: Store, run_id: str) -> None:
    store.insert_rows("runs", [{"run_id": run_id}])
    grant = Grant(role=Role.ADMIN, run_prefix="other-", token_id="t")

    answer = client_of(store, grant=grant).request("DELETE", f"/v1/runs?run_id={run_id}")

    assert answer.status_code == 403
    assert not Deletions(store).is_deleted(run_id)
