from __future__ import annotations

import itertools
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.collector.read.goodput import read_run_times
from rankscope.collector.read.runs import list_runs, read_run
from rankscope.collector.read.spans import read_filtered_spans, read_outline, read_spans
from rankscope.collector.read.steps import read_steps
from rankscope.collector.retention.deletion import Deletions
from rankscope.collector.retention.retention import (
    HOUR_NS,
    SAMPLE_MARGIN_NS,
    Retention,
    RetentionPolicy,
    RunEnd,
    due_runs,
)
from rankscope.collector.retention.span_days import (
    DAY_NS,
    STEPS_AFTER,
    STEPS_BEFORE,
    SpanDays,
    kept_steps,
)
from tests.support.collector.interrupted_store import Interrupted, PowerCutError, power_cut

if TYPE_CHECKING:
    from rankscope.collector.identity import Row
    from rankscope.collector.store.store import Store

pytestmark = pytest.mark.slow

NOW_NS = 2_000_000_000_000_000_000
SECOND_NS = 1_000_000_000
MINUTE_NS = 60 * SECOND_NS
NUM_STEPS = 200


def ended(run_id: str, age_ns: int, **changes: str) -> RunEnd:
    fields = {"state": "ended", "source_format": "rankscope", **changes}
    return RunEnd(run_id=run_id, closed_ns=NOW_NS - age_ns, **fields)


def test_runs_expire_a_year_after_their_end() -> None:
    ends = [ended("old", 364 * DAY_NS), ended("oldest", 366 * DAY_NS)]

    assert due_runs(ends, RetentionPolicy(), now_ns=NOW_NS) == ("oldest",)


@pytest.mark.parametrize(
    "end",
    [
        ended("running", 40 * DAY_NS, state="running"),
        ended("running for years", 4000 * DAY_NS, state="running"),
        ended("imported", 4000 * DAY_NS, source_format="bytedance"),
        ended("from the future", -DAY_NS),
    ],
    ids=lambda end: end.run_id,
)
def test_runs_that_never_expire(end: RunEnd) -> None:
    assert due_runs([end], RetentionPolicy(), now_ns=NOW_NS) == ()


def test_a_run_with_recent_rows_is_live_whatever_its_state() -> None:
    at_once = RetentionPolicy(spans_ns=0, findings_ns=0, runs_ns=0)

    assert due_runs([ended("lost", 14 * 60 * SECOND_NS)], at_once, now_ns=NOW_NS) == ()
    assert due_runs([ended("lost", 16 * 60 * SECOND_NS)], at_once, now_ns=NOW_NS) == ("lost",)


def test_a_policy_without_times_expires_nothing() -> None:
    policy = RetentionPolicy(spans_ns=None, findings_ns=None, runs_ns=None)

    assert due_runs([ended("old", 4000 * DAY_NS)], policy, now_ns=NOW_NS) == ()


def test_kept_steps_cover_short_findings_and_both_ends_of_long_ones() -> None:
    assert kept_steps([(50, 60)], last_step=1000) == [(42, 92)]
    assert kept_steps([(50, 500)], last_step=1000) == [(42, 82), (492, 532)]
    assert kept_steps([(2, 2)], last_step=10) == [(0, 10)]
    assert kept_steps([(50, 60), (90, 90)], last_step=1000) == [(42, 122)]
    assert kept_steps([], last_step=1000) == []
    assert kept_steps([(5000, 5000)], last_step=1000) == []


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=8))
def test_every_onset_and_end_is_kept_in_disjoint_ranges(ends: list[tuple[int, int]]) -> None:
    findings = [(min(pair), max(pair)) for pair in ends]
    last_step = 250
    ranges = kept_steps(findings, last_step=last_step)
    kept = {step for first, last in ranges for step in range(first, last + 1)}

    for step in {step for pair in findings for step in pair if step <= last_step}:
        assert set(range(max(step - STEPS_BEFORE, 0), step + 1)) <= kept
        assert set(range(step, min(step + STEPS_AFTER, last_step) + 1)) <= kept
    assert all(a[1] + 1 < b[0] for a, b in itertools.pairwise(ranges))
    assert kept <= set(range(last_step + 1))


