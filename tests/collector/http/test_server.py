from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.http.access import Access
from rankscope.collector.http.application import create_server
from rankscope.collector.http.limits import ConnectionLimits, fit_connections
from rankscope.collector.http.refusals import Refusal, Refusals
from rankscope.collector.http.requests import client_key, note_proof
from rankscope.collector.http.server import Acceptor
from tests.support.collector.running_server import (
    GENEROUS,
    TIMEOUT_S,
    Clients,
    answer_on,
    echo,
    read_to_end,
    running,
)
from tests.support.collector.serving import no_pages
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from rankscope.collector.http.requests import Receive, Scope, Send

REQUEST = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"


async def proving(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer as `echo` does; a request with a valid credential is for ``/proven``."""
    if scope["type"] == "http" and scope["path"] == "/proven":
        note_proof(scope)
    await echo(scope, receive, send)


def prove(connection: socket.socket) -> None:
    connection.sendall(b"GET /proven HTTP/1.1\r\nhost: a\r\n\r\n")
    assert answer_on(connection) == b"0"


def test_an_idle_connection_gives_way_to_a_new_one_of_its_address() -> None:
    limits = replace(GENEROUS, max_connections_per_address=3)
    with running(proving, limits=limits) as server:
        proven = server.connect(source="127.0.0.2")
        prove(proven)
        idle = [server.connect(source="127.0.0.2") for _ in range(2)]
        wait_until(lambda: server.server.num_connections == 3)

        # The fourth is answered, and takes the place of the older idle one.
        assert server.get(source="127.0.0.2").endswith(b"0")
        assert read_to_end(idle[0]) == b""
        assert server.refusals.counts == {Refusal.TOO_MANY_FROM_ADDRESS: 1}
        # The others keep theirs.
        for client in (proven, idle[1]):
            client.sendall(REQUEST)
            assert answer_on(client) == b"0"
        for client in (proven, *idle):
            client.close()
        wait_until(lambda: server.server.num_connections == 0)


def test_idle_connections_of_many_addresses_keep_no_client_out() -> None:
    with running(proving, limits=replace(GENEROUS, max_connections=4)) as server:
        proven = server.connect(source="127.0.0.9")
        prove(proven)
        idle = [server.connect(source=f"127.0.1.{1 + number}") for number in range(50)]
        wait_until(lambda: server.refusals.counts[Refusal.TOO_MANY_CONNECTIONS] == 47)
        assert server.server.num_connections == 4

        assert server.get(source="127.0.0.3").endswith(b"0")
        prove(proven)
        for client in (proven, *idle):
            client.close()
        wait_until(lambda: server.server.num_connections == 0)


def test_connections_with_a_credential_keep_their_places() -> None:
    with running(proving, limits=replace(GENEROUS, max_connections=4)) as server:
        held = [server.connect(source=f"127.0.0.{2 + number}") for number in range(4)]
        for client in held:
            prove(client)

        for number in range(50):
            with server.connect(source=f"127.0.1.{1 + number}") as late:
                assert read_to_end(late) == b""
        assert server.refusals.counts == {Refusal.TOO_MANY_CONNECTIONS: 50}
        for client in held:
            prove(client)
            client.close()
        wait_until(lambda: server.server.num_connections == 0)
        assert server.get().endswith(b"0")


def test_a_valid_token_keeps_the_place_of_its_connection() -> None:
    app = create_server(Access(port=8050, token="own"), pages=no_pages, not_ready=lambda: None)
    request = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer %s\r\n\r\n"
    with running(app, limits=replace(GENEROUS, max_connections=2)) as server:
        connections = [server.connect() for _ in range(2)]
        for connection, token in zip(connections, (b"own", b"guess"), strict=True):
            connection.sendall(request % token)
            answer_on(connection)

        with server.connect() as late:
            assert read_to_end(connections[1]) == b""  # although it was used last
            connections[0].sendall(request % b"own")
            answer_on(connections[0])
        for connection in (*connections, late):
            connection.close()


class Accepted(asyncio.Protocol):
    """Connection that reports an option of its socket."""

    def __init__(self) -> None:
        self.is_delayed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        option = transport.get_extra_info("socket").getsockopt(
            socket.IPPROTO_TCP, socket.TCP_NODELAY
        )
        self.is_delayed.set_result(not option)


async def is_answer_delayed() -> bool:
    """Return whether the second piece of an answer waits for the ACK of the first (Nagle)."""
    accepted = Accepted()
    with socket.create_server(("127.0.0.1", 0)) as bound:
        acceptor = Acceptor(
            bound,
            make_protocol=lambda *_: accepted,
            tls=None,
            limits=GENEROUS,
            refusals=Refusals(),
        )
        accepting = asyncio.get_running_loop().create_task(acceptor.run())
        _, client = await asyncio.open_connection(*bound.getsockname())
        found = await accepted.is_delayed
        client.close()
        accepting.cancel()
    return found


def test_answers_are_sent_without_delay_for_acknowledgements() -> None:
    assert asyncio.run(is_answer_delayed()) is False


FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
from tests.support.collector.running_server import (LARGE, running)
with running(limits=LARGE) as server:
    print(server.port, flush=True)
    sys.stdin.readline()
    print(*server.refusals.counts, flush=True)
"""


@pytest.mark.multiproc
def test_a_server_without_open_files_left_recovers() -> None:
    # GIVEN a process that may open 60 files, with limits that allow more connections
    with subprocess.Popen(
        [sys.executable, "-c", FEW_FILES],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        client = Clients(port)
        # WHEN 200 clients connect at once
        held = [client.connect() for _ in range(200)]
        held[0].sendall(REQUEST)
        assert answer_on(held[0]) == b"0"
        # THEN the next is answered once they have disconnected
        for connection in held:
            connection.close()
        assert client.get().endswith(b"0")
        refused, err = process.communicate("\n", timeout=TIMEOUT_S)
    assert refused.split() == [Refusal.NO_FILES_LEFT]
    assert process.returncode == 0
    assert err == ""


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


@pytest.mark.parametrize("name", ["header_s", "max_connections", "min_body_bytes_per_s"])
def test_a_limit_of_zero_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"ConnectionLimits.{name} must be above 0"):
        ConnectionLimits(**{name: 0})
