"""Gateway: statements, and its HTTP as clickhouse-connect and Grafana use it."""

from __future__ import annotations

import asyncio
import gzip
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import clickhouse_connect
import httpx
import pytest
import uvicorn
from clickhouse_connect.driver.exceptions import DatabaseError

from rankscope.collector.gateway import (
    GIB,
    QueryEngine,
    QueryError,
    QueryLimits,
    QueryRequest,
    query_router,
)
from rankscope.collector.http.access import Access
from rankscope.collector.http.application import create_server
from rankscope.collector.http.gate import GRANT_KEY
from rankscope.collector.http.tokens import (
    FULL_GRANT,
    Role,
    TokenFile,
    TokenRecord,
    make_token,
    write_tokens,
)
from rankscope.collector.machine_memory import CGROUP_LIMITS, machine_bytes
from rankscope.collector.store.store import open_store
from tests.collector.http.test_login import pages
from tests.collector.store.test_native_revision import NOTE
from tests.support.collector.asgi import in_a_loop
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from clickhouse_connect.driver.client import Client

    from rankscope.collector.http.requests import Message
    from rankscope.collector.store.store import Store

    Ask = Callable[..., bytes]

TOKEN = "correct-horse"
TIMEOUT_S = 60.0
CANARY = "canary-7f3a"
"""Content of a file next to the store, which no answer may contain."""

LIMITS = QueryLimits(
    max_seconds=60,
    max_rows=1_000,
    max_result_bytes=100_000,
    max_memory_bytes=200_000_000,
    max_running=1,
    max_waiting=1,
)
LONG = "SELECT max(sipHash64(number + 4711)) FROM numbers(1000000000000)"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("store")
    (folder / "secret.txt").write_text(CANARY + "\n")
    with open_store(f"chdb://{folder}") as opened:
        opened.insert_rows("clock", [{"host": "node-1", "boot_id": "b", "at_ns": 1}])
        yield opened


@pytest.fixture(scope="module")
def engine(store: Store) -> Iterator[QueryEngine]:
    assert store.path is not None
    opened = QueryEngine(store.path)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def ask(engine: QueryEngine) -> Ask:
    """Return a function that executes a statement and returns bytes."""
    return lambda text, **parameters: answer(engine, text, parameters=parameters)


def answer(engine: QueryEngine, text: str, **fields: Any) -> bytes:  # noqa: ANN401 -- the request's own
    return bytes(asyncio.run(engine.answer(QueryRequest(text=text, **fields))).view)


def code_of(engine: QueryEngine, text: str, **settings: str) -> int:
    with pytest.raises(QueryError) as caught:
        answer(engine, text, settings=settings)
    assert CANARY not in str(caught.value)
    return caught.value.code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "result"),
    [
        ("select host from default.clock format CSV", b'"node-1"\n'),
        ("SELECT host FROM clock FINAL WHERE at_ns > 0;", b"node-1\n"),
        ("WITH t AS (SELECT host FROM clock) SELECT * FROM t", b"node-1\n"),
        ("(SELECT 1)", b"1\n"),
        ("-- who\nSELECT /* what */ 'a -- b'", b"a -- b\n"),
        ("SELECT 'file(''x'') INTO OUTFILE SETTINGS'", b"file(\\'x\\') INTO OUTFILE SETTINGS\n"),
        ("DESCRIBE TABLE schema_version", b"version\tUInt32\t\t\tNumber of the migration\t\t\n"),
        ("SHOW TABLES LIKE 'clock'", b"clock\n"),
        ("SELECT name FROM system.tables WHERE name = 'spans'", b"spans\n"),
        ("SELECT active FROM system.parts WHERE table = 'clock' AND active", b"1\n"),
    ],
)
def test_a_statement_that_reads_is_answered(ask: Ask, statement: str, result: bytes) -> None:
    assert ask(statement).startswith(result)


def test_bound_values_are_not_changed(ask: Ask) -> None:
    assert ask("SELECT {a:Array(String)}[1]", a="['it\\'s','b']") == b"it\\'s\n"
    assert ask("SELECT {a:String} FORMAT TSVRaw", a="x\\ty '; DROP TABLE clock") == (
        b"x\ty '; DROP TABLE clock\n"
    )


