from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankscope.collector.host.heartbeat import heartbeat_row
from rankscope.collector.read.control import ControlRequests
from rankscope.collector.spool.control import ControlRequest
from tests.collector.host.test_heartbeat import BEAT
from tests.support.collector.serving import serving

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store


def test_a_repeated_heartbeat_is_stored_once(store: Store, run_id: str) -> None:
    row = heartbeat_row(replace(BEAT, host="node\x1b7")) | {"run_id": run_id}
    with serving(store) as collector:
        for _ in range(2):
            assert collector.rows("heartbeats", [row]).status_code == 200
        nameless = collector.rows("heartbeats", [row | {"run_id": ""}])

    assert nameless.status_code == 422
    seen = store.rows("SELECT * FROM heartbeats FINAL WHERE run_id = {r:String}", {"r": run_id})
    assert seen == [row]
    (found,) = seen
    assert (found["host"], found["hardware"], found["step"]) == ("node\\x1b7", "NVIDIA H200", 42)


def test_the_answer_to_heartbeats_has_the_requests_to_these_ranks(
    store: Store, run_id: str
) -> None:
    def heartbeat(rank: int) -> dict[str, object]:
        return heartbeat_row(BEAT) | {"run_id": run_id, "rank": rank}

    request = ControlRequest(run_id=run_id, name="a1", level="stacks", steps=2, ranks=(0, 4))
    ControlRequests(store).add(request)
    with serving(store) as collector:
        theirs = collector.rows("heartbeats", [heartbeat(4), heartbeat(5)]).json()
        others = collector.rows("heartbeats", [heartbeat(6)]).json()

    assert [(each["name"], each["ranks"]) for each in theirs["requests"]] == [("a1", [4])]
    assert "requests" not in others
