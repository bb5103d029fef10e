from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.collector.errors import TlsError
from rankscope.collector.http.token_file import write_tokens
from rankscope.collector.http.tokens import Role, make_token
from rankscope.errors import BadInputError
from rankscope.server.listen import ListenOptions, listening
from tests.support.collector.authority import Authority
from tests.support.ports import fixed_port

if TYPE_CHECKING:
    from pathlib import Path

DAY_NS = 86_400 * 10**9
EVERYWHERE = "0.0.0.0"
NUM_PORTS = 20


@pytest.fixture(autouse=True)
def first_port(monkeypatch: pytest.MonkeyPatch) -> int:
    """The first of ports that are ours: of the usual ones others take some and let go."""
    first = fixed_port()
    monkeypatch.setattr("rankscope.server.listen.DEFAULT_PORT", first)
    monkeypatch.setattr("rankscope.server.listen.LAST_PORT", first + NUM_PORTS)
    return first


def test_a_taken_port_that_was_asked_for_is_refused() -> None:
    with (
        listening(ListenOptions()) as first,
        pytest.raises(BadInputError, match=f"port {first.port} on 127.0.0.1 is taken"),
        listening(ListenOptions(port=first.port)),
    ):
        pass


def test_without_a_wish_the_next_free_port_is_taken_and_said(
    capsys: pytest.CaptureFixture[str], first_port: int
) -> None:
    with listening(ListenOptions()) as first:
        assert first.port == first_port
        capsys.readouterr()
        with listening(ListenOptions(host="localhost")) as second:
            assert second.port > first.port
            said = f"port {first_port} is taken, serving on {second.port}"
            assert said in capsys.readouterr().err
            assert second.url == second.local_url == f"http://127.0.0.1:{second.port}"
            assert second.names == {"localhost", "127.0.0.1", "::1"}
            assert [door.tls for door in second.doors] == [None]


# Beyond loopback


class Place:
    """A host's certificate and tokens, of which a test may take something away."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens = folder / "tokens.json"
        monkeypatch.setenv("RANKSCOPE_TOKENS", str(self.tokens))
        files = Authority(folder).issue("scope.example", "*.pool.example")
        self.tls: dict[str, Any] = {"tls_cert": files.cert, "tls_key": files.key}

    def keep_token(self, *, made_ns: int) -> None:
        fields = {"run_prefix": "", "holder": "a", "days": 7}
        record = make_token([], role=Role.READ, now_ns=made_ns, **fields)[1]  # type: ignore[arg-type]
        write_tokens(self.tokens, [record])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


def why_not(**flags: Any) -> str:  # noqa: ANN401 -- flags of several types
    with pytest.raises((BadInputError, TlsError)) as caught, listening(ListenOptions(**flags)):
        pass
    return str(caught.value)


@pytest.mark.parametrize("host", [EVERYWHERE, "::", "192.168.1.7"])
def test_without_tls_nobody_but_this_host_is_served(place: Place, host: str) -> None:
    place.keep_token(made_ns=time.time_ns())

    told = why_not(host=host)
    assert f"--host {host} would open every run to the network without TLS" in told
    assert "--tls-cert and --tls-key" in told
    assert "rankscope token create" in told


def test_with_tls_a_live_token_is_asked_for_too(place: Place) -> None:
    assert "holds no live token: make one with" in why_not(host=EVERYWHERE, **place.tls)
    place.keep_token(made_ns=time.time_ns() - 8 * DAY_NS)  # expired yesterday
    assert "holds no live token" in why_not(host=EVERYWHERE, **place.tls)


def test_with_both_every_address_is_served_by_the_certificates_name(place: Place) -> None:
    place.keep_token(made_ns=time.time_ns())
    with listening(ListenOptions(host=EVERYWHERE, **place.tls)) as opened:
        assert opened.url == f"https://scope.example:{opened.port}"
        assert opened.names == {"localhost", "127.0.0.1", "::1", "scope.example"}
        outer, inner = opened.doors
        assert outer.bound.getsockname()[0] == EVERYWHERE
        assert outer.tls is not None
        # Commands of this host come by a door that only this host has.
        assert inner.bound.getsockname()[0] == "127.0.0.1"
        assert opened.local_url == f"http://127.0.0.1:{inner.bound.getsockname()[1]}"


def test_a_load_balancers_address_may_have_more_connections() -> None:
    with listening(ListenOptions(connections_per_address=2000)) as opened:
        assert opened.connections_per_address == 2000


def test_a_given_name_goes_before_the_certificates(place: Place) -> None:
    place.keep_token(made_ns=time.time_ns())
    names = ("Runs.Example.org",)
    with listening(ListenOptions(host=EVERYWHERE, server_names=names, **place.tls)) as opened:
        assert opened.url.startswith("https://Runs.Example.org:")
        assert {"runs.example.org", "scope.example"} <= opened.names


def test_flags_that_do_not_go_together_are_refused(place: Place, tmp_path: Path) -> None:
    assert "belong together" in why_not(tls_cert=place.tls["tls_cert"])
    assert "belong together" in why_not(tls_key=place.tls["tls_key"])
    assert "needs --tls-cert" in why_not(tls_client_ca=tmp_path / "ca.pem")
    for name in ("", "*.example.org", "https://x/"):
        assert "plain host name" in why_not(server_names=(name,))
    for host in ("example.org", "", "300.1.1.1"):
        assert f"--host {host!r} is no address" in why_not(host=host)
    # Of the block for documentation: no machine has it.
    place.keep_token(made_ns=time.time_ns())
    assert "no address of this machine" in why_not(host="192.0.2.1", **place.tls)


def test_a_certificate_of_no_single_name_needs_one(place: Place, tmp_path: Path) -> None:
    place.keep_token(made_ns=time.time_ns())
    files = Authority(tmp_path).issue("*.example.org", file="pattern")
    flags = {"host": EVERYWHERE, "tls_cert": files.cert, "tls_key": files.key}

    assert "--server-name" in why_not(**flags)


def test_a_broken_certificate_is_refused_on_loopback_too(place: Place) -> None:
    place.tls["tls_cert"].write_text("hello")

    assert "TLS can't be served" in why_not(**place.tls)
