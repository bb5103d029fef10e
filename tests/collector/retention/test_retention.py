from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.collector.read.runs import list_runs
from rankscope.collector.retention.deletion import Deletions
from rankscope.collector.retention.retention import (
    DAY_NS,
    HOUR_NS,
    SAMPLE_MARGIN_NS,
    STEPS_AFTER,
    STEPS_BEFORE,
    DueRuns,
    Retention,
    RetentionPolicy,
    RunEnd,
    due_runs,
    kept_steps,
)

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store

pytestmark = pytest.mark.slow

NOW_NS = 2_000_000_000_000_000_000
SECOND_NS = 1_000_000_000
MINUTE_NS = 60 * SECOND_NS
NUM_STEPS = 200


def ended(run_id: str, age_ns: int, **changes: str) -> RunEnd:
    fields = {"state": "ended", "source_format": "rankscope", **changes}
    return RunEnd(run_id=run_id, closed_ns=NOW_NS - age_ns, **fields)


def test_spans_expire_after_2_days_around_findings_after_30_and_runs_after_365() -> None:
    ends = [
        ended("young", 47 * HOUR_NS),
        ended("old", 49 * HOUR_NS),
        ended("older", 31 * DAY_NS),
        ended("oldest", 366 * DAY_NS),
    ]

    assert due_runs(ends, RetentionPolicy(), now_ns=NOW_NS) == DueRuns(
        whole=("oldest",), all_spans=("older",), other_spans=("old",)
    )


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
    assert due_runs([end], RetentionPolicy(), now_ns=NOW_NS) == DueRuns()


def test_a_run_with_recent_rows_is_live_whatever_its_state() -> None:
    at_once = RetentionPolicy(spans_ns=0, findings_ns=0, runs_ns=0)

    assert due_runs([ended("lost", 14 * 60 * SECOND_NS)], at_once, now_ns=NOW_NS) == DueRuns()
    assert due_runs([ended("lost", 16 * 60 * SECOND_NS)], at_once, now_ns=NOW_NS).whole == ("lost",)


def test_a_policy_without_times_expires_nothing() -> None:
    policy = RetentionPolicy(spans_ns=None, findings_ns=None, runs_ns=None)

    assert due_runs([ended("old", 4000 * DAY_NS)], policy, now_ns=NOW_NS) == DueRuns()


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
    outside = {"run_id": run_id, "step": -1, "row": 9999}
    store.insert_rows("steps", steps)
    store.insert_rows("spans", [*spans, outside])
    store.insert_rows("microbatches", [{"run_id": run_id, "step": step} for step in range(3)])
    store.insert_rows("ledger", [{"run_id": run_id, "at_ns": closed_ns, "num_spans": NUM_STEPS}])


def steps_with_spans(store: Store, run_id: str) -> list[int]:
    rows = store.rows(
        "SELECT DISTINCT step FROM spans WHERE run_id = {r:String} ORDER BY step", {"r": run_id}
    )
    return [row["step"] for row in rows]


def expire(store: Store, *, after_ns: int, policy: RetentionPolicy | None = None) -> dict[str, int]:
    """Expire at a time after `NOW_NS`; return the numbers of removed spans by run."""
    retention = Retention(store, Deletions(store), policy=policy, unix_ns=lambda: NOW_NS + after_ns)
    return retention.expire().num_spans


