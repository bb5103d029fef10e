from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.host import sampler as sampler_module
from rankscope.collector.host.sample import Sample, SourceAbsentError
from rankscope.collector.host.sampler import Sampler, buffer_sink, host_sources
from rankscope.collector.read.samples import read_samples
from tests.support.collector.spool_builder import SpoolBuilder, this_host

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rankscope.collector.host.heartbeat import Heartbeat
    from rankscope.collector.identity import Row
    from rankscope.collector.store.store import Store


GENEROUS_S = 30.0


class Source:
    """Source that returns ``answer()`` and counts its readings."""

    def __init__(self, name: str, answer: Callable[[int], list[Sample]]) -> None:
        self.name = name
        self.answer = answer
        self.num_asked = 0

    def read(self, at_ns: int) -> list[Sample]:
        self.num_asked += 1
        return self.answer(at_ns)


def steady(name: str = "steady") -> Source:
    return Source(name, lambda at_ns: [Sample(at_ns, f"{name}-bytes", 1.0)])


def failing(error: Exception) -> Source:
    def answer(_at_ns: int) -> list[Sample]:
        raise error

    return Source("failing", answer)


class Rounds:
    """Sink that keeps the samples of each round, and the sampler's own counters but its cost."""

    def __init__(self) -> None:
        self.rounds: list[list[Sample]] = []
        self.losses: dict[str, float] = {}

    def __call__(self, samples: Sequence[Sample]) -> None:
        own = [sample for sample in samples if sample.name.startswith("sampler-")]
        self.rounds.append([sample for sample in samples if sample not in own])
        self.losses = {sample.name: sample.value for sample in own[1:]}


def test_all_samples_of_a_round_have_one_time() -> None:
    rounds, now_ns = Rounds(), iter((7, 8))
    sampler = Sampler(
        [steady("a"), steady("b")], rounds, unix_ns=lambda: next(now_ns), timeout_s=GENEROUS_S
    )

    sampler.turn()
    sampler.turn()

    assert rounds.rounds == [
        [Sample(7, "a-bytes", 1.0), Sample(7, "b-bytes", 1.0)],
        [Sample(8, "a-bytes", 1.0), Sample(8, "b-bytes", 1.0)],
    ]
    sampler.close()


def test_a_source_that_raises_loses_its_own_samples_and_is_logged_once() -> None:
    rounds, lines = Rounds(), list[str]()
    sampler = Sampler(
        [failing(ValueError("broken")), steady()], rounds, say=lines.append, timeout_s=GENEROUS_S
    )

    for _ in range(3):
        sampler.turn()

    assert [[sample.name for sample in each] for each in rounds.rounds] == [["steady-bytes"]] * 3
    assert lines == ["failing: ValueError: broken: no samples of it"]
    assert rounds.losses == {"sampler-failed-readings:failing": 3}
    assert sampler.stats["steady"].num_rounds == 3
    sampler.close()


def test_a_hanging_source_is_not_read_again_until_it_answers() -> None:
    # GIVEN: a source that hangs in its first reading
    gate, answered = threading.Event(), threading.Event()

    def answer(at_ns: int) -> list[Sample]:
        gate.wait(GENEROUS_S)
        answered.set()
        return [Sample(at_ns, "late-bytes", float(at_ns))]

    hanging = Source("hanging", answer)
    rounds, lines, now_ns = Rounds(), list[str](), iter(range(100))
    sampler = Sampler(
        [hanging, steady()], rounds, unix_ns=lambda: next(now_ns), say=lines.append, timeout_s=0.05
    )

    # WHEN
    num_threads = threading.active_count()
    for _ in range(3):
        sampler.turn()

    # THEN: the other source has samples, and there is one thread and one unfinished reading
    assert all("late-bytes" not in {s.name for s in each} for each in rounds.rounds)
    assert hanging.num_asked == 1
    assert threading.active_count() <= num_threads + 2
    assert sampler.stats["hanging"].num_late == 3
    its_lines = [
        line for line in lines if line.startswith("hanging")
    ]  # others may be late on a busy machine
    assert its_lines == ["hanging: timeout: no samples of it until it answers"]

    # WHEN: it answers, the late answer is dropped and the next one is used
    gate.set()
    assert answered.wait(GENEROUS_S)
    for _ in range(90):
        sampler.turn()
        if sampler.stats["hanging"].num_rounds:
            break
    late = [s for each in rounds.rounds for s in each if s.name == "late-bytes"]
    assert late
    assert all(sample.value == sample.at_ns > 0 for sample in late)
    sampler.close()


