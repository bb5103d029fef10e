"""Group commit on a store that waits, with a clock that a test moves."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.errors import StoreError, StoreQueryError, WireError
from rankscope.collector.ingest.backoff import TOO_MANY_PARTS, BusyError, StoreBackoff
from rankscope.collector.ingest.commit import BURST, MAX_ROWS, MIN_INTERVAL_S, GroupCommit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

BAD_ROW = 13
WAIT_S = 30.0


class SlowStore:
    """Records the inserts that it was given. Each waits until ``may_go_on`` is set."""

    def __init__(self) -> None:
        self.inserts: list[tuple[str, list[int]]] = []
        self.errors: list[Exception] = []
        self.is_busy = threading.Event()
        self.may_go_on = threading.Event()

    def write(self, table: str, requests: Sequence[list[int]]) -> list[int]:
        rows = [row for request in requests for row in request]
        self.is_busy.set()
        assert self.may_go_on.wait(WAIT_S)
        if BAD_ROW in rows:
            raise StoreQueryError("no such value", code=117)
        if self.errors:
            raise self.errors.pop(0)
        self.inserts.append((table, rows))
        return [len(request) for request in requests]


class Bench:
    """A group commit over a slow store."""

    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.store = SlowStore()
        self.said: list[str] = []
        self.backoff = StoreBackoff(lambda: 0.0, say=self.said.append)
        self.commit: GroupCommit[list[int], int] = GroupCommit(
            self.store.write, backoff=self.backoff, monotonic_s=lambda: self.now_s
        )
        self.commit.start()

    def submit(self, *rows: int, table: str = "samples") -> Future[int]:
        return self.commit.submit(table, list(rows), num_rows=len(rows))

    def submit_while_busy(self, *rows: int) -> list[Future[int]]:
        """Submit one row, and the others while its insert is in progress."""
        first, *others = rows
        done = [self.submit(first)]
        assert self.store.is_busy.wait(WAIT_S)
        done += [self.submit(row) for row in others]
        self.store.may_go_on.set()
        return done

    def hold(self) -> Future[int]:
        """Keep the thread in an insert of another table until the store goes on."""
        done = self.submit(0, table="events")
        assert self.store.is_busy.wait(WAIT_S)
        return done

    def use_up_burst(self) -> None:
        self.store.may_go_on.set()
        for number in range(BURST):
            assert self.submit(100 + number).result(WAIT_S) == 1


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.store.may_go_on.set()
    made.commit.close()
    assert not made.commit.is_running


def test_nothing_is_acknowledged_before_its_insert(bench: Bench) -> None:
    done = bench.submit(0)
    assert bench.store.is_busy.wait(WAIT_S)

    assert not done.done()
    bench.store.may_go_on.set()
    assert done.result(WAIT_S) == 1


def test_requests_during_an_insert_share_the_next_one(bench: Bench) -> None:
    done = bench.submit_while_busy(0, 1, 2, 3)

    assert [future.result(WAIT_S) for future in done] == [1] * 4
    assert bench.store.inserts == [("samples", [0]), ("samples", [1, 2, 3])]
    assert bench.commit.num_inserts == {"samples": 2}


def test_each_table_has_its_own_insert_and_each_sender_its_own_result(bench: Bench) -> None:
    # GIVEN an insert in progress, and requests of three senders for two tables
    held = bench.hold()
    done = [bench.submit(1, 2), bench.submit(3), bench.submit(4, table="heartbeats")]

    assert not any(one.done() for one in done)
    bench.store.may_go_on.set()

    assert [one.result(WAIT_S) for one in done] == [2, 1, 1]
    assert held.result(WAIT_S) == 1
    assert sorted(bench.store.inserts[1:]) == [("heartbeats", [4]), ("samples", [1, 2, 3])]


def test_a_bad_request_among_others_is_rejected_alone(bench: Bench) -> None:
    done = bench.submit_while_busy(0, 1, BAD_ROW, 3)

    with pytest.raises(WireError, match=r"the store rejects the rows: .*no such value") as caught:
        done[2].result(WAIT_S)
    assert caught.value.status == 422
    assert [done[place].result(WAIT_S) for place in (0, 1, 3)] == [1] * 3
    assert [rows for _, rows in bench.store.inserts] == [[0], [1], [3]]
    assert bench.backoff.reason is None


def test_a_failing_store_refuses_the_whole_group_and_takes_the_next(bench: Bench) -> None:
    failed = [bench.hold(), bench.submit(1), bench.submit(2)]
    bench.store.errors = [StoreError("no answer")] * 2
    bench.store.may_go_on.set()

    for one in failed:
        with pytest.raises(BusyError) as caught:
            one.result(WAIT_S)
        assert caught.value.status == 503
    reasons = [bench.backoff.reason]
    assert bench.submit(3).result(WAIT_S) == 1
    reasons.append(bench.backoff.reason)
    assert reasons == ["no answer", None]
    assert bench.said == ["ingest is paused: no answer", "ingest has resumed"]


def test_too_many_parts_lengthen_the_interval_until_inserts_succeed(bench: Bench) -> None:
    bench.store.may_go_on.set()
    intervals_s = []
    for _ in range(3):
        bench.now_s += 10.0
        bench.store.errors = [StoreQueryError("too many parts", code=TOO_MANY_PARTS)]
        with pytest.raises(BusyError):
            bench.submit(0).result(WAIT_S)
        intervals_s.append(bench.commit.interval_s)
    for _ in range(4):
        bench.now_s += 10.0
        bench.submit(0).result(WAIT_S)
        intervals_s.append(bench.commit.interval_s)

    usual_s = MIN_INTERVAL_S
    assert intervals_s == [usual_s * times for times in (4, 8, 8, 4, 2, 1, 1)]


def test_closing_stores_what_waits_and_takes_no_more(bench: Bench) -> None:
    done = bench.submit_while_busy(0, 1, 2)
    bench.commit.close()

    assert [future.result(0) for future in done] == [1] * 3
    with pytest.raises(BusyError, match="shutting down"):
        bench.submit(3)


def test_a_single_sender_waits_for_no_interval(bench: Bench) -> None:
    bench.store.may_go_on.set()

    for number in range(BURST):
        assert bench.submit(number).result(WAIT_S) == 1

    assert bench.store.inserts == [("samples", [number]) for number in range(BURST)]


def test_a_busy_table_takes_one_insert_per_interval(bench: Bench) -> None:
    bench.use_up_burst()

    # GIVEN two requests before the interval is over
    early = [bench.submit(1), bench.submit(2)]
    assert not early[1].done()
    assert len(bench.store.inserts) == BURST

    # WHEN it is over
    bench.now_s += MIN_INTERVAL_S
    late = bench.submit(3)

    assert [one.result(WAIT_S) for one in (*early, late)] == [1, 1, 1]
    assert bench.store.inserts[BURST:] == [("samples", [1, 2, 3])]


def test_a_large_group_waits_for_no_interval(bench: Bench) -> None:
    bench.use_up_burst()
    half = MAX_ROWS // 2

    done = [bench.submit(*range(20, 20 + half)) for _ in range(2)]

    assert [one.result(WAIT_S) for one in done] == [half] * 2
    assert len(bench.store.inserts) == BURST + 1

    # AND it leaves the interval to small ones
    bench.now_s += MIN_INTERVAL_S
    assert bench.submit(1).result(WAIT_S) == 1


def test_a_busy_table_delays_no_other(bench: Bench) -> None:
    bench.use_up_burst()
    waits = bench.submit(1)

    assert bench.submit(2, table="events").result(WAIT_S) == 1
    assert not waits.done()


def test_closing_waits_for_no_interval(bench: Bench) -> None:
    bench.use_up_burst()
    waits = bench.submit(1)

    bench.commit.close()

    assert waits.result(WAIT_S) == 1