def test_an_old_run_keeps_only_the_spans_around_its_finding(store: Store, run_id: str) -> None:
    store_run(store, run_id)
    finding = {"run_id": run_id, "cause": "slow-compute", "first_step": 100, "last_step": 101}
    store.insert_rows("findings", [{**finding, "epoch": 0}])
    store.insert_rows("findings", [{**finding, "cause": "healthy", "first_step": 5, "position": 1}])

    assert expire(store, after_ns=HOUR_NS).get(run_id) is None
    assert expire(store, after_ns=49 * HOUR_NS)[run_id] == NUM_STEPS + 1 - 42

    assert steps_with_spans(store, run_id) == list(range(92, 134))
    (expired,) = store.rows("SELECT * FROM expired WHERE run_id = {r:String}", {"r": run_id})
    assert (expired["last_step"], expired["kept_first"], expired["kept_last"]) == (199, [92], [133])
    # Its steps are kept, and a second call changes nothing.
    (counted,) = [row for row in list_runs(store) if row["run_id"] == run_id]
    assert counted["num_steps"] == NUM_STEPS
    assert run_id not in expire(store, after_ns=50 * HOUR_NS)
    # A month later the finding has no spans, a year later the run is gone for good.
    assert expire(store, after_ns=31 * DAY_NS)[run_id] == 42
    assert steps_with_spans(store, run_id) == []
    expire(store, after_ns=366 * DAY_NS)
    assert run_id not in [row["run_id"] for row in list_runs(store)]
    assert Deletions(store).is_deleted(run_id)


def test_a_running_run_never_expires(store: Store, run_id: str) -> None:
    store_run(store, run_id, state="running")

    assert run_id not in expire(store, after_ns=40 * DAY_NS)

    assert steps_with_spans(store, run_id) == [-1, *range(NUM_STEPS)]
    Deletions(store).delete(run_id)  # the store is shared, and a live run keeps its hosts' samples


def test_a_run_without_a_description_expires_once_it_is_silent(store: Store, run_id: str) -> None:
    # GIVEN a run with spans and no row in `runs`, and an interrupted import
    rows = [{"run_id": run_id, "step": step, "row": step} for step in range(3)]
    store.insert_rows("spans", rows)
    store.insert_rows("ledger", [{"run_id": run_id, "at_ns": NOW_NS, "num_spans": 3}])
    begun = f"{run_id}-import"
    store.insert_rows("ledger", [{"run_id": begun, "at_ns": NOW_NS, "rank": -1}])
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
    assert steps_with_spans(store, run_id) == []


def test_late_rows_make_a_run_live_again(store: Store, run_id: str) -> None:
    store_run(store, run_id)
    later = NOW_NS + 49 * HOUR_NS
    store.insert_rows("ledger", [{"run_id": run_id, "segment": 2, "at_ns": later}])

    assert run_id not in expire(store, after_ns=49 * HOUR_NS)
    assert run_id in expire(store, after_ns=98 * HOUR_NS)


def test_a_run_with_recent_heartbeats_is_live(store: Store, run_id: str) -> None:
    store_run(store, run_id)
    later = NOW_NS + 49 * HOUR_NS
    store.insert_rows("heartbeats", [{"run_id": run_id, "at_ns": later, "state": "training"}])

    assert run_id not in expire(store, after_ns=49 * HOUR_NS + 14 * MINUTE_NS)
    assert run_id in expire(store, after_ns=49 * HOUR_NS + 16 * MINUTE_NS)


def test_samples_expire_with_the_spans_around_them(store: Store, run_id: str) -> None:
    far = NOW_NS + 1000 * DAY_NS  # far from the runs of other tests
    store_run(store, run_id, closed_ns=far)
    finding = {"run_id": run_id, "cause": "slow-compute", "first_step": 150, "last_step": 150}
    store.insert_rows("findings", [finding])
    began_ns = far - NUM_STEPS * SECOND_NS
    times = {
        "before all": began_ns - 10 * SAMPLE_MARGIN_NS,
        "at step 20": began_ns + 20 * SECOND_NS,
        "at step 150": began_ns + 150 * SECOND_NS,
        "now": far + 49 * HOUR_NS,
    }
    rows = [{"run_id": "", "host": run_id, "name": name, "at_ns": at} for name, at in times.items()]
    store.insert_rows("samples", rows)

    expire(store, after_ns=1000 * DAY_NS + 49 * HOUR_NS)

    left = store.rows("SELECT name FROM samples WHERE host = {h:String}", {"h": run_id})
    assert sorted(row["name"] for row in left) == ["at step 150", "now"]
