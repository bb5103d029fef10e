from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.writer import StoreWriter
from rankscope.sources.store_source import StoreSource
from rankscope.tracer.spool import STALL_NS
from tests.support.collector.spool_builder import OFFSET_NS, SpoolBuilder

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from rankscope.collector.store.store import Store

GROUP = 0xFEED


class Clock:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.now_ns = 1

    def __call__(self) -> int:
        return self.now_ns


SECOND = 1_000_000_000


def settle(tail: SpoolTail, clock: Clock) -> None:
    """Poll until the newest row is stored, and once more."""
    for _ in range(3):
        clock.now_ns += SECOND
        tail.poll()


def stalls(store: Store) -> list[tuple[int, int, dict[str, Any]]]:
    """Return (rank, at_ns, data) of each stalled event."""
    sql = "SELECT rank, at_ns, data FROM events FINAL WHERE kind = 'stalled' ORDER BY at_ns, rank"
    return [(row["rank"], row["at_ns"], json.loads(row["data"])) for row in store.rows(sql)]


@pytest.mark.slow
def test_a_stalled_process_is_reported_once_with_its_open_spans(
    empty_store: Store, tmp_path: Path
) -> None:
    spool = SpoolBuilder(tmp_path / "spool", run_id="r", rank=1)
    spool.span("forward", step=4, start_ns=10, duration_ns=10)
    spool.open_span(0, "all_reduce", start_ns=25, step=4, group_id=GROUP, seq=7)
    clock = Clock()
    tail = SpoolTail(tmp_path / "spool", StoreWriter(empty_store), grace_ns=0, monotonic_ns=clock)
    settle(tail, clock)
    clock.now_ns += STALL_NS - 2 * SECOND
    tail.poll()
    assert stalls(empty_store) == []

    for _ in range(3):
        clock.now_ns += SECOND
        tail.poll()

    assert stalls(empty_store) == [
        (
            1,
            OFFSET_NS + 25,
            {
                "step": 4,
                "open": [
                    {
                        "name": "all_reduce",
                        "kind": "dp-comm",
                        "step": 4,
                        "start_ns": OFFSET_NS + 25,
                        "group_id": f"{GROUP:016x}",
                        "seq": 7,
                    }
                ],
            },
        )
    ]


@pytest.mark.slow
def test_a_process_that_continues_gets_the_whole_time_again(
    empty_store: Store, tmp_path: Path
) -> None:
    spool = SpoolBuilder(tmp_path / "spool", run_id="r", rank=1)
    spool.open_span(0, "all_reduce", start_ns=25, step=4, group_id=GROUP, seq=7)
    clock = Clock()
    tail = SpoolTail(tmp_path / "spool", StoreWriter(empty_store), grace_ns=0, monotonic_ns=clock)
    settle(tail, clock)
    clock.now_ns += STALL_NS - 10 * SECOND
    spool.span("forward", step=4, start_ns=30)
    settle(tail, clock)
    clock.now_ns += STALL_NS - 3 * SECOND
    tail.poll()
    assert stalls(empty_store) == []

    settle(tail, clock)
    assert len(stalls(empty_store)) == 1


@pytest.mark.slow
def test_all_silent_processes_are_reported_with_the_first(
    empty_store: Store, tmp_path: Path
) -> None:
    # GIVEN rank 0, which is silent 20 s longer than rank 1, and rank 2, which works
    spools = [
        SpoolBuilder(tmp_path / "spool", run_id="r", rank=rank, world_size=3) for rank in range(3)
    ]
    for spool in spools:
        spool.open_span(0, "all_reduce", start_ns=25, step=4, group_id=GROUP, seq=7)
    clock = Clock()
    tail = SpoolTail(tmp_path / "spool", StoreWriter(empty_store), grace_ns=0, monotonic_ns=clock)
    settle(tail, clock)
    clock.now_ns += 20 * SECOND
    spools[1].span("forward", step=4, start_ns=30)
    settle(tail, clock)
    clock.now_ns += STALL_NS - 30 * SECOND
    spools[2].span("forward", step=4, start_ns=30)
    for _ in range(10):
        settle(tail, clock)

    assert [rank for rank, _, _ in stalls(empty_store)] == [0, 1]


@pytest.mark.slow
def test_an_open_communication_is_reported_with_its_size_and_sides(
    empty_store: Store, tmp_path: Path
) -> None:
    spool = SpoolBuilder(tmp_path / "spool", run_id="r", rank=1)
    spool.open_span(0, "recv", start_ns=25, step=4, group_id=GROUP, seq=7, comm=(4096, 0, 1))
    clock = Clock()
    tail = SpoolTail(tmp_path / "spool", StoreWriter(empty_store), grace_ns=0, monotonic_ns=clock)
    settle(tail, clock)
    clock.now_ns += STALL_NS
    tail.poll()

    ((_, _, data),) = stalls(empty_store)
    (entry,) = data["open"]
    assert (entry["num_bytes"], entry["sides"]) == (4096, [0, 1])


@pytest.mark.slow
def test_an_idle_or_ended_process_is_not_stalled(empty_store: Store, tmp_path: Path) -> None:
    SpoolBuilder(tmp_path / "spool", run_id="r", rank=0)
    ended = SpoolBuilder(tmp_path / "spool", run_id="r", rank=1)
    ended.open_span(0, "all_reduce", start_ns=25, step=4, group_id=GROUP, seq=7)
    ended.end()
    clock = Clock()
    tail = SpoolTail(tmp_path / "spool", StoreWriter(empty_store), grace_ns=0, monotonic_ns=clock)
    tail.poll()
    clock.now_ns += 2 * STALL_NS
    tail.poll()

    assert stalls(empty_store) == []


@pytest.mark.slow
def test_the_analysis_names_the_missing_rank_while_the_job_hangs(
    empty_store: Store, tmp_path: Path
) -> None:
    from rankscope.analysis.causes.hang import find_hangs

    for rank in range(4):
        spool = SpoolBuilder(tmp_path / "spool", run_id="r", rank=rank, world_size=4)
        spool.group(GROUP, kind="dp-comm", name="dp", members=[0, 1, 2, 3])
        spool.span("forward", step=4, start_ns=10, duration_ns=10)
        spool.step(3, start_ns=0, duration_ns=9)
        if rank != 2:
            spool.open_span(0, "all_reduce", start_ns=25, step=4, group_id=GROUP, seq=7)
    clock = Clock()
    tail = SpoolTail(tmp_path / "spool", StoreWriter(empty_store), grace_ns=0, monotonic_ns=clock)
    settle(tail, clock)
    clock.now_ns += STALL_NS
    tail.poll()

    source = StoreSource(empty_store)
    (finding,) = find_hangs(
        source.run_info("r"), source.spans("r"), source.steps("r"), source.context("r")
    )

    assert (finding.cause, finding.ranks, finding.steps) == ("hang", (2,), (4, 4))