REFUSED = [
    "INSERT INTO clock (host) VALUES ('x')",
    "INSERT INTO FUNCTION file('{written}') SELECT 1",
    "INSERT INTO clock FROM INFILE '{secret}' FORMAT CSV",
    "SELECT 1 INTO OUTFILE '{written}'",
    "select 1 into /* x */ outfile '{written}' format CSV",
    "(SELECT 1) INTO OUTFILE '{written}' APPEND",
    "SHOW TABLES INTO OUTFILE '{written}'",
    "SELECT 1 AS `it's` INTO OUTFILE '{written}' FORMAT CSV",
    "SELECT * FROM sqlite('{written}', 't')",
    "DESCRIBE TABLE sqlite('{written}', 't')",
    "SHOW TABLES WHERE (SELECT count() FROM sqlite('{written}', 't')) > 0",
    "SELECT file('{secret}')",
    "SELECT `file`('{secret}') AS `it's`, 'x' AS `b's`",
    "SELECT * APPLY(file) FROM (SELECT '{secret}')",
    "SELECT * FROM file('{secret}', 'LineAsString')",
    "SELECT * FROM (SELECT * FROM file('{secret}', 'LineAsString') SETTINGS readonly = 0)",
    "SELECT * FROM `{secret}`",
    "DESCRIBE TABLE url('http://127.0.0.1:9/')",
    "SELECT * FROM url('http://127.0.0.1:9/', 'CSV', 'a String')",
    "SELECT * FROM s3('http://127.0.0.1:9/bucket/x', 'CSV', 'a String')",
    "SELECT * FROM remote('127.0.0.1:9', 'system', 'one')",
    "SELECT * FROM iceberg('http://127.0.0.1:9/bucket/x')",
    "SELECT * FROM icebergLocal('{secret}')",
    "SELECT * FROM executable('id', 'TSV', 'a String')",
    "SELECT * FROM mysql('127.0.0.1:9', 'd', 't', 'u', 'p')",
    "SELECT * FROM python(store)",
    "SELECT * FROM eval('SELECT 1')",
    "SELECT * FROM (SELECT 1 SETTINGS max_execution_time = 0)",
    "SELECT 1 SETTINGS readonly = 0",
    "SET readonly = 0",
    "CREATE TABLE x (a UInt8) ENGINE = Memory",
    "CREATE TEMPORARY TABLE x (a UInt8)",
    "ALTER TABLE clock DELETE WHERE 1",
    "DROP TABLE clock",
    "OPTIMIZE TABLE clock FINAL",
    "CHECK TABLE clock",
    "BACKUP TABLE clock TO File('{written}')",
    "KILL QUERY WHERE 1",
    "SYSTEM STOP MERGES",
    "SYSTEM SHUTDOWN",
    "USE system",
    "GRANT ALL ON *.* TO default",
    "EXPLAIN SELECT 1",
    "SELECT 1; SELECT 2",
    "SELECT 1; DROP TABLE clock",
    "SELECT 1 PARALLEL WITH SYSTEM STOP MERGES",
    "SELECT * FROM system.users",
    "",
    "-- nothing",
]


@pytest.mark.parametrize("statement", REFUSED)
def test_nothing_is_written_and_nothing_outside_the_store_is_read(
    engine: QueryEngine, store: Store, tmp_path: Path, statement: str
) -> None:
    assert store.path is not None
    values = {"secret": str(store.path / "secret.txt"), "written": str(tmp_path / "written.csv")}
    tables = store.rows("SHOW TABLES")

    # WHEN a statement would do more than read the store
    code = code_of(engine, statement.format(**values))

    # THEN it is refused, and nothing has changed
    assert code in {164, 497, 62}
    assert list(tmp_path.iterdir()) == []
    assert store.rows("SELECT host FROM clock") == [{"host": "node-1"}]
    assert store.rows("SHOW TABLES") == tables


SEEN_TABLE_FUNCTIONS = """
SQLStandardValues arrowstream azureBlobStorage azureBlobStorageCluster bigquery cluster
clusterAllReplicas cosn deltaLake deltaLakeAzure deltaLakeAzureCluster deltaLakeCluster
deltaLakeLocal deltaLakeS3 deltaLakeS3Cluster dictionary eval executable file fileCluster
filesystem format fuzzJSON fuzzQuery gcs generateRandom generateSeries generate_series hdfs
hdfsCluster hudi hudiCluster iceberg icebergAzure icebergAzureCluster icebergCluster icebergHDFS
icebergHDFSCluster icebergLocal icebergLocalCluster icebergS3 icebergS3Cluster input jdbc loop
merge mergeTreeAnalyzeIndexes mergeTreeAnalyzeIndexesUUID mergeTreeCodecBlockCounts mergeTreeIndex
mergeTreeProjection mergeTreeTextIndex mongodb mysql null numbers numbers_mt odbc oss paimon
paimonAzure paimonAzureCluster paimonCluster paimonHDFS paimonHDFSCluster paimonLocal paimonS3
paimonS3Cluster postgresql primes prometheusQuery prometheusQueryRange python redis remote
remoteSecure s3 s3Cluster sqlite timeSeriesData timeSeriesMetricFamilies timeSeriesMetrics
timeSeriesSamples timeSeriesSelector timeSeriesTags url urlCluster values view viewExplain
viewIfPermitted ytsaurus zeros zeros_mt
"""
"""Table functions of the engine that were tried with ``readonly = 1``: those that read or write
anything else are refused, by the engine or by `REFUSED_WORDS`."""


