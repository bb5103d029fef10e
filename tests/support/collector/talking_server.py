"""Servers that say what they like, for the tests of clients."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def speaking(talk: Callable[[socket.socket], object]) -> Iterator[int]:
    """Serve a port: ``talk`` is called with each connection; yield the port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    threading.Thread(target=answer, args=(connection,), daemon=True).start()

        def answer(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                connection.recv(65536)
                talk(connection)
                # A close with unread bytes of the request resets the connection.
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def trickle(text: bytes) -> Callable[[socket.socket], None]:
    """Return a talk of one byte after the other, for ever, 20 a second."""

    def talk(connection: socket.socket) -> None:
        while True:
            for byte in text:
                connection.sendall(bytes([byte]))
                time.sleep(0.05)

    return talk
