from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.http.requests import client_key
from rankscope.collector.http.server import ServerLimits, fit_connections
from tests.support.collector.running_server import answer_on, read_to_end, running
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    import socket

REQUEST = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"


def test_a_connection_beyond_the_limit_gets_503_until_another_ends() -> None:
    with running(limits=ServerLimits(max_connections=3)) as server:
        held = [server.connect() for _ in range(2)]
        wait_until(lambda: server.server.num_connections == 2)
        assert server.get().startswith(b"HTTP/1.1 503")

        held[0].close()
        wait_until(lambda: server.server.num_connections == 1)
        assert server.get().endswith(b"0")
        held[1].sendall(REQUEST)
        assert answer_on(held[1]) == b"0"
        held[1].close()


def test_an_idle_connection_is_closed_after_its_request() -> None:
    with running(limits=ServerLimits(keep_alive_s=1)) as server, server.connect() as client:
        client.sendall(REQUEST * 2)

        assert read_to_end(client).count(b"HTTP/1.1 200") == 2


def test_a_header_of_a_megabyte_is_refused() -> None:
    with running() as server, server.connect() as client:
        sender = threading.Thread(target=send_all, args=(client, b"GET / HTTP/1.1\r\na: "))
        sender.start()
        answer = read_to_end(client)  # a reset may overtake it
        sender.join()

        assert not answer.startswith(b"HTTP/1.1 2")
        assert server.get().endswith(b"0")


def send_all(client: socket.socket, begin: bytes) -> None:
    """Send the begin and a megabyte, even if the server does not read it."""
    try:
        client.sendall(begin + b"b" * 2**20)
    except OSError:
        return


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_a_client_is_counted_by_ipv4_address_or_ipv6_network(address: str, client: str) -> None:
    assert client_key(address) == client


def test_half_of_the_open_files_are_left_to_the_store() -> None:
    import resource

    wanted = 64

    assert fit_connections(wanted) == 64
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 128


def test_a_limit_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ServerLimits\.keep_alive_s must be above 0"):
        ServerLimits(keep_alive_s=0)
