"""Decoders: processes that decode request bodies, so that a malicious body cannot kill the server.

The server uses `DecoderPool`. Run as a program, this module is a decoder: it reads requests from a
socket, each with the descriptor of a body, and answers with the descriptor of the decoded rows or
with the reason why the body is rejected, until the socket is closed.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ..errors import WireError
from ..names import escape_invisible
from ..wire.codec import WireLimits, decode_batch
from .backoff import SHUTDOWN_RETRY_S, BusyError
from .screening import screen
from .shared_memory import create_memory, map_memory, read_batch, write_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..wire.codec import CutBatch

ANSWER_TIMEOUT_S = 60.0
"""A decoder that takes longer is killed; the largest body takes about a second."""

MAX_ATTEMPTS = 2
"""A decoder may die for another reason than the body: one retry, in a new process."""

MAX_REMEMBERED = 1_024
"""Bodies that have killed decoders, by hash."""

MEMORY_BYTES = 4 << 30
"""Address space of a decoder: more than a body within `WireLimits` needs."""

MESSAGE_BYTES = 65_536
MAX_REASON_LETTERS = 400


class DecoderDiedError(Exception):
    """The process ended before it answered."""


class Decoder:
    """A decoder process, started at its first use.

    Args:
        timeout_s: Longest time for one body.
    """

    def __init__(self, *, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None if no process runs."""
        return None if self._process is None else self._process.pid

    def decode(self, body: int, limits: WireLimits) -> CutBatch:
        """Return the rows of a body.

        Args:
            body: Descriptor of sealed memory.
            limits: Limits of one body.

        Raises:
            WireError: The body is rejected.
            DecoderDiedError: The process ended; the next call starts another.
        """
        if self._connection is None:
            self._start()
        try:
            reply, rows = self._request(body, limits)
        except (OSError, ValueError) as error:
            raise DecoderDiedError(self._end()) from error
        if rows is None:
            supported = reply.get("supported")
            raise WireError(
                int(reply["status"]),
                str(reply["reason"]),
                supported=None if supported is None else (supported[0], supported[1]),
            )
        try:
            return read_batch(map_memory(rows), reply["ends"], unknown_columns=reply["unknown"])
        except (pa.ArrowException, ValueError, KeyError) as error:
            raise DecoderDiedError(f"its answer cannot be read: {self._end()}") from error
        finally:
            os.close(rows)

    def kill(self) -> None:
        """Kill the process; a thread that waits for its answer gets `DecoderDiedError`."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process. No thread may be waiting for its answer."""
        self._end()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {
            **os.environ,
            "ARROW_DEFAULT_MEMORY_POOL": "system",  # the others reserve address space
            "ARROW_IO_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MALLOC_ARENA_MAX": "2",
        }
        with theirs:
            arguments = [str(theirs.fileno()), str(MEMORY_BYTES)]
            self._process = subprocess.Popen(  # noqa: S603  # our own module
                [sys.executable, "-P", "-m", "rankscope.collector.ingest.decoder", *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # a Ctrl-C at the terminal is for the server only
            )
        ours.settimeout(self._timeout_s)
        self._connection = ours

    def _request(self, body: int, limits: WireLimits) -> tuple[dict[str, Any], int | None]:
        connection = self._connection
        if connection is None:
            raise OSError("no connection")
        socket.send_fds(connection, [json.dumps(asdict(limits)).encode()], [body])
        message, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 1)
        reply = json.loads(message)  # a ValueError if empty: the process has ended
        return reply, descriptors[0] if descriptors else None

    def _end(self) -> str:
        """End the process and return how it ended, in words."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        process, self._process = self._process, None
        if process is None:
            return "never started"
        try:
            process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return "killed because it did not answer"
        code = process.returncode
        return signal.Signals(-code).name if code < 0 else f"status {code}"


class DecoderPool:
    """Decoders shared by threads; a body goes to one that is free.

    Args:
        num_decoders: Number of processes.
        make: Creates one.
        say: Takes a line when a body has killed decoders.
    """

    def __init__(
        self,
        num_decoders: int,
        *,
        make: Callable[[], Decoder] = Decoder,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.num_decoders = num_decoders
        self.num_deaths = 0
        """Decoders that ended before they answered."""

        self._say = say
        self.all = [make() for _ in range(num_decoders)]
        self._free: queue.SimpleQueue[Decoder] = queue.SimpleQueue()
        for decoder in self.all:
            self._free.put(decoder)
        self._is_closed = False
        self._killers: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()

    def decode(self, body: int, limits: WireLimits) -> CutBatch:
        """Return the rows of a body. Arguments as `Decoder.decode`.

        Raises:
            WireError: The body is rejected. A body that has killed two decoders is rejected, and
                not tried again.
            BusyError: The pool is closed.
        """
        digest = hashlib.blake2b(memoryview(map_memory(body)), digest_size=16).digest()
        if digest in self._killers:
            raise WireError(422, "the body cannot be decoded: it has killed decoders before")
        reason = ""
        for _ in range(MAX_ATTEMPTS):
            decoder = self._free.get()
            try:
                self._check_open()
                return decoder.decode(body, limits)
            except DecoderDiedError as error:
                self._check_open()
                self.num_deaths += 1
                reason = str(error)
            finally:
                self._free.put(decoder)
        with self._lock:
            self._killers[digest] = None
            while len(self._killers) > MAX_REMEMBERED:
                self._killers.popitem(last=False)
        self._say(f"a body has killed {MAX_ATTEMPTS} decoders ({reason}); it is rejected")
        raise WireError(422, f"the body cannot be decoded: it kills the decoder ({reason})")

    def close(self) -> None:
        """Kill all decoders; bodies that are being decoded get `BusyError`."""
        self._is_closed = True
        for decoder in self.all:
            decoder.kill()
        for _ in self.all:
            decoder = self._free.get()  # its user gives it back, because it is dead
            decoder.close()
        for decoder in self.all:
            self._free.put(decoder)  # for threads that still wait for one: they get `BusyError`

    def _check_open(self) -> None:
        if self._is_closed:
            raise BusyError("the collector is shutting down", retry_after_s=SHUTDOWN_RETRY_S)


def decode_in_child(body: int, limits: WireLimits) -> tuple[dict[str, Any], int | None]:
    """Decode and screen a body; return the reply, and the descriptor of its rows if accepted."""
    try:
        batch = screen(decode_batch(map_memory(body), limits=limits))
        rows = create_memory("rankscope-rows")
        ends = write_batch(rows, batch)
    except WireError as error:
        rejection = {"status": error.status, "reason": _printable(error.reason)}
        return rejection | {"supported": error.supported}, None
    except MemoryError:
        return {"status": 413, "reason": "the body needs more memory than a decoder has"}, None
    except (pa.ArrowException, ValueError, OverflowError, UnicodeError) as error:
        return {"status": 422, "reason": _printable(f"the body cannot be decoded: {error}")}, None
    return {"status": 200, "ends": ends, "unknown": list(batch.unknown_columns)[:100]}, rows


def _printable(reason: str) -> str:
    """Return a reason, which may quote the body, safe to print on a terminal."""
    return escape_invisible(reason[:MAX_REASON_LETTERS])[:MAX_REASON_LETTERS]


def serve(connection: socket.socket) -> None:
    """Answer requests until the other side closes the connection."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 1)
        if not request:
            return
        (body,) = descriptors
        reply, rows = decode_in_child(body, WireLimits(**json.loads(request)))
        os.close(body)
        message = json.dumps(reply).encode()
        if rows is None:
            connection.send(message)
        else:
            socket.send_fds(connection, [message], [rows])
            os.close(rows)


def main() -> None:
    """Serve the socket with the number argv[1], within an address space of argv[2] bytes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would hold clients' data
    memory_bytes = int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    pa.set_cpu_count(1)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        try:
            serve(connection)
        except (BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
            return


if __name__ == "__main__":
    main()