def store_run(store: Store, run_id: str, *, state: str = "ended", closed_ns: int = NOW_NS) -> None:
    """Store a run of one rank that ended at ``closed_ns``, with one step per second."""
    began_ns = closed_ns - NUM_STEPS * SECOND_NS
    store.insert_rows(
        "runs",
        [
            {
                "run_id": run_id,
                "created_ns": began_ns,
                "ended_ns": None if state == "running" else closed_ns,
                "state": state,
                "source_format": "rankscope",
                "world_size": 1,
            }
        ],
    )
    steps = [
        {
            "run_id": run_id,
            "step": step,
            "start_ns": began_ns + step * SECOND_NS,
            "end_ns": began_ns + (step + 1) * SECOND_NS,
            "row": step,
        }
        for step in range(NUM_STEPS)
    ]
    spans = [{key: row[key] for key in ("run_id", "step", "start_ns", "row")} for row in steps]
    outside = {"run_id": run_id, "step": -1, "start_ns": began_ns - SECOND_NS, "row": 9999}
    store.insert_rows("steps", steps)
    store.insert_rows("spans", [*spans, outside])
    store.insert_rows("microbatches", [{"run_id": run_id, "step": step} for step in range(3)])
    line = {"run_id": run_id, "state": "stored", "at_ns": closed_ns, "num_spans": NUM_STEPS}
    store.insert_rows("ledger", [line])


def steps_with_spans(store: Store, run_id: str) -> list[int]:
    """Return the steps of which a reader gets spans, with -1 for those outside any step."""
    spans = read_filtered_spans(store, run_id, first=-1, last=None)
    return sorted({row["step"] for row in spans.select(["step"]).to_pylist()})


def expire(store: Store, *, after_ns: int, policy: RetentionPolicy | None = None) -> dict[str, int]:
    """Expire at a time after `NOW_NS`; return the numbers of removed spans by run."""
    retention = Retention(store, Deletions(store), policy=policy, unix_ns=lambda: NOW_NS + after_ns)
    return retention.expire().num_spans


def add_finding(store: Store, run_id: str, first: int, last: int) -> None:
    finding = {"run_id": run_id, "cause": "slow-compute", "first_step": first, "last_step": last}
    store.insert_rows("findings", [{**finding, "epoch": 0}])


@pytest.mark.parametrize("state", ["running", "ended"])
def test_spans_expire_by_their_own_time_except_around_findings(
    store: Store, run_id: str, state: str
) -> None:
    # GIVEN a run, live or ended, with a finding
    store_run(store, run_id, state=state)
    add_finding(store, run_id, 100, 101)
    store.insert_rows(
        "findings", [{"run_id": run_id, "cause": "healthy", "first_step": 5, "position": 1}]
    )

    # WHEN their day is older than two days THEN it is dropped, except the steps around the finding
    assert run_id not in expire(store, after_ns=49 * HOUR_NS)
    assert expire(store, after_ns=3 * DAY_NS)[run_id] == NUM_STEPS + 1 - 42
    assert steps_with_spans(store, run_id) == list(range(92, 134))
    (expired,) = store.rows("SELECT * FROM expired WHERE run_id = {r:String}", {"r": run_id})
    assert (expired["last_step"], expired["kept_first"], expired["kept_last"]) == (199, [92], [133])
    assert store.rows("SELECT * FROM spans WHERE run_id = {r:String}", {"r": run_id}) == []
    # AND all readers find them there, the steps of the run stay, and a second call changes nothing
    assert read_spans(store, run_id)["step"].to_pylist() == list(range(92, 134))
    assert read_outline(store, run_id, epoch=0, step=100).num_all == 1
    (counted,) = [row for row in list_runs(store) if row["run_id"] == run_id]
    assert counted["num_steps"] == NUM_STEPS
    assert run_id not in expire(store, after_ns=4 * DAY_NS)
    # AND a month later those are gone too.
    assert expire(store, after_ns=32 * DAY_NS)[run_id] == 42
    assert steps_with_spans(store, run_id) == []
    Deletions(store).delete(run_id)  # the store is shared


