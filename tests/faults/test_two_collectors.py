"""Two collector processes on one store that get the same rows (fault B6)."""

from __future__ import annotations

import http.client
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.read.spans import read_spans
from rankscope.collector.store.store import open_store
from rankscope.collector.wire.codec import encode_cuts
from tests.faults.cycles import RUN, TIMEOUT_S
from tests.faults.server_path import ServerPath
from tests.integration.programs import COMMAND
from tests.support.collector.cut_builder import span_cut
from tests.support.ports import fixed_port

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

NUM_CUTS, CUT_ROWS = 30, 5
NUM_BODIES, CUTS_A_BODY = 40, 6
NUM_SENDERS = 4


@dataclass(kw_only=True)
class TwoCollectors(ServerPath):
    """A store and two collectors, without an agent."""

    other_port: int = field(default_factory=fixed_port)

    def commands(self) -> dict[str, list[str]]:
        commands = super().commands()
        del commands["agent"]
        serve = [*COMMAND, "serve", "--only", "collector", "--port", str(self.other_port)]
        return {**commands, "other": serve}

    def post(self, port: int, body: bytes) -> int:
        """Send a body of cuts to one of them and return the status."""
        token = (self.folder / "agent.token").read_text().strip()
        headers = {
            "authorization": f"Bearer {token}",
            "content-type": "application/vnd.apache.arrow.stream",
        }
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        with closing(connection):
            connection.request("POST", "/v1/spans", body, headers)
            return connection.getresponse().status

    def other_answers(self) -> bool:
        """Return whether the second one accepts rows."""
        try:
            return self.post(self.other_port, encode_cuts([])) == 200
        except OSError:
            return False


def test_two_collector_processes_with_the_same_rows_store_each_once(tmp_path: Path) -> None:
    chooser = random.Random(5)
    cuts = [span_cut(RUN, at * CUT_ROWS, (at + 1) * CUT_ROWS) for at in range(NUM_CUTS)]
    with TwoCollectors(folder=tmp_path / "path", chooser=chooser) as path:
        path.wait_for(path.other_answers)
        ports = [path.port, path.other_port]
        bodies = [
            (chooser.choice(ports), encode_cuts(chooser.sample(cuts, CUTS_A_BODY)))
            for _ in range(NUM_BODIES)
        ]

        # WHEN both get them at once, overlapping and in any order, and then all of them again
        with ThreadPoolExecutor(max_workers=NUM_SENDERS) as senders:
            statuses = list(senders.map(lambda sent: path.post(*sent), bodies))
            statuses += senders.map(lambda port: path.post(port, encode_cuts(cuts)), ports)

        # THEN all are accepted, and each row is returned once
        assert set(statuses) == {200}
        with open_store(path.store_url) as store:
            names = [str(name) for name in read_spans(store, RUN)["name"].to_pylist()]
        assert sorted(names) == sorted(f"s{row}" for row in range(NUM_CUTS * CUT_ROWS))
