"""The link, with servers that answer wrongly or not at all."""

from __future__ import annotations

import threading
import time
import tracemalloc
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from urllib3.connection import HTTPConnection

from rankscope.collector.agent.errors import AgentConfigError, LinkError, RetryLaterError
from rankscope.collector.agent.link import Deadlines, Link
from rankscope.collector.http_client import MAX_ANSWER_BYTES
from tests.support.collector.fake_collector import FakeCollector, Reply
from tests.support.collector.talking_server import speaking, trickle
from tests.support.ports import fixed_port
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.slow

QUICK = Deadlines(connect_s=30, stall_s=0.3, answer_s=0.3)
"""Deadlines for tests that wait until they pass."""

LONG = Deadlines(connect_s=60, stall_s=60, answer_s=60)
TOKEN = {"RANKSCOPE_TOKEN": "test-token"}
MEBIBYTE = bytes(1 << 20)


@contextmanager
def link_to(port: int, *, deadlines: Deadlines = LONG) -> Iterator[Link]:
    url = f"http://localhost:{port}"
    link = Link([url], agent="host/1", environment=TOKEN, deadlines=deadlines)
    try:
        yield link
    finally:
        link.close()


def swallow(connection: socket.socket) -> None:
    while connection.recv(65536):
        pass


def flood(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 10000000000\r\n\r\n")
    while True:
        connection.sendall(MEBIBYTE)


def test_each_request_has_token_and_agent_name_on_one_connection() -> None:
    received: list[bytes] = []

    def talk(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        received.append(connection.recv(65536))
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    with speaking(talk) as port, link_to(port) as link:
        link.get("/v1/resume")
        link.get("/v1/resume")

    assert b"Authorization: Bearer test-token\r\n" in received[0]
    assert b"X-Rankscope-Agent: host/1\r\n" in received[0]


def test_a_body_of_ten_gigabytes_is_not_read() -> None:
    with speaking(flood) as port, link_to(port) as link:
        tracemalloc.start()
        answer = link.get("/v1/resume")
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()

    assert answer.body == b""
    assert peak_bytes < 16 * MAX_ANSWER_BYTES


def test_a_redirect_is_not_followed() -> None:
    with FakeCollector() as other, FakeCollector() as collector, link_to(collector.port) as link:
        headers = {"location": f"{other.url}/v1/resume"}
        collector.misbehave = lambda _path, _body: Reply(status=307, headers=headers)
        answer = link.get("/v1/resume")

    assert answer.status == 307
    assert other.requests == []


@pytest.mark.parametrize(
    "talk",
    [swallow, trickle(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 1000), trickle(b"x")],
    ids=["silence", "headers-that-never-end", "no-status-line"],
)
def test_an_exchange_without_an_answer_times_out(talk: Callable[[socket.socket], object]) -> None:
    with speaking(talk) as port, link_to(port, deadlines=QUICK) as link:
        begun_s = time.monotonic()
        with pytest.raises(LinkError) as caught:
            link.post("/v1/spans", bytes(10_000), content_type="x")

    assert caught.value.is_late
    assert time.monotonic() - begun_s < 30  # the headers alone would take 50 s


@pytest.mark.parametrize(
    "answer",
    [b"", b"\0\0\0\0\r\n\r\n", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 abc\r\n\r\n"],
    ids=["nothing", "zeros", "another-protocol", "no-status"],
)
def test_an_answer_that_is_not_http_is_a_link_error(answer: bytes) -> None:
    def talk(connection: socket.socket) -> None:
        connection.sendall(answer)

    with speaking(talk) as port, link_to(port) as link, pytest.raises(LinkError):
        link.get("/v1/resume")


def test_a_connection_closed_while_idle_is_no_error() -> None:
    with FakeCollector() as collector, link_to(collector.port) as link:

        def close_after(_path: str, _body: bytes) -> Reply:
            return Reply(status=200, headers={"connection": "close", "keep-alive": "timeout=0"})

        collector.misbehave = close_after
        assert [link.get("/v1/resume").status for _ in range(3)] == [200, 200, 200]


def test_each_timeout_doubles_the_next_until_an_answer_is_in_time() -> None:
    # GIVEN a collector that always takes longer than the first deadline
    has_timed_out = threading.Event()

    def talk(connection: socket.socket) -> None:
        has_timed_out.wait(LONG.answer_s)
        time.sleep(0.5)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")

    with speaking(talk) as port, link_to(port, deadlines=QUICK) as link:
        # WHEN requests are repeated, with deadlines of 0.3, 0.6, 1.2 ... seconds
        with pytest.raises(LinkError, match="no answer in time"):
            link.get("/")
        has_timed_out.set()
        statuses = [status_of(link)]
        while len(statuses) < 8 and statuses[-1] is None:
            statuses.append(status_of(link))

    # THEN an answer is in time
    assert statuses[-1] == 200


def status_of(link: Link) -> int | None:
    try:
        return link.get("/").status
    except LinkError:
        return None


def test_the_next_address_is_used_after_a_failure() -> None:
    dead_port = fixed_port()
    with FakeCollector() as collector:
        urls = [f"http://localhost:{dead_port}", collector.url]
        link = Link(urls, agent="host/1", environment=TOKEN, deadlines=LONG)
        with pytest.raises(LinkError):
            link.get("/v1/resume?run_id=x")
        assert link.get("/v1/resume?run_id=x").status == 200
        link.close()


def test_the_next_address_is_used_after_a_server_error() -> None:
    with FakeCollector() as full, FakeCollector() as other:
        full.misbehave = lambda _path, _body: Reply(status=503)
        link = Link([full.url, other.url], agent="host/1", environment=TOKEN, deadlines=LONG)
        statuses = [link.get("/v1/resume?run_id=run").status for _ in range(3)]
        link.close()

    assert statuses == [503, 200, 200]


def test_closing_a_link_ends_the_request_in_progress() -> None:
    with speaking(swallow) as port:
        link = Link([f"http://localhost:{port}"], agent="h/1", environment=TOKEN, deadlines=LONG)
        found: list[BaseException] = []

        def wait() -> None:
            try:
                link.get("/")
            except RetryLaterError as error:
                found.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        (client,) = link._clients
        wait_until(lambda: client._connection is not None and client._connection.sock is not None)
        link.close()
        waiter.join(30)

        assert not waiter.is_alive()
    assert len(found) == 1
    with pytest.raises(RetryLaterError, match="stopping"):
        link.get("/")


def test_a_link_closed_while_it_connects_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeCollector() as collector, link_to(collector.port) as link:
        connect = HTTPConnection.connect

        def connect_late(connection: HTTPConnection) -> None:
            link.close()
            connect(connection)

        monkeypatch.setattr(HTTPConnection, "connect", connect_late)
        with pytest.raises(RetryLaterError, match="stopping"):
            link.get("/v1/resume?run_id=x")

    assert collector.requests == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://collector.example:8050", "plain text"),
        ("ftp://collector.example", "https://HOST"),
        ("collector.example", "https://HOST"),
        ("https://user:secret@collector.example", "RANKSCOPE_TOKEN_FILE"),
        ("https://collector.example:x", "not a number"),
    ],
)
def test_an_unusable_address_is_an_error_at_the_start(url: str, message: str) -> None:
    with pytest.raises(AgentConfigError, match=message) as caught:
        Link([url], agent="host/1", environment=TOKEN)
    assert "secret" not in str(caught.value)
