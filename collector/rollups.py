"""What is kept of a step once it is closed: its sums by rank and kind, and what they saw.

A step is rolled up whole, from rows that are there once. `ClosedStep.revision` counts the
rows that a computation saw; rows only come, so whatever the order in which computations
end, also those of several servers, the fullest one stays.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from collector.describe import RUNNING
from collector.read import each_once

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pyarrow as pa

    from collector.store import Row, Store

LAG_STEPS = 2
"""While a run goes on, its newest steps stay open: their spans are still on the way."""

RUN_WHOLE = -1
"""Step and epoch of the row that tells how much of a run was looked at when all was done."""

SELECT_PRESENT = """
SELECT epoch, step, count() AS num_spans FROM spans
WHERE run_id = {run_id:String} AND step >= 0 GROUP BY epoch, step ORDER BY epoch, step
"""

SELECT_PRESENT_ONCE = """
SELECT epoch, step, count() AS num_spans FROM spans FINAL
WHERE run_id = {run_id:String} AND step >= 0 GROUP BY epoch, step ORDER BY epoch, step
"""

SELECT_ROLLED = """
SELECT epoch, step, num_spans, num_described FROM closed_steps FINAL
WHERE run_id = {run_id:String}
"""

SELECT_DESCRIBED = """
SELECT epoch, count() AS num_described FROM (
    SELECT epoch FROM groups FINAL WHERE run_id = {run_id:String}
    UNION ALL SELECT epoch FROM ranks FINAL WHERE run_id = {run_id:String}
) GROUP BY epoch
"""

SELECT_EXPIRED = """
SELECT epoch, last_step, kept_first, kept_last FROM expired FINAL WHERE run_id = {run_id:String}
"""

SELECT_WHOLE = """
SELECT run_id, num_spans FROM closed_steps FINAL WHERE step = {whole:Int32}
"""

SELECT_ROLLUPS = """
SELECT epoch, step, rank, kind, num_spans, num_unsplit, busy_ns, wait_ns, transfer_ns, exposed_ns
FROM rollups FINAL
WHERE run_id = {run_id:String} AND step >= {first:Int32} AND step <= {last:Int32}
ORDER BY epoch, step, rank, kind
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStep:
    """A step that is to be rolled up, or to be rolled up again."""

    epoch: int
    step: int
    num_spans: int
    """That the store held when it was asked."""

    num_described: int
    """Groups and ranks of the epoch then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedStep:
    """What a step was rolled up from."""

    run_id: str
    epoch: int
    step: int
    begin_ns: int
    end_ns: int
    num_spans: int
    num_ranks: int
    num_described: int
    at_ns: int
    orderings: dict[str, str] = field(default_factory=dict)
    """By ordering, under which one its picture is kept."""

    line_ranks: int = 0
    """Ranks of a line of the whole step's picture; 0: none is kept."""

    @property
    def revision(self) -> int:
        """Grows with whatever the computation saw more of."""
        return self.num_spans + self.num_described


def open_steps(store: Store, run_id: str, *, state: str) -> tuple[OpenStep, ...]:
    """Return the steps whose rollups lack something, by (epoch, step).

    Steps whose spans are kept no longer are left as they were rolled up.

    Args:
        store: The store.
        run_id: The run.
        state: Its state: while it is running, the newest steps are left alone.
    """
    bound = {"run_id": run_id}
    present = each_once(
        store,
        run_id,
        lambda sql: store.rows(sql, bound),
        plain=SELECT_PRESENT,
        once=SELECT_PRESENT_ONCE,
    )
    described = {row["epoch"]: row["num_described"] for row in store.rows(SELECT_DESCRIBED, bound)}
    expired = {row["epoch"]: row for row in store.rows(SELECT_EXPIRED, bound)}
    rolled = {
        (row["epoch"], row["step"]): (row["num_spans"], row["num_described"])
        for row in store.rows(SELECT_ROLLED, bound)
    }
    newest = max(((row["epoch"], row["step"]) for row in present), default=(0, 0))
    found = []
    for row in present:
        place = (row["epoch"], row["step"])
        seen = (row["num_spans"], described.get(row["epoch"], 0))
        if state == RUNNING and place > (newest[0], newest[1] - LAG_STEPS):
            continue
        if rolled.get(place) != seen and not _has_expired(expired.get(row["epoch"]), row["step"]):
            found.append(
                OpenStep(epoch=place[0], step=place[1], num_spans=seen[0], num_described=seen[1])
            )
    return tuple(found)


def in_batches(steps: Sequence[OpenStep], *, max_spans: int) -> Iterator[tuple[OpenStep, ...]]:
    """Yield neighbouring steps of one epoch, as many as have ``max_spans`` spans together."""
    batch: list[OpenStep] = []
    num_spans = 0
    for step in steps:
        apart = batch and (step.epoch != batch[-1].epoch or step.step != batch[-1].step + 1)
        if apart or (batch and num_spans + step.num_spans > max_spans):
            yield tuple(batch)
            batch, num_spans = [], 0
        batch.append(step)
        num_spans += step.num_spans
    if batch:
        yield tuple(batch)


def write_rollups(store: Store, rows: pa.Table, closed: Iterable[ClosedStep]) -> None:
    """Store rollups, and after them what they were computed from."""
    if rows.num_rows:
        store.insert_arrow("rollups", rows)
    store.insert_rows("closed_steps", [_closed_row(step) for step in closed])


def read_rollups(
    store: Store, run_id: str, *, first: int = 0, last: int = (1 << 31) - 1
) -> pa.Table:
    """Return the sums of closed steps, by (epoch, step, rank, kind)."""
    return store.arrow(SELECT_ROLLUPS, {"run_id": run_id, "first": first, "last": last})


def runs_rolled_up(store: Store) -> dict[str, int]:
    """Return by run how many spans the ledger told of when nothing of it was left open."""
    rows = store.rows(SELECT_WHOLE, {"whole": RUN_WHOLE})
    return {row["run_id"]: row["num_spans"] for row in rows}


def note_run_rolled_up(store: Store, run_id: str, *, num_spans: int, at_ns: int) -> None:
    """Note that nothing of a run that has ended is left open.

    Args:
        store: The store.
        run_id: The run.
        num_spans: That the ledger told of before the last look.
        at_ns: Unix time.
    """
    whole = ClosedStep(
        run_id=run_id, epoch=RUN_WHOLE, step=RUN_WHOLE, begin_ns=0, end_ns=0,
        num_spans=num_spans, num_ranks=0, num_described=0, at_ns=at_ns,
    )  # fmt: skip
    store.insert_rows("closed_steps", [_closed_row(whole)])


def _closed_row(step: ClosedStep) -> Row:
    return {**asdict(step), "revision": step.revision}


def _has_expired(row: Row | None, step: int) -> bool:
    if row is None or step > row["last_step"]:
        return False
    kept = zip(row["kept_first"], row["kept_last"], strict=True)
    return not any(first <= step <= last for first, last in kept)
