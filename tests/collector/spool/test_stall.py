from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.causes.hang import find_hangs
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.writer import StoreWriter
from rankscope.sources.store_source import StoreSource
from rankscope.tracer.spool import STALL_NS
from tests.support.collector.spool_builder import OFFSET_NS, SpoolBuilder

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from rankscope.collector.store.store import Store

pytestmark = pytest.mark.slow

GROUP = 0xFEED
SECOND = 1_000_000_000


class Host:
    """A host whose ranks hang in an all-reduce, and the tail that reads their spool."""

    def __init__(self, store: Store, folder: Path) -> None:
        self._store = store
        self._folder = folder
        self._now_ns = 1
        self._tail = SpoolTail(
            folder, StoreWriter(store), grace_ns=0, monotonic_ns=lambda: self._now_ns
        )

    def hang(
        self, rank: int, *, world_size: int = 2, comm: tuple[int, int, int] = (0, 0, 0)
    ) -> SpoolBuilder:
        builder = SpoolBuilder(self._folder, run_id="r", rank=rank, world_size=world_size)
        builder.open_span(0, "all_reduce", start_ns=25, step=4, group_id=GROUP, seq=7, comm=comm)
        return builder

    def poll(self, *, after_ns: int = SECOND) -> None:
        self._now_ns += after_ns
        self._tail.poll()

    def settle(self) -> None:
        """Poll until the newest row is stored, and once more."""
        for _ in range(3):
            self.poll()

    def stalls(self) -> list[tuple[int, int, dict[str, Any]]]:
        """Return (rank, at_ns, data) of each stalled event."""
        found = self._store.rows(
            "SELECT rank, at_ns, data FROM events FINAL WHERE kind = 'stalled' ORDER BY at_ns, rank"
        )
        return [(row["rank"], row["at_ns"], json.loads(row["data"])) for row in found]


@pytest.fixture
def host(empty_store: Store, tmp_path: Path) -> Host:
    return Host(empty_store, tmp_path / "spool")


def test_a_stalled_process_is_reported_once_with_its_open_spans(host: Host) -> None:
    spool = host.hang(1, comm=(4096, 0, 1))
    spool.span("forward", step=4, start_ns=10, duration_ns=10)
    host.settle()
    host.poll(after_ns=STALL_NS - 2 * SECOND)
    assert host.stalls() == []

    host.settle()

    open_span = {
        "name": "all_reduce", "kind": "dp-comm", "step": 4, "start_ns": OFFSET_NS + 25,
        "group_id": f"{GROUP:016x}", "seq": 7, "num_bytes": 4096, "sides": [0, 1],
    }  # fmt: skip
    assert host.stalls() == [(1, OFFSET_NS + 25, {"step": 4, "open": [open_span]})]


def test_a_process_that_continues_gets_the_whole_time_again(host: Host) -> None:
    spool = host.hang(1)
    host.settle()
    host.poll(after_ns=STALL_NS - 10 * SECOND)
    spool.span("forward", step=4, start_ns=30)
    host.settle()
    host.poll(after_ns=STALL_NS - 3 * SECOND)
    assert host.stalls() == []

    host.settle()

    assert len(host.stalls()) == 1


def test_all_silent_processes_are_reported_with_the_first(host: Host) -> None:
    # GIVEN rank 0, which is silent 20 s longer than rank 1, and rank 2, which works
    spools = [host.hang(rank, world_size=3) for rank in range(3)]
    host.settle()
    host.poll(after_ns=20 * SECOND)
    spools[1].span("forward", step=4, start_ns=30)
    host.settle()
    host.poll(after_ns=STALL_NS - 30 * SECOND)
    spools[2].span("forward", step=4, start_ns=30)

    for _ in range(10):
        host.settle()

    assert [rank for rank, _, _ in host.stalls()] == [0, 1]


def test_an_idle_or_ended_process_is_not_stalled(host: Host, tmp_path: Path) -> None:
    SpoolBuilder(tmp_path / "spool", run_id="r", rank=0)
    host.hang(1).end()

    for _ in range(2):
        host.poll(after_ns=2 * STALL_NS)

    assert host.stalls() == []


def test_the_analysis_names_the_missing_rank_while_the_job_hangs(
    host: Host, empty_store: Store, tmp_path: Path
) -> None:
    for rank in range(4):
        if rank == 2:
            spool = SpoolBuilder(tmp_path / "spool", run_id="r", rank=rank, world_size=4)
        else:
            spool = host.hang(rank, world_size=4)
        spool.group(GROUP, kind="dp-comm", name="dp", members=[0, 1, 2, 3])
        spool.span("forward", step=4, start_ns=10, duration_ns=10)
        spool.step(3, start_ns=0, duration_ns=9)
    host.settle()
    host.poll(after_ns=STALL_NS)

    source = StoreSource(empty_store)
    (finding,) = find_hangs(
        source.run_info("r"), source.spans("r"), source.steps("r"), source.context("r")
    )

    assert (finding.cause, finding.ranks, finding.steps) == ("hang", (2,), (4, 4))
