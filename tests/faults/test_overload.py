"""Overload of a collector: it answers 429 before decoding, and its memory does not grow."""

from __future__ import annotations

import http.client
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.store.store import open_store
from rankscope.collector.wire.codec import encode_cuts
from tests.faults.small_collector import MIB
from tests.support.collector.cut_builder import span_cut
from tests.support.collector.serving import OWN

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.multiproc

NUM_SENDERS = 20
NUM_ROWS = 120_000
"""Size of a body, which inflates to some 11 MiB: all of them are ten times the quota."""

NAMES = ["op"] * NUM_ROWS

GROWTH_BYTES = 192 * MIB
"""Additional memory for inserting one such body; 60 MiB were measured."""
TIMEOUT_S = 120.0
ARROW = "application/vnd.apache.arrow.stream"


@contextmanager
def small_collector(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a collector until the block ends; yield its process and port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.small_collector", str(folder)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=TIMEOUT_S)


def most_resident_bytes(pid: int) -> int:
    """Return the peak resident set of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10


class Sender(threading.Thread):
    """Posts a body until it is stored, and keeps the statuses."""

    def __init__(self, port: int, body: bytes) -> None:
        super().__init__(daemon=True)
        self.statuses: list[int] = []
        self._port = port
        self._body = body

    def run(self) -> None:
        until_s = time.monotonic() + TIMEOUT_S
        headers = {"authorization": f"Bearer {OWN}", "content-type": ARROW}
        while time.monotonic() < until_s:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
            with closing(connection):
                connection.request("POST", "/v1/spans", self._body, headers)
                answer = connection.getresponse()
                answer.read()
            self.statuses.append(answer.status)
            if answer.status == 200:
                return
            time.sleep(0.2)


def test_ten_times_the_quota_is_stored_once_without_more_memory(tmp_path: Path) -> None:
    # GIVEN a collector that has stored a body of this size, and a connected client
    one = encode_cuts([span_cut("before", 0, NUM_ROWS, names=NAMES)])
    body = encode_cuts([span_cut("run", 0, NUM_ROWS, names=NAMES)])
    with small_collector(tmp_path / "store") as (process, port):
        first = Sender(port, one)
        first.run()
        assert first.statuses == [200]
        resident_bytes = most_resident_bytes(process.pid)
        visitor = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        visitor.connect()
        own_socket = visitor.sock

        # WHEN many send bodies at once, of which one nearly exhausts the quota
        senders = [Sender(port, body) for _ in range(NUM_SENDERS)]
        for sender in senders:
            sender.start()
        seen = []
        while any(sender.is_alive() for sender in senders):
            visitor.request("GET", "/healthz")
            answer = visitor.getresponse()
            answer.read()
            seen.append(answer.status)
            senders[0].join(0.1)

        # THEN some get 429, all are stored in the end, and no connection was closed
        statuses = [status for sender in senders for status in sender.statuses]
        assert set(statuses) == {200, 429}
        assert [sender.statuses[-1] for sender in senders] == [200] * NUM_SENDERS
        assert set(seen) == {200}
        assert visitor.sock is own_socket
        visitor.close()

        # AND the process has hardly more memory than after the first
        assert most_resident_bytes(process.pid) - resident_bytes < GROWTH_BYTES

    with open_store(f"chdb://{tmp_path / 'store'}") as store:
        asked = "SELECT count() AS n, uniqExact(row) AS rows FROM spans WHERE run_id = 'run'"
        assert store.rows(asked) == [{"n": NUM_ROWS, "rows": NUM_ROWS}]
