from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.writer import StoreWriter
from rankscope.sources.store_source import StoreSource
from rankscope.tracer.spool import MANIFEST_FILE
from tests.support.collector.spool_builder import ANCHOR_UNIX_NS, SpoolBuilder, this_host
from tests.support.collector.stored import names_of

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.collector.store.store import Store

SECOND_NS = 10**9

pytestmark = pytest.mark.slow


class Job:
    """Two ranks of one launch, each in the spool of its own host."""

    def __init__(
        self,
        spool: Path,
        run_id: str,
        *,
        name: str,
        job: str | None = None,
        began_s: int = 0,
        world_size: int = 2,
        epoch: int = 0,
        ranks: tuple[int, ...] = (0, 1),
        **identity: Any,  # noqa: ANN401 -- arguments of the builder
    ) -> None:
        self._name = name
        self._began_ns = began_s * SECOND_NS
        self.ranks = {}
        for rank in ranks:
            builder = SpoolBuilder(
                spool / f"host-{rank}",
                run_id=run_id,
                rank=rank,
                epoch=epoch,
                world_size=world_size,
                anchor_unix_ns=ANCHOR_UNIX_NS + self._began_ns,
                **identity,
            )
            if job is not None:
                builder.write_json(MANIFEST_FILE, {"job": job})
            self.ranks[rank] = builder

    def record_steps(self, first: int, last: int) -> None:
        """Record these steps on each rank, a second each."""
        for builder in self.ranks.values():
            for step in range(first, last + 1):
                start_ns = 1_000 + (step - first) * SECOND_NS
                builder.span(self._name, step=step, start_ns=start_ns, duration_ns=SECOND_NS // 2)
                builder.step(step, start_ns=start_ns, duration_ns=SECOND_NS)

    def end(self, *, at_s: int) -> None:
        for builder in self.ranks.values():
            builder.end(at_ns=ANCHOR_UNIX_NS + self._began_ns + at_s * SECOND_NS)


class Hosts:
    """The tails of two hosts with one store, as the agents of a job are."""

    def __init__(self, store: Store, spool: Path) -> None:
        self._writer = StoreWriter(store)
        self._spool = spool
        self._tails: dict[str, SpoolTail] = {}
        self.problems: list[str] = []

    def complete(self, job: Job, first: int, last: int, *, at_s: int = 7) -> None:
        """Record the steps of a job that then ends, and read them."""
        job.record_steps(first, last)
        job.end(at_s=at_s)
        self.poll()

    def poll(self) -> None:
        for folder in sorted(self._spool.iterdir()):
            tail = self._tails.setdefault(folder.name, SpoolTail(folder, self._writer))
            self.problems += tail.poll().problems


@pytest.fixture
def hosts(store: Store, tmp_path: Path) -> Hosts:
    return Hosts(store, tmp_path)


def epochs_of(store: Store, run_id: str) -> dict[int, list[int]]:
    """Return the ranks of each epoch, one entry for each process."""
    info = StoreSource(store).run_info(run_id)
    return {epoch.epoch: [rank.rank for rank in epoch.ranks] for epoch in info.epochs}


def runs_of(store: Store, run_id: str) -> list[str]:
    return sorted(row.run_id for row in StoreSource(store).runs() if row.run_id.startswith(run_id))


@pytest.mark.parametrize("keys", [("a", "b"), (None, None)], ids=["launch known", "unknown"])
def test_a_second_job_of_the_same_name_is_a_run_of_its_own(
    store: Store, run_id: str, tmp_path: Path, hosts: Hosts, keys: tuple[str | None, str | None]
) -> None:
    first = Job(tmp_path, run_id, name="old", job=keys[0])
    hosts.complete(first, 0, 5)
    second = Job(tmp_path, run_id, name="new", job=keys[1], began_s=60)
    hosts.complete(second, 0, 3)

    assert set(names_of(store, run_id)) == {"old"}
    assert set(names_of(store, f"{run_id}-2")) == {"new"}
    assert epochs_of(store, f"{run_id}-2") == {0: [0, 1]}
    (said,) = {line for line in hosts.problems if line.startswith(f"{run_id}-2: another job")}
    (listed,) = (run for run in StoreSource(store).runs() if run.run_id == f"{run_id}-2")
    assert listed.warnings == (said,)


def test_two_jobs_at_once_are_two_runs(
    store: Store, run_id: str, tmp_path: Path, hosts: Hosts
) -> None:
    first = Job(tmp_path, run_id, name="first", job="a")
    first.record_steps(0, 3)
    hosts.poll()
    second = Job(tmp_path, run_id, name="second", job="b", began_s=1)
    hosts.poll()
    second.record_steps(0, 3)
    first.record_steps(4, 5)
    hosts.poll()
    for job in (first, second):
        job.end(at_s=9)
    hosts.poll()

    assert set(names_of(store, run_id)) == {"first"}
    assert set(names_of(store, f"{run_id}-2")) == {"second"}
    assert epochs_of(store, run_id) == {0: [0, 1]}


@pytest.mark.parametrize("keys", [("a", "b"), (None, None)], ids=["launch known", "unknown"])
def test_a_job_that_goes_on_from_a_checkpoint_is_the_next_epoch(
    store: Store, run_id: str, tmp_path: Path, hosts: Hosts, keys: tuple[str | None, str | None]
) -> None:
    first = Job(tmp_path, run_id, name="before", job=keys[0])
    hosts.complete(first, 0, 5)
    second = Job(tmp_path, run_id, name="after", job=keys[1], began_s=60)
    hosts.poll()
    assert epochs_of(store, run_id) == {0: [0, 1]}  # undecided before its first step
    hosts.complete(second, 4, 8)

    assert epochs_of(store, run_id) == {0: [0, 1], 1: [0, 1]}
    assert runs_of(store, run_id) == [run_id]


def test_a_larger_job_does_not_continue_a_smaller_one(
    store: Store, run_id: str, tmp_path: Path, hosts: Hosts
) -> None:
    first = Job(tmp_path, run_id, name="two", job="a")
    hosts.complete(first, 0, 5)
    second = Job(tmp_path, run_id, name="four", job="b", began_s=60, world_size=4)
    hosts.complete(second, 6, 8)

    assert runs_of(store, run_id) == [run_id, f"{run_id}-2"]


@pytest.mark.parametrize("job", ["a", None], ids=["launch known", "unknown"])
def test_a_slow_starter_belongs_to_its_job(
    store: Store, run_id: str, tmp_path: Path, hosts: Hosts, job: str | None
) -> None:
    early = Job(tmp_path, run_id, name="early", job=job, ranks=(0,))
    early.record_steps(0, 0)
    hosts.poll()
    late = Job(tmp_path, run_id, name="late", job=job, ranks=(1,), began_s=300)
    late.record_steps(0, 1)
    hosts.poll()
    for part in (early, late):
        part.end(at_s=400)
    hosts.poll()

    assert epochs_of(store, run_id) == {0: [0, 1]}
    assert runs_of(store, run_id) == [run_id]


def test_a_slow_starter_of_the_first_of_two_jobs_belongs_to_the_first(
    store: Store, run_id: str, tmp_path: Path, hosts: Hosts
) -> None:
    first = Job(tmp_path, run_id, name="first", job="a", ranks=(0,))
    first.record_steps(0, 3)
    hosts.poll()
    second = Job(tmp_path, run_id, name="second", job="b", began_s=1)
    second.record_steps(0, 3)
    hosts.poll()
    late = Job(tmp_path, run_id, name="first", job="a", ranks=(1,), began_s=5)
    late.record_steps(0, 3)
    for job in (first, second, late):
        job.end(at_s=9)
    hosts.poll()

    assert epochs_of(store, run_id) == {0: [0, 1]}
    assert epochs_of(store, f"{run_id}-2") == {0: [0, 1]}


def test_one_restarted_rank_stays_in_its_epoch(
    store: Store, run_id: str, tmp_path: Path, hosts: Hosts
) -> None:
    job = Job(tmp_path, run_id, name="op", **this_host())
    job.record_steps(0, 5)
    hosts.poll()
    job.ranks[1].end(at_ns=ANCHOR_UNIX_NS + 6 * SECOND_NS)
    hosts.poll()
    again = Job(tmp_path, run_id, name="op", ranks=(1,), began_s=10)
    hosts.complete(again, 6, 7, at_s=4)

    processes = store.rows(
        "SELECT run_id, epoch, rank FROM ranks FINAL WHERE run_id = {run:String} ORDER BY rank",
        {"run": run_id},
    )
    assert [(row["epoch"], row["rank"]) for row in processes] == [(0, 0), (0, 1), (0, 1)]
    assert runs_of(store, run_id) == [run_id]


def test_restarts_of_a_launch_are_epochs_of_its_run(
    store: Store, run_id: str, tmp_path: Path, hosts: Hosts
) -> None:
    """The launcher counts a restart after a failure, but not one after a change of members."""
    for number, (launch, epoch) in enumerate([("a", 0), ("b", 0), ("b", 0), ("b", 1)]):
        job = Job(
            tmp_path, run_id, name=f"job {number}", job=launch, epoch=epoch, began_s=60 * number
        )
        hosts.complete(job, 0, 2, at_s=4)

    assert epochs_of(store, run_id) == {0: [0, 1]}
    assert epochs_of(store, f"{run_id}-2") == {0: [0, 1], 1: [0, 1], 2: [0, 1]}


def test_a_declared_restart_needs_no_evidence(
    store: Store, run_id: str, tmp_path: Path, hosts: Hosts
) -> None:
    for epoch in (0, 1):
        job = Job(tmp_path, run_id, name="op", job=f"launch {epoch}", epoch=epoch)
        hosts.complete(job, 0, 2, at_s=4)

    assert epochs_of(store, run_id) == {0: [0, 1], 1: [0, 1]}


def test_a_restarted_reader_finds_the_same_place(
    store: Store, run_id: str, tmp_path: Path, hosts: Hosts
) -> None:
    for name, began_s in (("old", 0), ("new", 60)):
        job = Job(tmp_path, run_id, name=name, began_s=began_s)
        job.record_steps(0, 5)
        job.end(at_s=7)
    hosts.poll()

    assert set(names_of(store, run_id)) == {"old"}
    Hosts(store, tmp_path).poll()

    assert runs_of(store, run_id) == [run_id, f"{run_id}-2"]
    assert len(names_of(store, f"{run_id}-2")) == 12


def test_a_hanging_second_job_is_shown_when_it_waited_long_enough(
    store: Store, run_id: str, tmp_path: Path, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Job(tmp_path, run_id, name="old", job="a")
    hosts.complete(first, 0, 5)
    Job(tmp_path, run_id, name="new", job="b", began_s=60, **this_host())
    hosts.poll()
    assert runs_of(store, run_id) == [run_id]

    monkeypatch.setattr("rankscope.collector.store.placements.WAIT_NS", 0)
    hosts.poll()

    assert runs_of(store, run_id) == [run_id, f"{run_id}-2"]
