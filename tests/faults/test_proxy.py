"""The proxy with plain sockets: each fault has the effect of its name."""

from __future__ import annotations

import socket
import socketserver
import threading
from typing import TYPE_CHECKING

import pytest

from tests.faults.proxy import FaultProxy, Faults

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

TIMEOUT_S = 60.0


class Echo(socketserver.BaseRequestHandler):
    """A server that echoes."""

    received: bytearray

    def handle(self) -> None:
        while data := self._receive():
            self.received.extend(data)
            self.request.sendall(data)

    def _receive(self) -> bytes:
        try:
            data: bytes = self.request.recv(65536)
        except ConnectionError:
            return b""
        return data


@pytest.fixture
def received() -> bytearray:
    return bytearray()


@pytest.fixture
def proxy(received: bytearray) -> Iterator[FaultProxy]:
    handler = type("OwnEcho", (Echo,), {"received": received})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        with FaultProxy(server.server_address[1]) as started:
            yield started
        server.shutdown()


def connect(proxy: FaultProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=TIMEOUT_S)


def receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        piece = sock.recv(num_bytes - len(found))
        if not piece:
            break
        found += piece
    return found


def read_to_the_end(sock: socket.socket, found: bytearray) -> None:
    while piece := sock.recv(10):
        found += piece


def test_a_cut_network_resets_connections(proxy: FaultProxy) -> None:
    proxy.faults = Faults(is_cut=True)

    with pytest.raises(ConnectionResetError), connect(proxy) as sock:
        sock.recv(1)


def test_a_blackhole_neither_answers_nor_closes_until_it_is_over(proxy: FaultProxy) -> None:
    with connect(proxy) as sock:
        proxy.faults = Faults(is_blackholed=True)
        sock.sendall(b"hello")
        sock.settimeout(0.2)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        proxy.faults = Faults()
        sock.settimeout(TIMEOUT_S)
        assert receive_exactly(sock, 5) == b"hello"


def test_a_lost_answer_reaches_the_server_and_not_the_client(
    proxy: FaultProxy, received: bytearray
) -> None:
    proxy.faults = Faults(reset_after_reply_bytes=3)

    with connect(proxy) as sock:
        sock.sendall(b"hello")
        found = bytearray()
        with pytest.raises(ConnectionResetError):
            read_to_the_end(sock, found)
    assert bytes(received) == b"hello"
    assert b"hello".startswith(found)
    assert len(found) <= 3


def test_lost_packets_arrive_late_and_in_order(proxy: FaultProxy) -> None:
    proxy.faults = Faults(lost_ratio=0.05, slice_bytes=200)

    with connect(proxy) as sock:
        sent = bytes(range(256)) * 40
        sock.sendall(sent)
        assert receive_exactly(sock, len(sent)) == sent

    assert proxy.traffic.num_losses > 0
