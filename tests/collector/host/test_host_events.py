from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.host.host_events import (
    KEEP_NS,
    MAX_WAITING,
    HostEvent,
    HostEventQueue,
    HostEventRows,
)
from rankscope.collector.spool.process import ProcessFiles
from tests.support.collector.spool_builder import SpoolBuilder

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.collector.identity import Row

HOST = socket.gethostname()


class Clock:
    def __init__(self) -> None:
        self.now_ns = 10**18

    def __call__(self) -> int:
        return self.now_ns


def process(
    spool: Path, rank: int, pid: int, *, run_id: str = "run", epoch: int = 0, host: str = HOST
) -> ProcessFiles:
    built = SpoolBuilder(
        spool,
        run_id=run_id,
        rank=rank,
        epoch=epoch,
        pid=pid,
        host=host,
        manifest={"local_rank": rank % 4},
    )
    return ProcessFiles(built.folder)


def event(clock: Clock, **about: int) -> HostEvent:
    return HostEvent(
        at_ns=clock(), kind="kernel", text="Xid 79", data={"class": "xid", "code": 79}, **about
    )


def places(rows: list[Row]) -> list[tuple[str, int, int]]:
    return [(row["run_id"], row["epoch"], row["rank"]) for row in rows]


@pytest.mark.parametrize(
    ("about", "rank"),
    [({"pid": 40}, 4), ({"rank": 5}, 5), ({"local_rank": 1}, 5), ({"pid": 7, "local_rank": 0}, 4)],
)
def test_an_event_about_a_process_belongs_to_its_rank(
    tmp_path: Path, about: dict[str, int], rank: int
) -> None:
    clock = Clock()
    rows = HostEventRows(HOST, unix_ns=clock)
    rows.note_running([process(tmp_path, 4, 40), process(tmp_path, 5, 50)])

    (row,) = rows.take_rows([event(clock, **about)])

    assert (row["run_id"], row["rank"], row["kind"]) == ("run", rank, "kernel")
    assert json.loads(row["data"]) == {"host": HOST, "class": "xid", "code": 79}


def test_an_event_of_the_host_is_stored_once_in_each_run_that_trains_there(tmp_path: Path) -> None:
    clock = Clock()
    rows = HostEventRows(HOST, unix_ns=clock)
    rows.note_running(
        [
            process(tmp_path, 0, 1),
            process(tmp_path, 1, 2),
            process(tmp_path, 0, 3, epoch=1),
            process(tmp_path, 0, 4, run_id="other"),
            process(tmp_path, 0, 5, run_id="elsewhere", host="another"),
        ]
    )

    found = rows.take_rows([event(clock), event(clock)])

    assert sorted(places(found)) == [("other", 0, -1)] * 2 + [("run", 1, -1)] * 2
    assert len({row["line"] for row in found}) == 4


def test_a_process_that_ended_is_known_until_its_messages_have_come(tmp_path: Path) -> None:
    clock = Clock()
    rows = HostEventRows(HOST, unix_ns=clock)
    rows.note_running([process(tmp_path, 3, 30)])
    clock.now_ns += KEEP_NS
    rows.note_running([])
    assert places(rows.take_rows([event(clock, pid=30)])) == [("run", 0, 3)]

    clock.now_ns += 1
    rows.note_running([])
    assert rows.take_rows([event(clock, pid=30)]) == []


def test_an_event_waits_for_its_run_and_is_dropped_and_counted_in_the_end(tmp_path: Path) -> None:
    clock = Clock()
    rows = HostEventRows(HOST, unix_ns=clock)
    old = event(clock)
    assert rows.take_rows([old]) == []
    clock.now_ns += KEEP_NS
    new = event(clock)
    assert rows.take_rows([new]) == []
    clock.now_ns += 1
    assert rows.take_rows([]) == []
    assert rows.counts["dropped"] == 1

    rows.note_running([process(tmp_path, 0, 1)])

    assert [row["at_ns"] for row in rows.take_rows([])] == [new.at_ns]


def test_rows_that_could_not_be_stored_are_sent_again(tmp_path: Path) -> None:
    clock = Clock()
    rows = HostEventRows(HOST, unix_ns=clock)
    rows.note_running([process(tmp_path, 0, 1)])
    stored: list[Row] = []

    def fail(_table: str, _rows: list[Row]) -> None:
        raise OSError("no collector")

    with pytest.raises(OSError, match="no collector"):
        rows.send([event(clock)], fail)
    rows.send([], lambda _table, new: stored.extend(new))
    rows.send([], lambda _table, new: stored.extend(new))

    assert len(stored) == 1


def test_a_queue_drops_its_oldest_events_and_counts_them() -> None:
    clock, queue = Clock(), HostEventQueue()
    queue.add([event(clock, pid=number) for number in range(MAX_WAITING + 5)])

    assert [one.pid for one in queue.take()][:2] == [5, 6]
    assert queue.num_dropped == 5
    assert queue.take() == []
