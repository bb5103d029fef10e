from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from a2wsgi import WSGIMiddleware
from starlette.requests import Request

from rankscope.collector.http.application import DEFAULT_MAX_BYTES, CappedBodies
from rankscope.collector.http.refusals import Refusal, Refusals
from tests.support.collector.running_edge import LARGE, answer_on, echo, read_to_end, running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rankscope.collector.http.requests import Receive, Scope, Send
    from tests.support.collector.running_edge import Running

CAPS = {"/wide": 3 * DEFAULT_MAX_BYTES}
POST = b"POST / HTTP/1.1\r\nhost: a\r\n"


@pytest.fixture
def refusals() -> Refusals:
    return Refusals()


@pytest.fixture
def server(refusals: Refusals) -> Iterator[Running]:
    with running(CappedBodies(echo, refusals, max_bytes=CAPS), limits=LARGE) as served:
        yield served


def test_a_body_as_long_as_it_may_be_comes_in_and_one_byte_more_does_not(
    server: Running, refusals: Refusals
) -> None:
    for path, cap in ((b"/", DEFAULT_MAX_BYTES), (b"/wide/x", 3 * DEFAULT_MAX_BYTES)):
        for num_bytes, status in ((cap, b"200"), (cap + 1, b"413")):
            with server.connect() as visitor:
                head = b"POST %b HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n"
                visitor.sendall(head % (path, num_bytes) + b"x" * num_bytes)
                first = visitor.recv(12)
                assert first == b"HTTP/1.1 " + status
    assert refusals.counts == {Refusal.BODY_TOO_LARGE: 2}


@pytest.mark.parametrize("declared", [b"1099511627776", b"9" * 4000])
def test_a_length_beyond_all_measure_is_answered_before_the_body_comes(
    server: Running, declared: bytes
) -> None:
    with server.connect() as visitor:
        visitor.sendall(POST + b"content-length: " + declared + b"\r\n\r\n")

        assert visitor.recv(4096)[:10] == b"HTTP/1.1 4"


def test_a_body_in_pieces_without_an_end_is_answered_at_the_cap(
    server: Running, refusals: Refusals
) -> None:
    with server.connect() as visitor:
        visitor.sendall(POST + b"transfer-encoding: chunked\r\n\r\n")
        ended = threading.Event()
        sender = threading.Thread(target=pour, args=(visitor, ended))
        sender.start()
        # The answer is whole although the body never ends, and then the connection does.
        answer = read_to_end(visitor)
        ended.set()
        sender.join()

    assert answer.startswith(b"HTTP/1.1 413")
    assert answer.endswith(b"too long\n")
    assert refusals.counts == {Refusal.BODY_TOO_LARGE: 1}


def test_two_lengths_or_a_length_and_pieces_are_no_http(server: Running) -> None:
    for lies in (
        b"content-length: 3\r\ncontent-length: 5\r\n",
        b"content-length: -1\r\n",
        b"content-length: 0x10\r\n",
        b"content-length: 3\r\ntransfer-encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n",
    ):
        with server.connect() as visitor:
            # What stands behind would be the next request for whoever takes the length.
            visitor.sendall(POST + lies + b"\r\n0\r\n\r\nGET / HTTP/1.1\r\nhost: a\r\n\r\n")
            answer = read_to_end(visitor)
            assert answer.startswith(b"HTTP/1.1 400")
            assert answer.count(b"HTTP/1.1") == 1


def test_who_hangs_up_in_the_middle_of_a_body_is_no_error(
    refusals: Refusals, caplog: pytest.LogCaptureFixture
) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def reader(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        try:
            await Request(scope, receive, send).body()
        finally:
            ended.set()

    with running(CappedBodies(reader, refusals), limits=LARGE) as server:
        with server.connect() as visitor:
            visitor.sendall(POST + b"content-length: 9000\r\n\r\nab")
            assert begun.wait(60)
        assert ended.wait(60)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_page_that_reads_too_long_a_body_ends_and_the_next_is_answered(
    refusals: Refusals,
) -> None:
    def page(environ: dict[str, Any], start_response: Callable[..., object]) -> list[bytes]:
        body = environ["wsgi.input"].read()
        start_response("200 OK", [("content-length", str(len(str(len(body)))))])
        return [str(len(body)).encode()]

    application: Any = page  # a2wsgi types environments as its own dictionaries
    pages: Any = WSGIMiddleware(application, workers=1)
    with running(CappedBodies(pages, refusals), limits=LARGE) as server:
        with server.connect() as visitor:
            visitor.sendall(POST + b"transfer-encoding: chunked\r\n\r\n")
            ended = threading.Event()
            sender = threading.Thread(target=pour, args=(visitor, ended))
            sender.start()
            assert read_to_end(visitor).startswith(b"HTTP/1.1 413")
            ended.set()
            sender.join()
        with server.connect() as visitor:
            visitor.sendall(POST + b"content-length: 3\r\n\r\nabc")
            assert answer_on(visitor) == b"3"


def pour(visitor: Any, ended: threading.Event) -> None:  # noqa: ANN401 -- a socket
    """Send pieces of 64 KiB until cut off."""
    piece = b"10000\r\n" + b"x" * 2**16 + b"\r\n"
    while not ended.is_set():
        try:
            visitor.sendall(piece)
        except OSError:
            return
