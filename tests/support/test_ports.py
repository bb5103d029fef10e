"""Fixed ports of test servers."""

from __future__ import annotations

import socket

from tests.support import ports
from tests.support.ports import fixed_port


def test_a_fixed_port_is_outside_the_range_of_the_kernel() -> None:
    first = int(ports.EPHEMERAL.read_text(encoding="ascii").split()[0])

    for _ in range(50):
        assert 1024 <= fixed_port() < first
    with socket.socket() as client:
        client.bind(("127.0.0.1", 0))
        assert client.getsockname()[1] >= first


def test_a_port_in_use_is_skipped() -> None:
    # GIVEN two ports to choose from, one of which is in use
    first = int(ports.EPHEMERAL.read_text(encoding="ascii").split()[0])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first - 1))

        found = {fixed_port(num_ports=2) for _ in range(20)}

    assert found == {first - 2}
