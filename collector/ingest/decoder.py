"""A process of its own that decodes bodies: a body that kills it kills nothing else.

Reads requests from a socket (a descriptor of the body each), answers with a descriptor of the
decoded rows or with the reason why there are none. Ends when the socket does.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
from typing import Any

import pyarrow as pa

from ..errors import WireError
from ..names import visible
from ..wire.codec import WireLimits, decode_batch
from .screening import screened
from .shared_memory import mapped, new_memory, write_batch

MESSAGE_BYTES = 65_536
MAX_REASON_LETTERS = 400
GIB = 1 << 30


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
    return visible(reason[:MAX_REASON_LETTERS])[:MAX_REASON_LETTERS]


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
