from __future__ import annotations

import pytest

from rankscope.errors import BadInputError
from rankscope.listening import DEFAULT_PORT, listen, url_of


def test_a_taken_port_that_was_asked_for_is_refused() -> None:
    with listen("127.0.0.1", None) as first:
        port = first.getsockname()[1]
        with pytest.raises(BadInputError, match=f"port {port} on 127.0.0.1 is taken"):
            listen("127.0.0.1", port)


def test_without_a_wish_the_next_free_port_is_taken_and_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with listen("127.0.0.1", None) as first:
        capsys.readouterr()
        with listen("localhost", None) as second:
            port = second.getsockname()[1]
            assert port > first.getsockname()[1]
            said = f"port {DEFAULT_PORT} is taken, serving on {port}"
            assert said in capsys.readouterr().err
            assert url_of(second) == f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org", ""])
def test_an_address_that_others_can_reach_is_refused(host: str) -> None:
    with pytest.raises(BadInputError, match="TLS and access tokens are not configured"):
        listen(host, None)