def test_the_engine_has_no_table_function_that_was_not_tried(ask: Ask) -> None:
    # A new one: try it as in `REFUSED`, and see that it writes and opens nothing.
    found = set(ask("SELECT name FROM system.table_functions").decode().split())

    assert found - set(SEEN_TABLE_FUNCTIONS.split()) == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("SELECT number FROM numbers(1001)", 396),
        ("SELECT repeat('x', 1000000) FROM numbers(1000)", 396),
        ("SELECT length(groupArray(number)) FROM numbers(100000000)", 241),
        ("SELECT number FROM numbers(1000000000) ORDER BY cityHash64(number) FORMAT Null", 241),
        (LONG, 159),
    ],
)
def test_a_statement_that_costs_too_much_is_ended(store: Store, text: str, code: int) -> None:
    assert store.path is not None
    small = QueryEngine(store.path, replace(LIMITS, max_seconds=2) if text is LONG else LIMITS)

    assert code_of(small, text) == code
    assert answer(small, "SELECT 1") == b"1\n"
    small.close()


def test_a_request_may_lower_a_limit_but_not_raise_it(engine: QueryEngine) -> None:
    chosen = LIMITS.settings({"max_result_rows": "10", "max_execution_time": "600.5"})
    assert (chosen["max_result_rows"], chosen["max_execution_time"]) == (10, 60)
    assert LIMITS.settings({"max_memory_usage": "0"})["max_memory_usage"] == 200_000_000
    assert LIMITS.settings({"max_threads": "-9"})["max_threads"] == 2

    assert code_of(engine, "SELECT number FROM numbers(20)", max_result_rows="10") == 396
    limited = answer(engine, "SELECT number FROM numbers(20)", settings={"limit": "2"})
    assert limited == b"0\n1\n"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_result_rows", "1 OR 1"),
        ("max_result_rows", "nan"),
        ("date_time_input_format", "x', readonly = '0"),
        ("output_format_schema", "/etc/x"),
        ("format_template_row", "/etc/passwd"),
        ("custom; DROP", "1"),
        ("dialect", "kusto"),
    ],
)
def test_a_setting_that_is_not_allowed_is_refused(
    engine: QueryEngine, name: str, value: str
) -> None:
    assert code_of(engine, "SELECT 1", **{name: value}) > 0


def test_settings_of_the_transport_have_no_effect() -> None:
    sent = {"session_id": "x", "readonly": "0", "wait_end_of_query": "1", "log_comment": "y"}

    assert LIMITS.settings(sent) == LIMITS.settings({})


def test_too_many_statements_are_refused_and_an_abandoned_one_is_ended(store: Store) -> None:
    assert store.path is not None
    slow = QueryEngine(store.path, replace(LIMITS, max_seconds=120))

    async def crowd() -> list[int]:
        first = asyncio.create_task(slow.answer(QueryRequest(text=LONG)))
        second = asyncio.create_task(slow.answer(QueryRequest(text="SELECT 1")))
        await asyncio.sleep(0)
        with pytest.raises(QueryError) as caught:
            await slow.answer(QueryRequest(text="SELECT 1"))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        return [caught.value.code, len((await second).view)]

    begun = time.monotonic()
    assert asyncio.run(crowd()) == [202, 2]
    # If the first had run to its limit, the second would have waited for it.
    assert time.monotonic() - begun < 120
    slow.close()


STUCK = """
import asyncio, os, sys
import rankscope.collector.gateway as gateway
from rankscope.collector.store.store import open_store

# One block of 65,536 slow rows, which would take about ten minutes.
STUCK = (
    "SELECT sum(damerauLevenshteinDistance(repeat('a', 4000 + number % 2), repeat('b', 4000)))"
    " FROM numbers(65536)"
)
gateway.GRACE_S, gateway.CLOSE_TIMEOUT_S = 1.0, 0.5

def ask(opened, text):
    try:
        return bytes(asyncio.run(opened.answer(gateway.QueryRequest(text=text))).view).decode()
    except gateway.QueryError as error:
        return str(error.code) + "\\n"

with open_store("chdb://" + sys.argv[1]) as store:
    opened = gateway.QueryEngine(store.path, gateway.QueryLimits(max_seconds=1, max_running=1))
    print(ask(opened, "SELECT 1") + ask(opened, STUCK) + ask(opened, "SELECT 2"), end="")
    opened.close()
    print("left", gateway.stuck_threads(), flush=True)
    os._exit(0)
"""


