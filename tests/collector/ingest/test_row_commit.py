from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.errors import StoreError, StoreQueryError, WireError
from rankscope.collector.ingest.retryable import TOO_MANY_PARTS, BusyError, StoreTrouble
from rankscope.collector.ingest.row_commit import GAP_S, MAX_ROWS, NUM_AT_ONCE, RowCommit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    from rankscope.collector.identity import Row

POISON = 13
WAIT_S = 30.0


class SlowStore:
    """Keeps the inserts that it was given; each takes until it is let go."""

    def __init__(self) -> None:
        self.inserts: list[tuple[str, list[int]]] = []
        self.errors: list[Exception] = []
        self.is_busy = threading.Event()
        self.may_go_on = threading.Event()

    def write(self, table: str, rows: Sequence[Row]) -> None:
        numbers = [row["n"] for row in rows]
        self.is_busy.set()
        assert self.may_go_on.wait(WAIT_S)
        if POISON in numbers:
            raise StoreQueryError("no such value", code=117)
        if self.errors:
            raise self.errors.pop(0)
        self.inserts.append((table, numbers))


class Bench:
    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.store = SlowStore()
        self.trouble = StoreTrouble(lambda: 0.0, say=lambda _: None)
        self.commit = RowCommit(
            self.store.write, trouble=self.trouble, monotonic_s=lambda: self.now_s
        )
        self.commit.start()

    def submit(self, *numbers: int, table: str = "samples") -> Future[int]:
        return self.commit.submit(table, [{"n": number} for number in numbers])

    def hold(self) -> Future[int]:
        """Keep the thread in an insert of another table until the store is let go."""
        done = self.submit(0, table="events")
        assert self.store.is_busy.wait(WAIT_S)
        return done

    def tire(self, table: str = "samples") -> None:
        """Use up what a quiet table takes at once."""
        self.store.may_go_on.set()
        for number in range(NUM_AT_ONCE):
            assert self.submit(100 + number, table=table).result(WAIT_S) == 1


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.store.may_go_on.set()
    made.commit.close()


def test_what_comes_while_an_insert_is_under_way_goes_into_one_insert_a_table(
    bench: Bench,
) -> None:
    # GIVEN an insert under way, and what three senders bring meanwhile for two tables
    held = bench.hold()
    done = [bench.submit(1, 2), bench.submit(3), bench.submit(4, table="heartbeats")]

    assert not any(one.done() for one in done)
    bench.store.may_go_on.set()

    # THEN each hears of its own rows, and only once they are stored
    assert [one.result(WAIT_S) for one in done] == [2, 1, 1]
    assert held.result(WAIT_S) == 1
    assert sorted(bench.store.inserts[1:]) == [("heartbeats", [4]), ("samples", [1, 2, 3])]


def test_who_is_alone_waits_for_nobody(bench: Bench) -> None:
    # GIVEN a clock that stands: nothing that waits for its gap would ever come
    bench.store.may_go_on.set()

    for number in range(NUM_AT_ONCE):
        assert bench.submit(number).result(WAIT_S) == 1

    assert bench.store.inserts == [("samples", [number]) for number in range(NUM_AT_ONCE)]


def test_a_busy_table_takes_one_insert_a_gap(bench: Bench) -> None:
    bench.tire()

    # GIVEN two requests before the gap is over
    early = [bench.submit(1), bench.submit(2)]
    assert not early[1].done()
    assert len(bench.store.inserts) == NUM_AT_ONCE

    # WHEN it is over
    bench.now_s += GAP_S
    late = bench.submit(3)

    assert [one.result(WAIT_S) for one in (*early, late)] == [1, 1, 1]
    assert bench.store.inserts[NUM_AT_ONCE:] == [("samples", [1, 2, 3])]


def test_a_large_group_waits_for_no_gap(bench: Bench) -> None:
    bench.tire()

    done = [bench.submit(*range(20, 20 + MAX_ROWS // 2)) for _ in range(2)]

    assert [one.result(WAIT_S) for one in done] == [MAX_ROWS // 2] * 2
    assert len(bench.store.inserts) == NUM_AT_ONCE + 1


def test_a_busy_table_keeps_no_other_waiting(bench: Bench) -> None:
    bench.tire()
    waits = bench.submit(1)

    assert bench.submit(2, table="events").result(WAIT_S) == 1
    assert not waits.done()


def test_rows_that_the_store_refuses_fail_their_own_sender_alone(bench: Bench) -> None:
    bench.hold()
    good, bad, other = bench.submit(1, 2), bench.submit(POISON), bench.submit(3)
    bench.store.may_go_on.set()

    assert (good.result(WAIT_S), other.result(WAIT_S)) == (2, 1)
    with pytest.raises(WireError, match="the store refuses the rows") as refusal:
        bad.result(WAIT_S)
    assert refusal.value.status == 422
    assert bench.store.inserts[1:] == [("samples", [1, 2]), ("samples", [3])]


def test_a_store_that_fails_is_told_to_each_sender_as_busy(bench: Bench) -> None:
    bench.hold()
    done = [bench.submit(1), bench.submit(2)]
    bench.store.errors = [StoreError("the disk is gone")] * 2
    bench.store.may_go_on.set()

    for one in done:
        with pytest.raises(BusyError) as busy:
            one.result(WAIT_S)
        assert busy.value.status == 503
    assert bench.trouble.reason == "the disk is gone"


def test_too_many_parts_make_the_gap_wider_until_it_works_again(bench: Bench) -> None:
    bench.store.errors = [StoreQueryError("too many parts", code=TOO_MANY_PARTS)]
    bench.store.may_go_on.set()

    with pytest.raises(BusyError):
        bench.submit(1).result(WAIT_S)
    assert bench.commit.gap_s == GAP_S * 4

    bench.submit(2).result(WAIT_S)
    bench.submit(3).result(WAIT_S)
    bench.commit.close()
    assert bench.commit.gap_s == GAP_S


def test_what_waits_is_stored_before_it_closes(bench: Bench) -> None:
    bench.tire()
    waits = bench.submit(1)

    bench.commit.close()

    assert waits.result(WAIT_S) == 1
    assert not bench.commit.is_running
    with pytest.raises(BusyError):
        bench.submit(2)