def test_pictures_expire_a_month_after_they_were_drawn(store: Store, run_id: str) -> None:
    # GIVEN a run with a finding and one without, whose later half was drawn ten days later
    runs = [run_id, f"{run_id}-found"]
    for run in runs:
        store_run(store, run)
        drawn = {step: NOW_NS + step // 100 * 10 * DAY_NS for step in range(NUM_STEPS)}
        store.insert_rows(
            "closed_steps",
            [{"run_id": run, "step": step, "at_ns": at} for step, at in drawn.items()],
        )
        store.insert_rows("pictures", [{"run_id": run, "step": step} for step in drawn])
    add_finding(store, runs[1], 50, 51)

    def kept() -> list[int]:
        return [
            len(store.rows("SELECT step FROM pictures WHERE run_id = {r:String}", {"r": run}))
            for run in runs
        ]

    # WHEN the spans expire, and then those around the finding THEN no picture goes before its time
    expire(store, after_ns=3 * DAY_NS)
    assert kept() == [NUM_STEPS, NUM_STEPS]
    expire(store, after_ns=32 * DAY_NS)
    assert kept() == [NUM_STEPS // 2, NUM_STEPS // 2]
    expire(store, after_ns=42 * DAY_NS)
    assert kept() == [0, 0]
    for run in runs:
        Deletions(store).delete(run)  # the store is shared


def test_a_live_run_loses_one_day_after_the_other(store: Store, run_id: str) -> None:
    # GIVEN three days of a live run, with a step over midnight, and findings on both sides
    first_day = NOW_NS // DAY_NS + 100
    rows: list[dict[str, Any]] = [
        {"run_id": run_id, "step": step, "row": 2 * step + half,
         "start_ns": first_day * DAY_NS + (10 * step + 5 * half) * DAY_NS // 95}
        for step in range(30) for half in range(2)
    ]  # fmt: skip
    store.insert_rows("spans", rows)
    store.insert_rows(
        "runs", [{"run_id": run_id, "state": "running", "source_format": "rankscope"}]
    )
    add_finding(store, run_id, 9, 9)
    midnight = next(row["step"] for row in rows if row["start_ns"] >= (first_day + 1) * DAY_NS)
    assert rows[2 * midnight]["start_ns"] < (first_day + 1) * DAY_NS  # step 9 is in both days
    now_ns = (first_day + 3) * DAY_NS - NOW_NS
    kept = [step for step in range(1, 30) for _ in range(2)]

    # WHEN the first day expires THEN all later spans stay, and step 9 is whole
    expire(store, after_ns=now_ns)
    assert read_spans(store, run_id)["step"].to_pylist() == kept
    assert [row["rows"] for row in parts_of_days(store, first_day, 3)] == [19, 19]

    # WHEN the second expires THEN the steps after the finding are kept for its sake
    expire(store, after_ns=now_ns + DAY_NS)
    assert read_spans(store, run_id)["step"].to_pylist() == kept
    expire(store, after_ns=now_ns + 40 * DAY_NS)
    assert steps_with_spans(store, run_id) == []


def parts_of_days(store: Store, first_day: int, num_days: int) -> list[dict[str, int]]:
    return store.rows(
        "SELECT sum(rows) AS rows FROM system.parts WHERE active AND table = 'spans'"
        " AND toInt32(partition) >= {first:Int32} AND toInt32(partition) < {end:Int32}"
        " GROUP BY partition ORDER BY partition",
        {"first": first_day, "end": first_day + num_days},
    )


def test_an_imported_trace_stays_whole(store: Store, run_id: str) -> None:
    store_run(store, run_id)
    changes = {"run_id": run_id, "source_format": "kineto", "state": "ended", "revision": 9}
    store.insert_rows("runs", [changes])

    assert run_id not in expire(store, after_ns=400 * DAY_NS)
    assert run_id not in expire(store, after_ns=500 * DAY_NS)

    assert steps_with_spans(store, run_id) == [-1, *range(NUM_STEPS)]
    assert read_run(store, run_id).expired == []
    assert read_saves(store, run_id) == []
    Deletions(store).delete(run_id)


@pytest.mark.parametrize("num_statements", range(12))
def test_an_expiry_that_was_interrupted_goes_on(
    store: Store, run_id: str, num_statements: int
) -> None:
    # GIVEN an expiry that dies before one of its statements; later tests need not delete its run
    store_run(store, run_id, state="running")
    add_finding(store, run_id, 100, 101)
    dying = Interrupted(store, power_cut, at=num_statements)
    with suppress(PowerCutError):
        SpanDays(dying).expire(first_day=NOW_NS // DAY_NS + 1, now_ns=NOW_NS)  # type: ignore[arg-type]
    before = read_spans(store, run_id)["step"].to_pylist()
    assert before in [list(range(NUM_STEPS)), list(range(92, 134))]  # nothing in between shows

    # WHEN it runs again THEN it ends as if it had not been interrupted
    expire(store, after_ns=3 * DAY_NS)
    assert read_spans(store, run_id)["step"].to_pylist() == list(range(92, 134))
    assert parts_of_days(store, NOW_NS // DAY_NS - 1, 3) == []


def read_saves(store: Store, run_id: str) -> list[Row]:
    return read_run_times(store, run_id).saves


def test_saves_of_expired_steps_stay_known(store: Store, run_id: str) -> None:
    # GIVEN two ranks that save at once, in a step without a finding, and once outside any step
    began_ns = NOW_NS + 1000 * DAY_NS
    save = {"run_id": run_id, "kind": "checkpoint", "track": "main", "start_ns": began_ns}
    store.insert_rows(
        "spans",
        [
            {**save, "step": 3, "rank": 0, "duration_ns": 20},
            {**save, "step": 3, "rank": 1, "start_ns": began_ns + 10, "duration_ns": 20},
            {**save, "step": -1, "row": 7, "duration_ns": 5},
        ],
    )
    store.insert_rows(
        "runs", [{"run_id": run_id, "state": "running", "source_format": "rankscope"}]
    )
    before = read_saves(store, run_id)
    assert [(row["step"], row["saving_ns"]) for row in before] == [(-1, 5), (3, 30)]

    expire(store, after_ns=1003 * DAY_NS)

    assert steps_with_spans(store, run_id) == []
    assert read_saves(store, run_id) == before


def test_a_jump_of_the_clock_drops_no_spans(store: Store, run_id: str) -> None:
    store_run(store, run_id)
    now = {"unix": NOW_NS, "monotonic": 0}
    retention = Retention(
        store, Deletions(store),
        unix_ns=lambda: now["unix"], monotonic_ns=lambda: now["monotonic"],
    )  # fmt: skip

    now["unix"] += 40 * DAY_NS
    assert run_id not in retention.expire().num_spans
    now["monotonic"] += 3 * DAY_NS
    assert run_id in retention.expire().num_spans


def test_a_run_without_a_description_expires_once_it_is_silent(store: Store, run_id: str) -> None:
    # GIVEN a run with spans and no row in `runs`, and an interrupted import
    rows = [{"run_id": run_id, "step": step, "row": step} for step in range(3)]
    store.insert_rows("steps", rows)
    line = {"at_ns": NOW_NS, "state": "stored"}
    store.insert_rows("ledger", [{**line, "run_id": run_id, "num_spans": 3}])
    begun = f"{run_id}-import"
    store.insert_rows("ledger", [{**line, "run_id": begun, "rank": -1}])
    times = {"unix": NOW_NS + 400 * DAY_NS, "monotonic": 0}
    retention = Retention(
        store,
        Deletions(store),
        unix_ns=lambda: times["unix"],
        monotonic_ns=lambda: times["monotonic"],
    )

    # WHEN this process saw nothing of the run for long, THEN it expires like an ended one
    assert run_id not in retention.expire().runs
    times["monotonic"] += 16 * MINUTE_NS
    gone = retention.expire().runs

    assert run_id in gone
    assert begun not in gone
    assert read_steps(store, run_id).num_rows == 0


def test_late_rows_make_a_run_live_again(store: Store, run_id: str) -> None:
    store_run(store, run_id)
    later = NOW_NS + 366 * DAY_NS
    line = {"run_id": run_id, "segment": 2, "state": "stored", "at_ns": later}
    store.insert_rows("ledger", [line])

    expire(store, after_ns=366 * DAY_NS)
    assert not Deletions(store).is_deleted(run_id)
    expire(store, after_ns=732 * DAY_NS)
    assert Deletions(store).is_deleted(run_id)


def test_a_run_with_recent_heartbeats_is_live(store: Store, run_id: str) -> None:
    store_run(store, run_id)
    later = NOW_NS + 366 * DAY_NS
    store.insert_rows("heartbeats", [{"run_id": run_id, "at_ns": later, "state": "training"}])

    expire(store, after_ns=366 * DAY_NS + 14 * MINUTE_NS)
    assert not Deletions(store).is_deleted(run_id)
    expire(store, after_ns=366 * DAY_NS + 16 * MINUTE_NS)
    assert Deletions(store).is_deleted(run_id)


def test_of_an_old_clock_its_first_offset_and_last_error_stay(store: Store, run_id: str) -> None:
    # GIVEN a host that reported its clock each minute, of two boots, one of which goes on
    minutes = range(3 * 24 * 60)
    began_ns = time.time_ns() - len(minutes) * MINUTE_NS
    for boot, num_reports in (("first", 50), ("second", len(minutes))):
        rows = [
            {"host": run_id, "boot_id": boot, "at_ns": began_ns + minute * MINUTE_NS,
             "offset_ns": minute, "clock_error_ns": 1000 + minute}
            for minute in minutes[:num_reports]
        ]  # fmt: skip
        store.insert_rows("clock", rows[: num_reports // 2])
        store.insert_rows("clock", rows[num_reports // 2 :])

    def read() -> list[Row]:
        return store.rows(
            "SELECT boot_id, argMin(offset_ns, at_ns) AS offset_ns, min(at_ns) AS begin_ns,"
            " argMax(clock_error_ns, at_ns) AS error_ns FROM clock"
            " WHERE host = {h:String} GROUP BY boot_id ORDER BY boot_id",
            {"h": run_id},
        )

    before = read()

    store.command("OPTIMIZE TABLE clock FINAL")

    assert read() == before
    (left,) = store.rows("SELECT count() AS n FROM clock WHERE host = {h:String}", {"h": run_id})
    assert left["n"] <= 2 * 24 * 60 + 2


def test_samples_expire_with_the_spans_around_them(store: Store, run_id: str) -> None:
    far = NOW_NS + 2000 * DAY_NS  # far from the runs of other tests
    store_run(store, run_id, closed_ns=far)
    finding = {"run_id": run_id, "cause": "slow-compute", "first_step": 150, "last_step": 150}
    store.insert_rows("findings", [finding])
    began_ns = far - NUM_STEPS * SECOND_NS
    times = {
        "before all": began_ns - 10 * SAMPLE_MARGIN_NS,
        "at step 20": began_ns + 20 * SECOND_NS,
        "at step 150": began_ns + 150 * SECOND_NS,
        "now": far + 70 * HOUR_NS,
    }
    rows = [{"run_id": "", "host": run_id, "name": name, "at_ns": at} for name, at in times.items()]
    store.insert_rows("samples", rows)

    expire(store, after_ns=2003 * DAY_NS)

    left = store.rows("SELECT name FROM samples WHERE host = {h:String}", {"h": run_id})
    assert sorted(row["name"] for row in left) == ["at step 150", "now"]