@pytest.mark.slow
def test_a_stuck_statement_is_answered_in_time_and_its_thread_is_left(tmp_path: Path) -> None:
    # WHEN a statement cannot be ended, another waits behind it, and the engine is closed
    ended = subprocess.run(
        [sys.executable, "-c", STUCK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    # THEN the first gets a timeout, the second an error to try again, and close returns in time
    expected = ["1", "159", "202", "left ['statement_0']", ""]
    assert ended.stdout.split("\n") == expected, ended.stderr


@pytest.mark.parametrize("gib", [0.5, 1, 4, 15, 16, 512])
def test_the_limits_fit_the_memory_and_are_at_most_the_usual_ones(gib: float) -> None:
    memory_bytes, most = int(gib * GIB), QueryLimits()
    limits = QueryLimits.fitting(memory_bytes)

    assert limits.max_running * limits.max_memory_bytes <= memory_bytes / 4
    assert limits.max_result_bytes <= memory_bytes / 8
    assert limits.max_memory_bytes <= most.max_memory_bytes
    assert (limits == most) == (gib >= 20)


def test_the_memory_is_that_of_the_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = machine_bytes()
    for controllers, (_, name) in CGROUP_LIMITS.items():
        monkeypatch.setitem(CGROUP_LIMITS, controllers, (tmp_path, name))
        (tmp_path / name).write_text("max\n")
    assert machine_bytes() >= whole

    for _, name in CGROUP_LIMITS.values():
        (tmp_path / name).write_text(f"{whole // 3}\n")
    assert machine_bytes() == whole // 3


def test_rows_that_are_stored_twice_are_read_once(store: Store, ask: Ask) -> None:
    row = {"host": "twice", "device": -1, "at_ns": 1, "name": "cpu-busy-ratio", "value": 0.5}
    for _ in range(2):
        store.insert_rows("samples", [{"run_id": "", **row}])

    assert ask("SELECT count() FROM samples WHERE host = 'twice'") == b"1\n"


SERIES = """
SELECT
    toStartOfInterval(toDateTime(intDiv(at_ns, 1000000000)), INTERVAL 60 second) AS time,
    count() AS n
FROM clock WHERE time >= toDateTime(0) AND time <= toDateTime(100)
GROUP BY time ORDER BY time ASC
"""
"""Time series as Grafana's query builder writes it."""


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
    with pytest.raises(DatabaseError, match="Cannot execute query in readonly mode") as caught:
        client.query("SELECT * FROM url('http://127.0.0.1:9/')")
    assert caught.value.code == 164
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
        assert visitor.get("/").text == "data of /"
        assert visitor.get("/run/x", params={"query": "SELECT 1"}).text == "data of /run/x"
        assert visitor.get("/ping").text == "Ok.\n"


def test_only_the_roles_sql_and_admin_may_query(url: str, tokens: dict[str, str]) -> None:
    def status(token: str) -> int:
        return post(url, "SELECT 1", token=token).status_code

    assert status(tokens["sql"]) == 200
    assert [status(tokens[name]) for name in ("ingest", "scoped", "read")] == [403, 403, 403]
    assert [status(text) for text in ("wrong", "", tokens["sql"] + "x")] == [401, 401, 401]
    reader = ("any", tokens["read"])
    refused = httpx.get(url, params={"query": "SELECT 1"}, auth=reader, timeout=TIMEOUT_S)
    assert refused.status_code == 403
    assert "a token of role sql or admin; this one has role read" in refused.text
    assert httpx.get(url, auth=reader, timeout=TIMEOUT_S).text == "data of /"
    assert httpx.get(url, auth=("any", tokens["sql"]), timeout=TIMEOUT_S).text == "data of /"
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
        ({"default_format": "DataFrame"}, "SELECT 1", 404, 73),
        ({"max_threads": "x"}, "SELECT 1", 400, 36),
        ({"allow_ddl": "1"}, "SELECT 1", 403, 164),
        ({"compress": "1"}, "SELECT 1", 501, 48),
        ({"password": TOKEN}, "SELECT 1", 400, 36),
        ({}, "SELECT {a:String}", 400, 456),
        ({}, "SELECT '" + "x" * 300_000 + "'", 400, 36),
        ({}, "SELECT throwIf(1)", 400, 395),
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


def test_a_statement_ends_if_its_client_disconnects(engine: QueryEngine, store: Store) -> None:
    running = "SELECT query FROM system.processes WHERE startsWith(query, 'SELECT max(sipHash64')"
    coming: list[Message] = [{"type": "http.request", "body": LONG.encode()}]
    sent: list[Message] = []

    async def receive() -> Message:
        if coming:
            return coming.pop()
        await asyncio.to_thread(wait_until, lambda: bool(store.rows(running)))
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": []}
    in_a_loop(query_router(engine)({**scope, GRANT_KEY: FULL_GRANT}, receive, send))

    assert sent[0]["status"] == 499
    assert store.rows(running) == []  # well before its own time limit


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
