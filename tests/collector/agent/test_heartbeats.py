from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rankscope.collector.agent.buffer import RowBuffer
from rankscope.collector.agent.outbox import HEARTBEAT_PERIOD_S, HeartbeatSender
from tests.support.collector.agent_rig import Rig
from tests.support.collector.fake_collector import FakeCollector, Reply

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATH = "/v1/rows/heartbeats"


@pytest.fixture
def collector() -> Iterator[FakeCollector]:
    with FakeCollector() as running:
        yield running


class BeatRig(Rig):
    """An agent that ships heartbeats too."""

    def __init__(self, spool: Path, url: str) -> None:
        super().__init__(spool, url)
        self.beats = RowBuffer()
        self.shipper = HeartbeatSender(self.link, say=self.lines.append)
        self.agent.send_heartbeats(self.beats, self.shipper)


@pytest.fixture
def rig(tmp_path: Path, collector: FakeCollector) -> Iterator[BeatRig]:
    made = BeatRig(tmp_path, collector.url)
    yield made
    made.close()


def beat(second: int, run_id: str = "run") -> dict[str, Any]:
    return {"run_id": run_id, "rank": 0, "at_ns": second * 10**9, "state": "training"}


def seconds_of(collector: FakeCollector) -> list[int]:
    return [row["at_ns"] // 10**9 for row in collector.stored.described.get("heartbeats", [])]


def test_every_second_is_told_in_a_request_each_ten_seconds(
    rig: BeatRig, collector: FakeCollector
) -> None:
    begun_s = rig.pauses.now_s
    for second in range(30):
        rig.beats.add([beat(second)])
        rig.pauses.now_s = begun_s + second
        rig.agent.turn()

    assert collector.num_requests(PATH) == 30 / HEARTBEAT_PERIOD_S
    assert seconds_of(collector) == list(range(21))
    assert len(rig.beats) == 9


def test_heartbeats_wait_for_a_collector_that_does_not_answer(
    rig: BeatRig, collector: FakeCollector
) -> None:
    collector.misbehave = lambda _path, _body: Reply(status=503)
    rig.beats.add([beat(1), beat(2)])
    rig.turn()
    assert len(rig.beats) == 2

    collector.misbehave = lambda _path, _body: None
    rig.turn_until(lambda: not len(rig.beats))

    assert seconds_of(collector) == [1, 2]


@pytest.mark.parametrize("status", [403, 404, 409, 410, 422])
def test_a_run_that_is_refused_costs_only_its_own_heartbeats(
    rig: BeatRig, collector: FakeCollector, status: int
) -> None:
    def refuse(path: str, body: bytes) -> Reply | None:
        told = Reply(status=status, document={"schema": 1, "error": "no"})
        return told if path == PATH and b"refused-run" in body else None

    collector.misbehave = refuse
    for second in range(2):
        rig.beats.add([beat(second, "refused-run"), beat(second)])
        rig.agent.turn()
        rig.pauses.now_s += HEARTBEAT_PERIOD_S

    assert seconds_of(collector) == [0, 1]
    assert rig.shipper.num_refused == 2
    assert len(rig.lines) == (0 if status == 410 else 1)
    assert not list(rig.state.glob("dead/*"))
