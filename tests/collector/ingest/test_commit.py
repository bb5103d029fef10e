from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.errors import StoreError, StoreQueryError, WireError
from rankscope.collector.ingest.commit import MIN_GATHER_S, GroupCommit
from rankscope.collector.ingest.retryable import BusyError, StoreTrouble, is_data_fault
from rankscope.collector.store.writer import CutState
from rankscope.collector.wire.codec import CutBatch
from tests.support.collector.cut_builder import span_cut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

POISON = 13
WAIT_S = 30.0


def batch(first_row: int) -> CutBatch:
    return CutBatch.from_cut(span_cut("r", first_row, first_row + 1))


class SlowStore:
    """Keeps the groups that it was given; the first one takes until it is let go."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.is_busy = threading.Event()
        self.may_go_on = threading.Event()
        self.errors: list[Exception] = []

    def write(self, batches: Sequence[CutBatch]) -> list[list[CutState]]:
        rows = [part.keys[0].first_row for part in batches]
        self.is_busy.set()
        assert self.may_go_on.wait(WAIT_S)
        if POISON in rows:
            raise StoreQueryError("no such value", code=117)
        if self.errors:
            raise self.errors.pop(0)
        self.groups.append(rows)
        return [[CutState.STORED] for _ in batches]


class Bench:
    def __init__(self) -> None:
        self.store = SlowStore()
        self.said: list[str] = []
        self.trouble = StoreTrouble(lambda: 0.0, say=self.said.append)
        self.commit = GroupCommit(self.store.write, trouble=self.trouble)
        self.commit.start()

    def submit_while_busy(self, *first_rows: int) -> list[Future[list[CutState]]]:
        """Submit one batch, and the others while it is being stored."""
        first, *others = first_rows
        done = [self.commit.submit(batch(first))]
        assert self.store.is_busy.wait(WAIT_S)
        done += [self.commit.submit(batch(row)) for row in others]
        self.store.may_go_on.set()
        return done


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.store.may_go_on.set()
    made.commit.close()
    assert not made.commit.is_running


def test_what_comes_during_an_insert_goes_in_by_the_next_one(bench: Bench) -> None:
    done = bench.submit_while_busy(0, 1, 2, 3)

    assert [future.result(WAIT_S) for future in done] == [[CutState.STORED]] * 4
    assert bench.store.groups == [[0], [1, 2, 3]]
    assert (bench.commit.num_groups, bench.commit.num_rows) == (2, 4)


def test_nothing_is_acknowledged_before_its_insert(bench: Bench) -> None:
    done = bench.commit.submit(batch(0))
    assert bench.store.is_busy.wait(WAIT_S)

    assert not done.done()
    bench.store.may_go_on.set()
    assert done.result(WAIT_S) == [CutState.STORED]


def test_one_poisonous_batch_among_others_is_refused_alone(bench: Bench) -> None:
    done = bench.submit_while_busy(0, 1, POISON, 3)

    with pytest.raises(WireError, match="no such value") as caught:
        done[2].result(WAIT_S)
    assert caught.value.status == 422
    assert [done[place].result(WAIT_S) for place in (0, 1, 3)] == [[CutState.STORED]] * 3
    assert bench.store.groups == [[0], [1], [3]]
    assert bench.trouble.reason is None


def test_a_store_that_fails_refuses_the_whole_group_and_takes_the_next(bench: Bench) -> None:
    bench.store.errors = [StoreError("no answer")]
    (failed,) = bench.submit_while_busy(0)

    with pytest.raises(BusyError) as caught:
        failed.result(WAIT_S)
    assert (caught.value.status, caught.value.retry_after_s) == (503, 2.0)
    reasons = [bench.trouble.reason]
    assert bench.commit.submit(batch(1)).result(WAIT_S) == [CutState.STORED]
    reasons.append(bench.trouble.reason)
    assert reasons == ["no answer", None]
    assert [line.partition(":")[0] for line in bench.said] == [
        "ingest stands still",
        "ingest goes on",
    ]


def test_too_many_parts_make_inserts_larger_until_they_go_in(bench: Bench) -> None:
    bench.store.may_go_on.set()
    gathers = []
    for _ in range(3):
        bench.store.errors = [StoreQueryError("too many parts", code=252)]
        with pytest.raises(BusyError):
            bench.commit.submit(batch(0)).result(WAIT_S)
        gathers.append(bench.commit.gather_s)
    bench.commit.submit(batch(0)).result(WAIT_S)

    assert gathers == [MIN_GATHER_S * 4, MIN_GATHER_S * 16, MIN_GATHER_S * 64]
    assert bench.commit.gather_s == MIN_GATHER_S * 32


def test_closing_stores_what_waits_and_takes_no_more() -> None:
    bench = Bench()
    done = bench.submit_while_busy(0, 1, 2)
    bench.commit.close()

    assert [future.result(0) for future in done] == [[CutState.STORED]] * 3
    with pytest.raises(BusyError, match="ending"):
        bench.commit.submit(batch(3))


@pytest.mark.parametrize(
    ("error", "is_data"),
    [
        (StoreQueryError("type mismatch", code=53), True),
        (StoreQueryError("too many parts", code=252), False),
        (StoreQueryError("memory", code=241), False),
        (StoreQueryError("a number of a later version", code=4711), False),
        (StoreQueryError("no answer"), False),
        (StoreError("closed"), False),
        (OSError("no space left on device"), False),
        (ValueError("a fault of ours"), True),
    ],
    ids=str,
)
def test_what_speaks_of_the_rows_and_what_of_the_store(error: Exception, *, is_data: bool) -> None:
    assert is_data_fault(error) == is_data


def test_while_the_store_fails_one_request_a_pause_is_let_through() -> None:
    now_s = [0.0]
    trouble = StoreTrouble(lambda: now_s[0], say=lambda _: None)
    pauses = []
    for _ in range(6):
        pauses.append(trouble.failed(StoreError("no")).retry_after_s)
        with pytest.raises(BusyError):
            trouble.check()
        now_s[0] += pauses[-1]
        trouble.check()  # this one may try ...
        second: Callable[[], None] = trouble.check
        with pytest.raises(BusyError):
            second()  # ... and no other

    assert pauses == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    trouble.succeeded()
    trouble.check()
