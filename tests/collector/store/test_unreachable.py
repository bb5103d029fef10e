"""Errors of a store's server that does not answer: they have the cause, and no address."""

from __future__ import annotations

import socket
import threading

import pytest

from rankscope.collector.errors import StoreError
from rankscope.collector.store.store import Store, unreachable_reason
from tests.support.ports import fixed_port


def url_of(port: int) -> str:
    return f"clickhouse://ann:hunter2@127.0.0.1:{port}/default"


def test_the_error_of_a_server_that_is_down_names_the_cause() -> None:
    with pytest.raises(StoreError) as failed:
        Store(url_of(fixed_port()))

    message = str(failed.value)
    assert message.endswith("the store's server does not answer (Connection refused)")
    assert "hunter2" not in message
    assert "query" not in message
    assert "\n" not in message


def test_the_error_of_a_server_that_hangs_up_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def hang_up() -> None:
            while True:
                try:
                    listening.accept()[0].close()
                except OSError:
                    return

        threading.Thread(target=hang_up, daemon=True).start()
        with pytest.raises(StoreError, match=r"does not answer \((RemoteDisconnected|Connection)"):
            Store(url_of(listening.getsockname()[1]))
        listening.shutdown(socket.SHUT_RDWR)


def test_an_answer_of_the_server_is_not_unreachable() -> None:
    assert unreachable_reason(ValueError("Code: 60. Table does not exist")) is None
