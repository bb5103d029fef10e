"""What is said of a store's server that does not answer: the cause, and no address."""

from __future__ import annotations

import socket
import threading

import pytest

from rankscope.collector.errors import StoreError
from rankscope.collector.store.store import Store, unreachable_reason
from tests.support.ports import fixed_port


def url_of(port: int) -> str:
    return f"clickhouse://ann:hunter2@127.0.0.1:{port}/default"


def test_a_server_that_is_down_is_told_by_its_cause() -> None:
    with pytest.raises(StoreError) as failed:
        Store(url_of(fixed_port()))

    said = str(failed.value)
    assert said.endswith("the store's server does not answer (Connection refused)")
    assert "hunter2" not in said
    assert "query" not in said
    assert "\n" not in said


def test_a_server_that_hangs_up_is_told_as_such() -> None:
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


def test_what_a_server_answers_is_its_own_word() -> None:
    assert unreachable_reason(ValueError("Code: 60. Table does not exist")) is None