def test_an_absent_source_is_logged_once_and_tried_again_after_a_minute() -> None:
    absent = failing(SourceAbsentError("no driver: no GPU samples"))
    lines: list[str] = []
    sampler = Sampler([absent], Rounds(), say=lines.append, timeout_s=GENEROUS_S)

    for _ in range(60):
        sampler.turn()
    assert absent.num_asked == 1
    sampler.turn()

    assert absent.num_asked == 2
    assert lines == ["no driver: no GPU samples"]
    account = sampler.stats["failing"]
    assert (account.is_absent, account.num_failed, account.num_late) == (True, 0, 0)
    sampler.close()


def test_samples_of_a_source_beyond_the_limit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "MAX_SAMPLES", 5)
    flooding = Source("flooding", lambda at_ns: [Sample(at_ns, "x-bytes", 1.0)] * 9)
    rounds = Rounds()
    sampler = Sampler([flooding], rounds, timeout_s=GENEROUS_S)

    sampler.turn()

    assert len(rounds.rounds[0]) == 5
    assert rounds.losses == {"sampler-lost-samples": 4}
    sampler.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_dropped_and_counted(value: float) -> None:
    odd = Source("odd", lambda at_ns: [Sample(at_ns, "x-ratio", value)])
    rounds = Rounds()
    sampler = Sampler([odd], rounds, timeout_s=GENEROUS_S)

    sampler.turn()

    assert rounds.rounds == [[]]
    assert rounds.losses == {"sampler-lost-samples": 1}
    sampler.close()


def test_a_failing_sink_loses_only_its_round() -> None:
    taken = Rounds()
    is_full = True

    def sink(samples: Sequence[Sample]) -> None:
        if is_full:
            raise OSError("disk full")
        taken(samples)

    lines: list[str] = []
    sampler = Sampler([steady()], sink, say=lines.append, timeout_s=GENEROUS_S)
    sampler.turn()
    sampler.turn()
    assert lines == ["samples cannot be stored: disk full"]

    is_full = False
    sampler.turn()

    assert len(taken.rounds) == 1
    assert taken.losses == {"sampler-lost-samples": 2}
    sampler.close()


def test_the_cost_of_the_readings_is_a_sample() -> None:
    def work(_at_ns: int) -> list[Sample]:
        sum(range(200_000))
        return []

    costs: list[float] = []
    sampler = Sampler(
        [Source("work", work)],
        lambda samples: costs.extend(s.value for s in samples if s.name == "sampler-cpu-ns"),
        timeout_s=GENEROUS_S,
    )

    sampler.turn()
    sampler.turn()

    assert 0 < costs[0] < costs[1]
    sampler.close()


def test_samples_of_a_host_are_read_with_every_run_on_it(store: Store) -> None:
    # GIVEN: a run on one host
    store.insert_rows("ranks", [{"run_id": "run-a", "host": "node-1", "process": "p"}])

    # WHEN: two hosts write, one with an odd name
    def add(rows: Sequence[Row]) -> None:
        store.insert_rows("samples", rows)

    buffer_sink(add, host="node-1")(
        [Sample(10, "gpu-clock-hz", 1.7e9, 3), Sample(10, "nic-sent-bytes:e\x1bth0", 5.0)]
    )
    buffer_sink(add, host="node-2")([Sample(10, "gpu-clock-hz", 1.1e9, 3)])

    # THEN
    rows = read_samples(store, "run-a", first_ns=0, last_ns=20).to_pylist()
    assert [(row["host"], row["device"], row["name"], row["value"]) for row in rows] == [
        ("node-1", 3, "gpu-clock-hz", 1.7e9),
        ("node-1", -1, "nic-sent-bytes:e\\x1bth0", 5.0),
    ]


def test_two_seconds_of_this_host(tmp_path: Path) -> None:
    # GIVEN: one rank on this machine
    SpoolBuilder(tmp_path, run_id="run", **this_host()).span(step=4)
    beats: list[Heartbeat] = []
    found: list[Sample] = []
    lines: list[str] = []

    def take(samples: Sequence[Sample]) -> None:
        found.extend(samples)

    # WHEN
    sources = host_sources(tmp_path, on_heartbeats=beats.extend)
    sampler = Sampler(sources, take, say=lines.append, timeout_s=30.0)
    sampler.turn()
    sampler.turn()
    sampler.close()

    # THEN: what any Linux host has is there, and what it lacks is logged and returns no sample
    names = {sample.name.partition(":")[0] for sample in found}
    assert {"memory-total-bytes", "disk-free-bytes", "training-step", "sampler-cpu-ns"} <= names
    assert [beat.step for beat in beats] == [4, 4]
    accounts = sampler.stats
    assert {name for name, account in accounts.items() if account.num_failed} == set()
    for name, prefix in (("gpu", "gpu-"), ("rdma", "rdma-")):
        assert accounts[name].is_absent is not any(each.startswith(prefix) for each in names)
    assert len(lines) == sum(account.is_absent for account in accounts.values())
