"""Gateway over HTTP, queried by clickhouse-connect, and with the requests that Grafana sends."""

from __future__ import annotations

import gzip
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import clickhouse_connect
import httpx
import pytest
import uvicorn
from clickhouse_connect.driver.exceptions import DatabaseError

from rankscope.collector.gateway.routes import query_router
from rankscope.collector.http.access import Access
from rankscope.collector.http.application import create_server
from rankscope.collector.http.tokens import Role, TokenFile, TokenRecord, make_token, write_tokens
from tests.collector.gateway.test_native_blocks import NOTE
from tests.support.collector.asgi import in_a_loop
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from clickhouse_connect.driver.client import Client

    from rankscope.collector.gateway.engine import QueryEngine
    from rankscope.collector.http.requests import Message
    from rankscope.collector.store.store import Store

TOKEN = "correct-horse"
TIMEOUT_S = 60.0

SERIES = """
SELECT
    toStartOfInterval(toDateTime(intDiv(at_ns, 1000000000)), INTERVAL 60 second) AS time,
    count() AS n
FROM clock WHERE time >= toDateTime(0) AND time <= toDateTime(100)
GROUP BY time ORDER BY time ASC
"""
"""Time series as Grafana's query builder writes it."""


def pages(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:  # noqa: ANN401 -- WSGI's own
    start_response("200 OK", [("content-type", "text/html")])
    return [b"page " + environ["PATH_INFO"].encode()]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Create a valid token of each role, and one for some runs only."""
    path = tmp_path_factory.mktemp("tokens") / "tokens.json"
    records: list[TokenRecord] = []
    shown = {"path": str(path)}
    for name, role, prefix in (
        ("ingest", Role.INGEST, ""),
        ("read", Role.READ, ""),
        ("sql", Role.SQL, ""),
        ("scoped", Role.SQL, "llama-"),
    ):
        shown[name], record = make_token(
            records, role=role, run_prefix=prefix, holder=name, days=1, now_ns=time.time_ns()
        )
        records.append(record)
    write_tokens(path, records)
    return shown


@pytest.fixture(scope="module")
def url(engine: QueryEngine, tokens: dict[str, str]) -> Iterator[str]:
    from pathlib import Path

    access = Access(port=0, token=TOKEN, tokens=TokenFile(Path(tokens["path"])))
    app = create_server(access, pages=pages, not_ready=lambda: None, routers=[query_router(engine)])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(TIMEOUT_S)


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Client]:
    port = int(url.rpartition(":")[2])
    with clickhouse_connect.get_client(
        host="127.0.0.1", port=port, username="anyone", password=TOKEN
    ) as opened:
        yield opened


def post(url: str, body: str, *, token: str = TOKEN, **query: str) -> httpx.Response:
    return httpx.post(url, params=query, content=body, auth=("any", token), timeout=TIMEOUT_S)


@pytest.mark.slow
def test_the_python_client_reads_rows_frames_and_arrow(client: Client) -> None:
    assert client.query("SELECT host, at_ns FROM clock").result_rows == [("node-1", 1)]
    assert client.query("SELECT number FROM numbers(0)").result_rows == []
    assert client.query_df("SELECT number FROM numbers(3)")["number"].tolist() == [0, 1, 2]
    assert client.query_arrow("SELECT number AS n FROM numbers(3)").to_pydict() == {"n": [0, 1, 2]}
    with client.query_rows_stream("SELECT number FROM numbers(200000)") as rows:
        assert sum(1 for _ in rows) == 200_000
    assert client.command("SELECT count() FROM spans") == 0
    assert client.ping()


def test_the_python_client_binds_parameters(client: Client) -> None:
    bound = {"host": "node-1' OR 1 = 1 --", "hosts": ["node-1", "it's"]}

    assert client.query("SELECT 1 FROM clock WHERE host = {host:String}", bound).result_rows == []
    asked = "SELECT host, {hosts:Array(String)} FROM clock WHERE host IN {hosts:Array(String)}"
    assert client.query(asked, bound).result_rows == [("node-1", ["node-1", "it's"])]


def test_the_python_client_gets_clickhouses_error_for_a_refused_statement(client: Client) -> None:
    with pytest.raises(DatabaseError, match="function url cannot be called here") as caught:
        client.query("SELECT * FROM url('http://127.0.0.1:9/')")
    assert caught.value.code == 497
    with pytest.raises(DatabaseError):
        client.insert("clock", [["x"]], column_names=["host"])
    with pytest.raises(DatabaseError, match="DROP is refused"):
        client.command("DROP TABLE clock")
    with pytest.raises(DatabaseError, match=r"default\.nothing"):
        client.command("SELECT * FROM default.nothing")


def test_grafanas_go_driver_is_answered_in_its_revision(url: str) -> None:
    answer = httpx.post(
        url,
        params={
            "database": "default",
            "default_format": "Native",
            "client_protocol_version": "54460",
            "enable_http_compression": "1",
            "max_execution_time": "60",
        },
        headers={"accept-encoding": "gzip"},
        content="SELECT displayName(), version(), revision(), timezone()",
        auth=("default", TOKEN),
        timeout=TIMEOUT_S,
    )

    assert answer.headers["content-encoding"] == "gzip"
    assert answer.headers["x-clickhouse-format"] == "Native"
    assert answer.content.startswith(NOTE + b"\x04\x01" + b"\x0ddisplayName()\x06String\x00")
    assert b"\x0arevision()\x06UInt32\x00" in answer.content


def test_statements_of_grafanas_editor_are_answered(url: str) -> None:
    for asked in (
        "SHOW DATABASES",
        "SHOW TABLES FROM `default`",
        'DESC TABLE "default"."clock"',
        "SELECT name FROM system.columns WHERE database = 'default' AND table = 'clock'",
        "SELECT name, database, table, type FROM system.columns WHERE database NOT IN ('system')",
        SERIES,
    ):
        answer = post(url, asked, default_format="JSON")
        assert answer.status_code == 200, answer.text
        assert answer.json()["rows"] >= 1


def test_a_get_with_a_query_is_a_statement_and_without_one_the_dashboard(url: str) -> None:
    with httpx.Client(base_url=url, auth=("any", TOKEN), timeout=TIMEOUT_S) as visitor:
        found = visitor.get("/", params={"query": "SELECT 1 FORMAT TSV"})
        assert (found.text, found.headers["content-type"]) == ("1\n", "text/plain; charset=UTF-8")
        assert visitor.get("/").text == "page /"
        assert visitor.get("/run/x", params={"query": "SELECT 1"}).text == "page /run/x"
        assert visitor.get("/ping").text == "Ok.\n"


def test_only_sql_tokens_of_all_runs_may_query(url: str, tokens: dict[str, str]) -> None:
    def status(token: str) -> int:
        return post(url, "SELECT 1", token=token).status_code

    assert status(tokens["sql"]) == 200
    assert [status(tokens[name]) for name in ("ingest", "read", "scoped")] == [403, 403, 403]
    assert [status(text) for text in ("wrong", "", tokens["sql"] + "x")] == [401, 401, 401]
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as outsider:
        assert outsider.post("/", content="SELECT 1").status_code == 401
        asked = {"query": "SELECT 1", "password": TOKEN}
        assert outsider.get("/", params=asked).status_code == 401


@pytest.mark.parametrize(
    ("query", "body", "status", "code"),
    [
        ({}, "SELECT", 400, 62),
        ({}, "SELECT * FROM nothing", 404, 60),
        ({}, "SELECT nothing", 404, 47),
        ({"database": "system"}, "SELECT 1", 404, 81),
        ({"default_format": "Template"}, "SELECT 1", 404, 73),
        ({"max_threads": "99"}, "SELECT 1", 400, 36),
        ({"allow_ddl": "1"}, "SELECT 1", 403, 164),
        ({"compress": "1"}, "SELECT 1", 501, 48),
        ({"password": TOKEN}, "SELECT 1", 400, 36),
        ({}, "SELECT {a:String}", 400, 456),
        ({}, "SELECT '" + "x" * 300_000 + "'", 400, 36),
        ({}, "SELECT throwIf(1)", 403, 497),
    ],
)
def test_an_error_has_clickhouses_code_and_one_line(
    url: str, query: dict[str, str], body: str, status: int, code: int
) -> None:
    answer = post(url, body, **query)

    assert (answer.status_code, answer.headers["x-clickhouse-exception-code"]) == (
        status,
        str(code),
    )
    assert answer.text.startswith(f"Code: {code}. DB::Exception: ")
    assert answer.text.count("\n") == 1


def num_running(store: Store, begin: str) -> int:
    """Return the number of running statements; those that only check begin differently."""
    found = store.rows(
        "SELECT count() AS n FROM system.processes WHERE startsWith(query, {begin:String})",
        {"begin": begin},
    )
    return int(found[0]["n"])


LONG = "SELECT max(sipHash64(number + 4711)) FROM numbers(1000000000000)"


def test_a_statement_ends_if_its_client_disconnects(url: str, store: Store) -> None:
    port = int(url.rpartition(":")[2])
    head = (
        f"POST / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nX-ClickHouse-Key: {TOKEN}\r\n"
        f"Content-Length: {len(LONG)}\r\n\r\n"
    )

    def num_found() -> int:
        return num_running(store, "SELECT max(sipHash64(number + 4711")

    with socket.create_connection(("127.0.0.1", port)) as asker:
        asker.sendall((head + LONG).encode())
        wait_until(lambda: num_found() == 1)
    wait_until(lambda: num_found() == 0, timeout_s=TIMEOUT_S)  # well before its own time limit


def test_a_client_that_disconnects_is_not_an_error(engine: QueryEngine) -> None:
    coming: list[Message] = [
        {"type": "http.request", "body": LONG.encode()},
        {"type": "http.disconnect"},
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        return coming.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": []}
    in_a_loop(query_router(engine)(scope, receive, send))

    assert sent[0]["status"] == 499


def test_an_answer_is_compressed_on_request(url: str) -> None:
    asked = "SELECT repeat('x', 1000) FROM numbers(1000) FORMAT TSV"
    plain = post(url, asked).content
    assert len(plain) == 1_001_000

    with httpx.stream(
        "POST",
        url,
        params={"enable_http_compression": "1"},
        content=asked,
        auth=("any", TOKEN),
        headers={"accept-encoding": "br, gzip;q=0.9"},
        timeout=TIMEOUT_S,
    ) as answer:
        raw = b"".join(answer.iter_raw())
    assert len(raw) < len(plain) / 10
    assert gzip.decompress(raw) == plain
