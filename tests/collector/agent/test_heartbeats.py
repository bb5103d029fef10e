from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.collector.agent.buffer import RowBuffer
from rankscope.collector.agent.outbox import RunRowSender
from rankscope.collector.host.heartbeat import HEARTBEAT_PERIOD_S
from tests.support.collector.agent_rig import Rig
from tests.support.collector.fake_collector import FakeCollector, Reply
from tests.support.collector.spool_builder import SpoolBuilder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATH = "/v1/rows/heartbeats"


@pytest.fixture
def collector() -> Iterator[FakeCollector]:
    with FakeCollector() as running:
        yield running


class HeartbeatRig(Rig):
    """An agent that also sends heartbeats."""

    def __init__(self, spool: Path, url: str) -> None:
        super().__init__(spool, url)
        self.heartbeats = RowBuffer()
        self.sender = RunRowSender(self.link, say=self.lines.append)
        self.agent.send_heartbeats(self.heartbeats, self.sender)


@pytest.fixture
def rig(tmp_path: Path, collector: FakeCollector) -> Iterator[HeartbeatRig]:
    made = HeartbeatRig(tmp_path, collector.url)
    yield made
    made.close()


def heartbeat(second: int, run_id: str = "run") -> dict[str, Any]:
    return {"run_id": run_id, "rank": 0, "at_ns": second * 10**9, "state": "training"}


def seconds_of(collector: FakeCollector) -> list[int]:
    return [row["at_ns"] // 10**9 for row in collector.stored.described.get("heartbeats", [])]


def test_heartbeats_of_ten_seconds_are_sent_in_one_request(
    rig: HeartbeatRig, collector: FakeCollector
) -> None:
    begun_s = rig.pauses.now_s
    for second in range(30):
        rig.heartbeats.add([heartbeat(second)])
        rig.pauses.now_s = begun_s + second
        rig.agent.turn()

    assert collector.num_requests(PATH) == 30 / HEARTBEAT_PERIOD_S
    assert seconds_of(collector) == list(range(21))
    assert len(rig.heartbeats) == 9


def test_heartbeats_wait_for_a_collector_that_does_not_answer(
    rig: HeartbeatRig, collector: FakeCollector
) -> None:
    collector.misbehave = lambda _path, _body: Reply(status=503)
    rig.heartbeats.add([heartbeat(1), heartbeat(2)])
    rig.turn()
    assert len(rig.heartbeats) == 2

    collector.misbehave = lambda _path, _body: None
    rig.turn_until(lambda: not len(rig.heartbeats))

    assert seconds_of(collector) == [1, 2]


@pytest.mark.parametrize("status", [403, 404, 409, 410, 422])
def test_a_rejected_run_loses_only_its_own_heartbeats(
    rig: HeartbeatRig, collector: FakeCollector, status: int
) -> None:
    def reject(path: str, body: bytes) -> Reply | None:
        reply = Reply(status=status, document={"schema": 1, "error": "no"})
        return reply if path == PATH and b"rejected-run" in body else None

    collector.misbehave = reject
    for second in range(2):
        rig.heartbeats.add([heartbeat(second, "rejected-run"), heartbeat(second)])
        rig.agent.turn()
        rig.pauses.now_s += HEARTBEAT_PERIOD_S

    assert seconds_of(collector) == [0, 1]
    assert rig.sender.num_rejected == 2
    assert len(rig.lines) == (0 if status == 410 else 1)
    assert not list(rig.state.glob("dead/*"))


def test_a_request_in_the_answer_reaches_the_control_file_of_its_rank(
    rig: HeartbeatRig, collector: FakeCollector, tmp_path: Path
) -> None:
    four, five = (SpoolBuilder(tmp_path, run_id="run", rank=rank) for rank in (4, 5))
    request = {"run_id": "run", "name": "a1", "level": "full", "steps": 7, "ranks": [5]}
    foreign = {**request, "run_id": "another", "name": "b2"}
    document = {"schema": 1, "num_rows": 1, "requests": [request, foreign, {"level": "unknown"}]}
    rig.turn()

    collector.misbehave = lambda path, _: (
        Reply(status=200, document=document) if path == PATH else None
    )
    rig.heartbeats.add([heartbeat(1) | {"epoch": 0, "pid": 1}])
    rig.turn_until(lambda: not len(rig.heartbeats))

    written = json.loads((five.folder / "control.json").read_text())
    assert written == {"full": {"steps": 7, "request": "a1"}}
    assert not (four.folder / "control.json").exists()
