from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from rankscope.collector.http.connection import Window
from rankscope.collector.http.refusals import Refusal
from tests.support.collector.running_server import (
    GENEROUS,
    TIMEOUT_S,
    Running,
    answer_on,
    echo,
    read_to_end,
    running,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

POST = b"POST / HTTP/1.1\r\nhost: a\r\n"
QUICK_HEADERS = replace(GENEROUS, header_s=1.0)


def test_a_connection_with_an_endless_header_is_closed() -> None:
    with running(limits=QUICK_HEADERS) as server, server.connect() as slow:
        # WHEN a header arrives byte by byte, each well within the deadline
        slow.sendall(b"GET / HTTP/1.1\r\n")
        ended = threading.Event()
        sender = threading.Thread(target=trickle, args=(slow, b"a: b\r\n", ended))
        sender.start()
        # THEN the connection is closed, and others are answered
        assert read_to_end(slow) == b""
        ended.set()
        sender.join()
        server.wait_for(Refusal.SLOW_HEADER)
        assert server.get().endswith(b"0")


def test_a_connection_without_a_request_is_closed() -> None:
    with running(limits=QUICK_HEADERS) as server, server.connect() as silent:
        assert read_to_end(silent) == b""
        assert server.refusals.counts == {Refusal.SLOW_HEADER: 1}


def test_the_second_header_of_a_connection_has_the_same_deadline() -> None:
    with running(limits=QUICK_HEADERS) as server, server.connect() as client:
        client.sendall(POST + b"content-length: 2\r\n\r\nab")
        assert answer_on(client) == b"2"
        client.sendall(b"GET / HT")

        assert read_to_end(client) == b""
        server.wait_for(Refusal.SLOW_HEADER)


def test_an_idle_connection_between_two_requests_is_not_slow() -> None:
    with running(limits=QUICK_HEADERS) as server, server.connect() as client:
        client.sendall(POST + b"content-length: 2\r\n\r\nab")
        assert answer_on(client) == b"2"
        with server.connect() as silent:  # lasts a whole header deadline
            assert read_to_end(silent) == b""
        client.sendall(POST + b"content-length: 3\r\n\r\nabc")

        assert answer_on(client) == b"3"


@pytest.mark.parametrize(
    "framing", [b"content-length: 1000000\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n"]
)
def test_a_connection_with_a_slow_body_is_closed(framing: bytes) -> None:
    with running(limits=replace(GENEROUS, body_window_s=0.3)) as server, server.connect() as slow:
        slow.sendall(POST + framing)
        ended = threading.Event()
        piece = b"1\r\nx\r\n" if b"chunked" in framing else b"x"
        sender = threading.Thread(target=trickle, args=(slow, piece, ended))
        sender.start()
        assert read_to_end(slow) == b""
        ended.set()
        sender.join()
        server.wait_for(Refusal.SLOW_BODY)


def test_a_client_that_does_not_read_its_answer_is_closed() -> None:
    with running(limits=replace(GENEROUS, reader_window_s=0.3)) as server, server.connect() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(b"GET /large HTTP/1.1\r\nhost: a\r\n\r\n")

        server.wait_for(Refusal.SLOW_READER)
        wait_until(lambda: server.server.num_connections == 0)
        assert len(read_to_end(slow)) < 2**23


def test_a_large_answer_that_is_read_is_complete() -> None:
    with running() as server, server.connect() as client:
        client.sendall(b"GET /large HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")

        assert len(read_to_end(client)) > 2**23


def test_the_rest_of_an_answered_body_is_not_read_forever() -> None:
    with running(limits=replace(GENEROUS, linger_s=0.3)) as server, server.connect() as client:
        client.sendall(b"POST /early HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
        # The answer is sent before the body, and the body never ends.
        assert answer_on(client) == b"0"
        ended = threading.Event()
        sender = threading.Thread(target=trickle, args=(client, b"5\r\nhello\r\n", ended))
        sender.start()
        assert read_to_end(client) == b""
        ended.set()
        sender.join()
        assert not server.refusals.counts


def test_a_large_rest_of_an_answered_body_is_not_read_until_the_next_sweep() -> None:
    """Between two sweeps a fast client could send a gigabyte."""
    limits = replace(GENEROUS, sweep_s=60.0, max_linger_bytes=2**20)
    with running(limits=limits) as server, server.connect() as client:
        client.sendall(b"POST /early HTTP/1.1\r\nhost: a\r\ncontent-length: 9999999999\r\n\r\n")
        assert answer_on(client) == b"0"
        num_sent = 0
        with suppress(BrokenPipeError, ConnectionResetError):
            while num_sent < 2**28:
                num_sent += client.send(bytes(2**16))
        # The buffers of the kernel take some megabytes more than the server reads.
        assert num_sent < 2**26


def test_a_short_rest_of_an_answered_body_leaves_the_connection_open() -> None:
    with running() as server, server.connect() as client:
        client.sendall(b"POST /early HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n\r\nab")
        assert answer_on(client) == b"0"
        client.sendall(b"cd" + POST + b"content-length: 3\r\n\r\nabc")

        assert answer_on(client) == b"3"


@pytest.mark.parametrize(
    "text",
    [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"hello\r\n\r\n", b"GET / HTTP/9\r\n\r\n"],
)
def test_invalid_http_is_refused_and_counted(text: bytes) -> None:
    with running() as server, server.connect() as client:
        client.sendall(text + b"\r\n\r\n")

        assert read_to_end(client).startswith(b"HTTP/1.1 400")
        assert server.refusals.counts == {Refusal.BAD_HTTP: 1}


def test_a_header_of_a_megabyte_is_refused() -> None:
    with running() as server, server.connect() as client:
        sender = threading.Thread(
            target=send_all, args=(client, b"GET / HTTP/1.1\r\na: " + b"b" * 2**20)
        )
        sender.start()
        answer = read_to_end(client)  # a reset may overtake it
        sender.join()

        assert not answer.startswith(b"HTTP/1.1 2")
        server.wait_for(Refusal.BAD_HTTP)


@pytest.mark.parametrize(
    "text",
    [
        b"GET /" + b"a" * 33_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\n" + b"a: b\r\n" * 17_000 + b"\r\n",
    ],
)
def test_a_long_header_is_refused_even_in_one_piece(text: bytes) -> None:
    with running() as server, server.connect() as client:
        sender = threading.Thread(target=send_all, args=(client, text))
        sender.start()
        answer = read_to_end(client)  # a reset may overtake it
        sender.join()

        assert not answer.startswith(b"HTTP/1.1 2")
        server.wait_for(Refusal.BAD_HTTP)


@pytest.mark.alone
def test_300_slow_clients_do_not_slow_down_the_others() -> None:
    ratios: list[float] = []
    with running(limits=replace(GENEROUS, sweep_s=0.05)) as server:
        # Other programs may disturb single rounds, so the best round counts.
        while len(ratios) < 10 and min(ratios, default=2.0) > 1.5:
            # GIVEN the duration of requests without other clients
            wait_until(lambda: server.server.num_connections == 0)
            alone_s = timed(server)
            # WHEN 300 connections have sent half a header and 100 half a body
            slow = [server.connect(source=f"127.0.0.{2 + number % 8}") for number in range(400)]
            for number, client in enumerate(slow):
                half_body = POST + b"content-length: 9000\r\n\r\nab"
                client.sendall(b"GET / HT" if number % 4 else half_body)
            wait_until(lambda: server.server.num_connections == 400)
            beside_s = timed(server)
            for client in slow:
                client.close()
            ratios.append(beside_s / (alone_s + 0.003))

    # THEN requests take as long as before, within noise
    assert min(ratios) <= 1.5


def timed(server: Running) -> float:
    """Return the median duration of an answer in seconds."""
    found = []
    for _ in range(41):
        begin_s = time.perf_counter()
        assert server.get(source="127.0.0.20").endswith(b"0")
        found.append(time.perf_counter() - begin_s)
    return sorted(found)[20]


def trickle(client: socket.socket, piece: bytes, ended: threading.Event) -> None:
    """Send a piece repeatedly until the event is set or the connection is closed."""
    while not ended.wait(0.02):
        try:
            client.sendall(piece)
        except OSError:
            return


def send_all(client: socket.socket, data: bytes) -> None:
    """Send, even if the server does not read it."""
    try:
        client.sendall(data)
    except OSError:
        return


def test_the_test_application_counts_bodies() -> None:
    with running(echo) as server, server.connect() as client:
        client.settimeout(TIMEOUT_S)
        client.sendall(POST + b"content-length: 100000\r\n\r\n" + b"x" * 100_000)

        assert answer_on(client) == b"100000"


def test_a_window_below_the_minimum_is_reported_at_its_end() -> None:
    window = Window(10.0)

    # 10 bytes a second for 10 s are 100 bytes.
    assert not window.is_below(10, 0.0, total=5000, is_due=True)
    assert not window.is_below(10, 9.9, total=5000, is_due=True)
    assert window.is_below(10, 10.0, total=5099, is_due=True)


def test_each_window_counts_alone() -> None:
    window = Window(10.0)
    window.is_below(10, 0.0, total=0, is_due=True)

    assert not window.is_below(10, 10.0, total=1_000_000, is_due=True)
    assert not window.is_below(10, 20.0, total=1_000_100, is_due=True)
    assert window.is_below(10, 30.0, total=1_000_199, is_due=True)


def test_time_in_which_no_bytes_are_due_does_not_count() -> None:
    window = Window(10.0)
    window.is_below(10, 0.0, total=0, is_due=True)
    window.is_below(10, 9.0, total=0, is_due=False)

    assert not window.is_below(10, 11.0, total=0, is_due=True)
    assert not window.is_below(10, 20.9, total=0, is_due=True)
    assert window.is_below(10, 21.0, total=99, is_due=True)
