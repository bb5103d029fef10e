from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.http_client import request_once
from tests.support.collector.talking_server import speaking, trickle

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

LONG_S = 60.0


def answer_of(port: int, *, timeout_s: float, scheme: str = "http") -> bytes:
    url = f"{scheme}://localhost:{port}/path"
    return request_once("POST", url, timeout_s=timeout_s, body=b"x", headers={"a": "b"}).body


@pytest.mark.parametrize(
    ("head", "body"),
    [(b"content-length: 4", b"body"), (b"connection: close", b"body"),
     (b"transfer-encoding: chunked", b"4\r\nbody\r\n0\r\n\r\n")],
    ids=["length", "until the end", "chunks"],
)  # fmt: skip
def test_an_answer_is_read_whole(head: bytes, body: bytes) -> None:
    def talk(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n" + body)

    with speaking(talk) as port:
        assert answer_of(port, timeout_s=LONG_S) == b"body"


def swallow(connection: socket.socket) -> None:
    while connection.recv(65536):
        pass


def flood_of_continues(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")


@pytest.mark.parametrize(
    "talk",
    [
        swallow,
        trickle(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 1000),
        trickle(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n"),
        trickle(b"HTTP/1.1 200 OK\r\n\r\n" + b"y" * 1000),
        flood_of_continues,
    ],
    ids=["silence", "headers", "body", "body-until-the-end", "continues"],
)
def test_a_server_holds_its_client_until_the_deadline_only(
    talk: Callable[[socket.socket], object],
) -> None:
    with speaking(talk) as port:
        begun_s = time.monotonic()
        with pytest.raises(TimeoutError):
            answer_of(port, timeout_s=0.5)

    assert 0.5 <= time.monotonic() - begun_s < 30  # the headers alone would take 50 s


def test_a_handshake_and_a_connection_have_the_same_deadline() -> None:
    with speaking(trickle(b"\x16\x03\x03\x40\x00" + b"x" * 1000)) as port:
        begun_s = time.monotonic()
        with pytest.raises(OSError, match=r"time|SSL"):
            answer_of(port, timeout_s=0.5, scheme="https")
    assert time.monotonic() - begun_s < 30

    with pytest.raises(TimeoutError):
        answer_of(9, timeout_s=0.0)
