from __future__ import annotations

import asyncio
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.collector.errors import TlsError
from rankscope.collector.http.tokens import Role, make_token, write_tokens
from rankscope.errors import BadInputError
from rankscope.server.listen import ListenOptions, open_endpoint
from tests.support.collector.authority import Authority
from tests.support.ports import fixed_port

if TYPE_CHECKING:
    from pathlib import Path

DAY_NS = 86_400 * 10**9
EVERYWHERE = "0.0.0.0"
NUM_PORTS = 20


@pytest.fixture(autouse=True)
def first_port(monkeypatch: pytest.MonkeyPatch) -> int:
    """The first of a range of reserved ports: other programs may use the default ports."""
    first = fixed_port()
    monkeypatch.setattr("rankscope.server.listen.DEFAULT_PORT", first)
    monkeypatch.setattr("rankscope.server.listen.LAST_PORT", first + NUM_PORTS)
    return first


def test_a_requested_port_that_is_in_use_is_refused() -> None:
    with (
        open_endpoint(ListenOptions()) as first,
        pytest.raises(BadInputError, match=f"port {first.port} on 127.0.0.1 is in use"),
        open_endpoint(ListenOptions(port=first.port)),
    ):
        pass


def test_without_a_requested_port_the_next_free_one_is_used_and_logged(
    capsys: pytest.CaptureFixture[str], first_port: int
) -> None:
    with open_endpoint(ListenOptions()) as first:
        assert first.port == first_port
        capsys.readouterr()
        with open_endpoint(ListenOptions(host="localhost")) as second:
            assert second.port > first.port
            line = f"port {first_port} is in use: listening on {second.port}"
            assert line in capsys.readouterr().err
            assert second.url == second.local_url == f"http://127.0.0.1:{second.port}"
            assert second.names == {"localhost", "127.0.0.1", "::1"}
            assert [listener.tls for listener in second.listeners] == [None]


def test_an_answer_does_not_wait_for_the_client_to_confirm_its_header() -> None:
    async def accept(bound: socket.socket) -> int:
        accepted = asyncio.get_running_loop().create_future()
        server = await asyncio.start_server(
            lambda _, writer: accepted.set_result(writer), sock=bound
        )
        with socket.create_connection(bound.getsockname()[:2]):
            writer: asyncio.StreamWriter = await asyncio.wait_for(accepted, 10)
            ended = writer.get_extra_info("socket")
            no_delay: int = ended.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            writer.close()
        server.close()
        return no_delay

    with open_endpoint(ListenOptions()) as endpoint:
        assert asyncio.run(accept(endpoint.listeners[0].bound))


# Beyond loopback


class Files:
    """Certificate and tokens of a server; a test may omit some of them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens = folder / "tokens.json"
        monkeypatch.setenv("RANKSCOPE_TOKENS", str(self.tokens))
        issued = Authority(folder).issue("scope.example", "*.pool.example")
        self.tls: dict[str, Any] = {"tls_cert": issued.cert, "tls_key": issued.key}

    def add_token(self, *, created_ns: int) -> None:
        fields = {"run_prefix": "", "holder": "a", "days": 7}
        record = make_token([], role=Role.READ, now_ns=created_ns, **fields)[1]  # type: ignore[arg-type]
        write_tokens(self.tokens, [record])


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    return Files(tmp_path, monkeypatch)


def refusal(**flags: Any) -> str:  # noqa: ANN401 -- flags of several types
    with pytest.raises((BadInputError, TlsError)) as caught, open_endpoint(ListenOptions(**flags)):
        pass
    return str(caught.value)


@pytest.mark.parametrize("host", [EVERYWHERE, "::", "192.168.1.7"])
def test_without_tls_other_hosts_are_not_served(files: Files, host: str) -> None:
    files.add_token(created_ns=time.time_ns())

    message = refusal(host=host)
    assert f"--host {host} would expose all runs to the network without TLS" in message
    assert "--tls-cert and --tls-key" in message
    assert "rankscope token create" in message


def test_with_tls_a_valid_token_is_needed_too(files: Files) -> None:
    assert "has no valid token: create one with" in refusal(host=EVERYWHERE, **files.tls)
    files.add_token(created_ns=time.time_ns() - 8 * DAY_NS)  # expired yesterday
    assert "has no valid token" in refusal(host=EVERYWHERE, **files.tls)


def test_with_tls_and_a_token_other_hosts_are_served_by_the_certificates_name(files: Files) -> None:
    files.add_token(created_ns=time.time_ns())
    with open_endpoint(ListenOptions(host=EVERYWHERE, **files.tls)) as opened:
        assert opened.url == f"https://scope.example:{opened.port}"
        assert opened.names == {"localhost", "127.0.0.1", "::1", "scope.example"}
        outer, inner = opened.listeners
        assert outer.bound.getsockname()[0] == EVERYWHERE
        assert outer.tls is not None
        # Commands on this host use a listener on loopback.
        assert inner.bound.getsockname()[0] == "127.0.0.1"
        assert opened.local_url == f"http://127.0.0.1:{inner.bound.getsockname()[1]}"


def test_a_given_name_is_preferred_to_those_of_the_certificate(files: Files) -> None:
    files.add_token(created_ns=time.time_ns())
    names = ("Runs.Example.org",)
    with open_endpoint(ListenOptions(host=EVERYWHERE, server_names=names, **files.tls)) as opened:
        assert opened.url.startswith("https://Runs.Example.org:")
        assert {"runs.example.org", "scope.example"} <= opened.names


def test_invalid_combinations_of_flags_are_refused(files: Files, tmp_path: Path) -> None:
    assert "must be given together" in refusal(tls_cert=files.tls["tls_cert"])
    assert "must be given together" in refusal(tls_key=files.tls["tls_key"])
    assert "needs --tls-cert" in refusal(tls_client_ca=tmp_path / "ca.pem")
    for name in ("", "*.example.org", "https://x/"):
        assert "must be a host name" in refusal(server_names=(name,))
    for host in ("example.org", "", "300.1.1.1"):
        assert f"--host {host!r} is not an IP address" in refusal(host=host)
    # An address of the block for documentation, which no machine has.
    files.add_token(created_ns=time.time_ns())
    assert "not an address of this machine" in refusal(host="192.0.2.1", **files.tls)


def test_a_certificate_with_only_a_pattern_needs_a_server_name(
    files: Files, tmp_path: Path
) -> None:
    files.add_token(created_ns=time.time_ns())
    issued = Authority(tmp_path).issue("*.example.org", file="pattern")
    flags = {"host": EVERYWHERE, "tls_cert": issued.cert, "tls_key": issued.key}

    assert "--server-name" in refusal(**flags)


def test_a_broken_certificate_is_refused_on_loopback_too(files: Files) -> None:
    files.tls["tls_cert"].write_text("hello")

    assert "TLS can't be served" in refusal(**files.tls)
