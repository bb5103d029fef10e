"""The decoders of a server: a few processes, each started again when a body has killed it."""

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
from .retryable import ENDING_S, BusyError
from .screening import screened
from .shared_memory import mapped, new_memory, read_batch, write_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..wire.codec import CutBatch

ANSWER_S = 60.0
"""A decoder that takes longer is ended: the largest body takes about a second."""

ATTEMPTS = 2
"""A decoder may die of something else than the body: one more try, in a fresh process."""

MAX_KILLERS = 1_024
GIB = 1 << 30
MEMORY_BYTES = 4 * GIB
"""Address space of a decoder: what the limits of a body let in, and a fence around it."""

MESSAGE_BYTES = 65_536
MAX_REASON_LETTERS = 400


class DecoderGoneError(Exception):
    """The process ended, or was ended, before it answered."""


class Decoder:
    """One process, started when it is first needed.

    Args:
        answer_s: How long it may take for a body.
    """

    def __init__(self, *, answer_s: float = ANSWER_S) -> None:
        self._answer_s = answer_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """The process, where there is one."""
        return None if self._process is None else self._process.pid

    def decode(self, body: int, limits: WireLimits) -> CutBatch:
        """Return the rows of a body.

        Args:
            body: Descriptor of sealed memory.
            limits: How much it may hold.

        Raises:
            WireError: The body can't be taken.
            DecoderGoneError: The process is gone; the next call starts another.
        """
        if self._connection is None:
            self._start()
        try:
            reply, rows = self._ask(body, limits)
        except (OSError, ValueError) as error:
            raise DecoderGoneError(self._end()) from error
        if rows is None:
            supported = reply.get("supported")
            raise WireError(
                int(reply["status"]),
                str(reply["reason"]),
                supported=None if supported is None else (supported[0], supported[1]),
            )
        try:
            return read_batch(mapped(rows), reply["ends"], unknown_columns=reply["unknown"])
        except (pa.ArrowException, ValueError, KeyError) as error:
            raise DecoderGoneError(f"its answer is none: {self._end()}") from error
        finally:
            os.close(rows)

    def kill(self) -> None:
        """End the process at once; whoever waits for its answer hears that it is gone."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process, while nobody waits for it."""
        self._end()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {
            **os.environ,
            "ARROW_DEFAULT_MEMORY_POOL": "system",  # the others set address space aside
            "ARROW_IO_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MALLOC_ARENA_MAX": "2",
        }
        with theirs:
            arguments = [str(theirs.fileno()), str(MEMORY_BYTES)]
            self._process = subprocess.Popen(  # noqa: S603  # our own module
                [sys.executable, "-m", "rankscope.collector.ingest.decoder", *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # a Ctrl-C at the terminal is the server's to handle
            )
        ours.settimeout(self._answer_s)
        self._connection = ours

    def _ask(self, body: int, limits: WireLimits) -> tuple[dict[str, Any], int | None]:
        connection = self._connection
        if connection is None:
            raise OSError("no connection")
        socket.send_fds(connection, [json.dumps(asdict(limits)).encode()], [body])
        message, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 1)
        reply = json.loads(message)  # an empty one is none: the process is gone
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
            return "ended because it did not answer"
        code = process.returncode
        return signal.Signals(-code).name if code < 0 else f"status {code}"


class DecoderPool:
    """Decoders that threads share; a body is decoded by whichever is free.

    Args:
        num_decoders: How many.
        make: Makes one.
        say: Hears when a body has killed decoders.
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
            WireError: The body can't be taken; one that has killed a decoder twice is among
                these, and is not tried again.
            BusyError: The pool was closed.
        """
        digest = hashlib.blake2b(memoryview(mapped(body)), digest_size=16).digest()
        if digest in self._killers:
            raise WireError(422, "the body can't be decoded: it has ended decoders before")
        why = ""
        for _ in range(ATTEMPTS):
            decoder = self._free.get()
            try:
                self._check_open()
                return decoder.decode(body, limits)
            except DecoderGoneError as error:
                self._check_open()
                self.num_deaths += 1
                why = str(error)
            finally:
                self._free.put(decoder)
        with self._lock:
            self._killers[digest] = None
            while len(self._killers) > MAX_KILLERS:
                self._killers.popitem(last=False)
        self._say(f"a body has ended {ATTEMPTS} decoders ({why}); it is refused")
        raise WireError(422, f"the body can't be decoded: it ends the decoder ({why})")

    def close(self) -> None:
        """End all of them; bodies that are being decoded are refused as at a busy time."""
        self._is_closed = True
        for decoder in self.all:
            decoder.kill()
        for _ in self.all:
            decoder = self._free.get()  # given back by whoever used it, now that it is dead
            decoder.close()
        for decoder in self.all:
            self._free.put(decoder)  # for whoever waits for one, to be told

    def _check_open(self) -> None:
        if self._is_closed:
            raise BusyError("the collector is ending", retry_after_s=ENDING_S)


def answer(body_descriptor: int, limits: WireLimits) -> tuple[dict[str, Any], int | None]:
    """Return what to say of a body, and the descriptor of its rows where there are any."""
    try:
        batch = screened(decode_batch(mapped(body_descriptor), limits=limits))
        rows = new_memory("rankscope-rows")
        ends = write_batch(rows, batch)
    except WireError as error:
        refusal = {"status": error.status, "reason": _shown(error.reason)}
        return refusal | {"supported": error.supported}, None
    except MemoryError:
        return {"status": 413, "reason": "the body needs more memory than there is for it"}, None
    except (pa.ArrowException, ValueError, OverflowError, UnicodeError) as error:
        return {"status": 422, "reason": _shown(f"the body can't be decoded: {error}")}, None
    return {"status": 200, "ends": ends, "unknown": list(batch.unknown_columns)[:100]}, rows


def _shown(reason: str) -> str:
    """Return a reason that may name a stranger's columns, safe to show on a terminal."""
    return escape_invisible(reason[:MAX_REASON_LETTERS])[:MAX_REASON_LETTERS]


def serve(connection: socket.socket) -> None:
    """Answer until the other side is gone."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 1)
        if not request:
            return
        (body,) = descriptors
        reply, rows = answer(body, WireLimits(**json.loads(request)))
        os.close(body)
        message = json.dumps(reply).encode()
        if rows is None:
            connection.send(message)
        else:
            socket.send_fds(connection, [message], [rows])
            os.close(rows)


def main() -> None:
    """Serve the socket whose number is the first argument, within the bytes of the second."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core would hold strangers' bytes
    most = int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    pa.set_cpu_count(1)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        try:
            serve(connection)
        except (BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
            return


if __name__ == "__main__":
    main()
