"""Examination of a host by its agent: on which occasions, how often, with which rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.doctor.host import Host
from rankscope.server.host_watch import MIN_INTERVAL_S, HostWatch
from tests.collector.host.test_heartbeat import BEAT
from tests.support.rankscope.recorded_host import RecordedHost, gpu_report

if TYPE_CHECKING:
    from pathlib import Path


class Rig:
    """A watch of a recorded host, with its rows and a clock that a test moves."""

    def __init__(self, root: Path) -> None:
        self.rows: list[dict[str, Any]] = []
        self.now_s = 100.0
        self.is_wanted = False
        RecordedHost(root).output("nvidia-smi -q -x", gpu_report(2))
        self.watch = HostWatch(
            self.rows.extend,
            spool=root,
            is_wanted=lambda: self.is_wanted,
            unix_ns=lambda: int(self.now_s * 1e9),
            monotonic_s=lambda: self.now_s,
            make_host=partial(Host, root=root, name="gpu07"),
        )

    def occasions(self, *, after_s: float = MIN_INTERVAL_S) -> list[tuple[str, str, int]]:
        """Return the occasion, run and epoch of the examination that is made now, if any."""
        self.now_s += after_s
        self.rows.clear()
        self.watch.turn()
        return sorted({(row["occasion"], row["run_id"], row["epoch"]) for row in self.rows})


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    made = Rig(tmp_path)
    assert made.occasions() == [("agent-start", "", -1)]
    return made


BEATING = replace(BEAT, run_id="job", epoch=0, state="training")


def test_rows_have_the_host_and_each_check(rig: Rig) -> None:
    rig.watch.take([BEATING])
    rig.occasions()

    assert {row["host"] for row in rig.rows} == {"gpu07"}
    (count,) = (row for row in rig.rows if row["name"] == "gpu-count")
    assert (count["state"], count["value"]) == ("healthy", "2 x NVIDIA H100 80GB HBM3")


def test_a_start_a_restart_and_a_failure_are_occasions(rig: Rig) -> None:
    rig.watch.take([BEATING])
    assert rig.occasions() == [("job-start", "job", 0)]
    rig.watch.take([BEATING])
    assert rig.occasions() == []
    for state in ("silent", "failed", "lost"):
        rig.watch.take([replace(BEATING, state=state)])
        assert rig.occasions() == [("heartbeat", "job", 0)]
        rig.watch.take([replace(BEATING, state=state)])
        assert rig.occasions() == []
    rig.watch.take([replace(BEATING, epoch=1, pid=BEAT.pid + 1)])
    assert rig.occasions() == [("restart", "job", 1)]
    rig.watch.take([replace(BEATING, epoch=1, pid=BEAT.pid + 2)])
    assert rig.occasions() == [("restart", "job", 1)]


def test_the_collector_asks_for_this_host_only(rig: Rig) -> None:
    for document in ({"to_examine": ["other"]}, {}, None, {"to_examine": 3}):
        rig.watch.take_answer(document)
    assert rig.occasions() == []

    rig.watch.take([BEATING])
    rig.watch.take_answer({"schema": 1, "num_rows": 1, "to_examine": [Host().name]})
    assert rig.occasions() == [("finding", "job", 0)]
    rig.is_wanted = True
    assert rig.occasions() == [("finding", "job", 0)]


def test_occasions_within_the_interval_share_the_next_examination(rig: Rig) -> None:
    rig.watch.take([BEATING])
    assert rig.occasions(after_s=1.0) == []
    rig.watch.take([replace(BEATING, state="lost")])

    assert rig.occasions(after_s=MIN_INTERVAL_S) == [("heartbeat", "job", 0)]


def test_an_examination_that_is_not_stored_is_repeated(tmp_path: Path) -> None:
    made = Rig(tmp_path)
    made.watch._add = lambda _rows: 1 / 0  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        made.watch.turn()
    made.watch._add = made.rows.extend

    assert made.occasions() == [("agent-start", "", -1)]
