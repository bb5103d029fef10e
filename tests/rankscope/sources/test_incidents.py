"""Incidents of simulated runs: onset, cost, what changed before, and whether the fix helped."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.read.findings import read_findings, write_findings
from rankscope.collector.read.incidents import MAX_NOTES, Note, write_note
from rankscope.dashboard.records.incident import FixOutcome, IncidentState
from rankscope.sources.incidents import number_findings, read_incident, read_incidents
from rankscope.sources.stored_reports import read_run_lines
from tests.support.rankscope.incident_runs import (
    analysed,
    incident_source,
    restart_as,
    store_run,
)

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store
    from rankscope.sources.incidents import IncidentSource

pytestmark = pytest.mark.slow

SLOW = "slow-compute:rank=5,factor=1.8"


@pytest.fixture(scope="module")
def fixed(store: Store) -> IncidentSource:
    """Return a run with a fault in steps 10 to 19."""
    store_run(store, "fixed", f"{SLOW},steps=10-19")
    return incident_source(store, "fixed")


def test_a_fault_that_was_fixed_is_verified_by_the_steps_since_then(fixed: IncidentSource) -> None:
    (incident,) = read_incidents(fixed)

    assert (incident.cause, incident.ranks, incident.hosts) == (
        "slow-compute",
        (5,),
        ("sim-00002",),
    )
    assert incident.state is IncidentState.FIXED
    assert incident.onset is not None
    assert incident.last is not None
    assert (incident.onset.step, incident.last.step, incident.onset.epoch) == (10, 19, 0)
    assert (incident.onset.at_ns or 0) < (incident.last.at_ns or 0)
    fix = incident.fix
    assert fix is not None
    assert (fix.outcome, fix.first_step, fix.num_before, fix.num_after) == (
        FixOutcome.VERIFIED, 20, 10, 16,
    )  # fmt: skip
    before_s, after_s, usual_s = fix.before_s or 0, fix.after_s or 0, fix.usual_s or 0
    assert after_s == pytest.approx(usual_s, rel=0.05)
    assert before_s > 1.2 * after_s
    # The interval is that of the difference, and excludes none.
    assert 0 < (fix.margin_s or 0) < before_s - after_s


def test_the_cost_is_the_one_of_the_list_of_runs(fixed: IncidentSource) -> None:
    (incident,) = read_incidents(fixed)
    line = next(line for line in read_run_lines(fixed.store) if line.run.run_id == "fixed")

    assert incident.saved_s is not None
    assert incident.lost_device_h == pytest.approx(incident.saved_s * 10 * 8 / 3600)
    assert line.lost_device_h == incident.lost_device_h
    assert line.incident == incident.number


def test_a_fault_that_lasts_is_open_at_the_end_and_ongoing_while_the_job_trains(
    store: Store,
) -> None:
    store_run(store, "lasting", f"{SLOW},steps=10-35")
    source = incident_source(store, "lasting")

    (ended,) = read_incidents(source)
    (running,) = read_incidents(replace(source, state="running"))

    assert (ended.state, ended.fix) == (IncidentState.OPEN_AT_END, None)
    assert running.state is IncidentState.ONGOING


def test_a_crash_ended_the_run_at_no_price(store: Store) -> None:
    store_run(store, "crashed", "crash:rank=3,step=12,kind=cuda-oom", num_steps=20)

    (incident,) = read_incidents(incident_source(store, "crashed", state="failed"))

    assert (incident.cause, incident.state) == ("crash", IncidentState.ENDED_RUN)
    assert (incident.lost_device_h, incident.fix) == (None, None)
    # The step never ended: it began when the one before did.
    assert incident.onset is not None
    assert incident.onset.at_ns is not None


def test_a_fix_with_few_steps_since_is_not_verified_yet(store: Store) -> None:
    store_run(store, "young", f"{SLOW},steps=10-19", num_steps=24)

    (incident,) = read_incidents(incident_source(store, "young"))

    assert incident.state is IncidentState.ENDED
    assert incident.fix is not None
    assert incident.fix.outcome is FixOutcome.TOO_FEW
    assert (incident.fix.num_after, incident.fix.num_needed) == (4, 5)


def test_steps_that_are_as_slow_as_before_are_no_fix(store: Store) -> None:
    # GIVEN another rank that is as slow from the moment on at which the first one is not
    store_run(store, "moved", f"{SLOW},steps=10-19", "slow-compute:rank=2,factor=1.8,steps=20-35")

    incidents = {one.ranks: one for one in read_incidents(incident_source(store, "moved"))}

    assert incidents[5,].fix is not None
    assert incidents[5,].fix.outcome is FixOutcome.NOT_BETTER
    assert incidents[5,].state is IncidentState.ENDED


def test_a_finding_that_came_back_names_the_earlier_one(store: Store) -> None:
    store_run(store, "again", f"{SLOW},steps=8-13", f"{SLOW},steps=26-35")
    analysed(store, "again")
    # As a server that followed the run would have recorded it, in windows.
    whole = read_findings(store, "again")[0]
    first = replace(whole, onset_step=8, last_step=13, closed_ns=whole.opened_ns + 1)
    second = replace(
        whole, number=1, onset_step=26, last_step=35, closed_ns=None, opened_ns=whole.opened_ns + 2
    )
    write_findings(store, [first, second])

    earlier, later = read_incidents(incident_source(store, "again"))[:2]

    assert (earlier.came_back_from, earlier.came_back_as) == (None, 1)
    assert (later.came_back_from, later.came_back_as) == (0, None)
    assert later.state is IncidentState.OPEN_AT_END
    # Only the steps between count for the fix of the first.
    assert earlier.fix is not None
    assert (earlier.fix.outcome, earlier.fix.num_after) == (FixOutcome.VERIFIED, 12)


def test_a_restart_with_another_host_and_commit_is_listed_before_the_onset(store: Store) -> None:
    # GIVEN a run that went on in epoch 1 with step 30, with rank 5 on another host, which is slow
    store_run(store, "restarted")
    store_run(store, "epoch-1", SLOW, num_steps=16)
    restart_as(store, "restarted", "epoch-1", first_step=30)
    of_rank = "SELECT * FROM ranks FINAL WHERE run_id = 'restarted' AND epoch = 1 AND rank = 5"
    (row,) = store.rows(of_rank)
    store.insert_rows("ranks", [{**row, "host": "spare-7", "revision": row["revision"] + 1}])
    commits = {0: "aaa111", 1: "bbb222"}
    for epoch, commit in commits.items():
        manifest = {"git.commit": commit, "config.lr": "0.1", "environment.NCCL_ALGO": "Ring"}
        name = f"hash-{epoch}"
        store.insert_rows(
            "manifests", [{"run_id": "restarted", "manifest_hash": name, "settings": manifest}]
        )
        ranks = store.rows(
            f"SELECT * FROM ranks FINAL WHERE run_id = 'restarted' AND epoch = {epoch}"
        )
        store.insert_rows(
            "ranks",
            [{**each, "manifest_hash": name, "revision": each["revision"] + 2} for each in ranks],
        )

    incident = next(
        one for one in read_incidents(incident_source(store, "restarted")) if one.ranks == (5,)
    )

    assert incident.hosts == ("spare-7",)
    assert incident.onset is not None
    assert incident.onset.epoch == 1
    found = {each.kind: each.text for each in incident.before_onset}
    assert found["restart"].startswith("epoch 1 began with step 30; epoch 0")
    assert found["host"] == "rank 5 moved from sim-00002 to spare-7"
    assert found["setting"] == "git.commit: aaa111 -> bbb222"
    assert {each.num_steps_before for each in incident.before_onset} == {incident.onset.step - 30}


def test_a_restart_that_fixes_it_is_verified_by_the_steps_of_the_next_epoch(store: Store) -> None:
    # GIVEN a fault until the restart, which repeats steps 30 to 35 on the same hosts without it
    store_run(store, "repaired", f"{SLOW},steps=10-35")
    store_run(store, "healthy-epoch", num_steps=16)
    restart_as(store, "repaired", "healthy-epoch", first_step=30)

    (incident,) = read_incidents(incident_source(store, "repaired"))

    assert incident.last is not None
    assert (incident.last.epoch, incident.last.step) == (0, 29)
    assert incident.state is IncidentState.FIXED
    assert incident.fix is not None
    # Step 30 is the start-up of the epoch; steps 30 to 35 of epoch 0 were repeated.
    assert (incident.fix.first_step, incident.fix.num_before, incident.fix.num_after) == (
        31,
        20,
        15,
    )


def test_a_checkpoint_before_the_onset_is_listed_and_a_routine_event_is_not(store: Store) -> None:
    store_run(store, "saving", f"{SLOW},steps=14-25", "checkpoint:every=12,ms=300", num_steps=26)
    source = incident_source(store, "saving")
    number = next(one.number for one in read_incidents(source) if one.cause == "slow-compute")
    (step,) = store.rows("SELECT min(start_ns) AS ns FROM steps WHERE run_id='saving' AND step=13")
    events = {"compile": "step recompiled: shape", "pace": "", "alert-note": "of a person"}
    store.insert_rows(
        "events",
        [
            {"run_id": "saving", "epoch": 0, "rank": 5, "at_ns": step["ns"] + 10**8, "kind": kind,
             "text": text, "process": kind}
            for kind, text in events.items()
        ],
    )  # fmt: skip

    incident = read_incident(source, number)

    assert incident is not None
    kinds = [each.kind for each in incident.before_onset]
    assert "checkpoint" in kinds
    assert "compile" in kinds
    assert not {"pace", "alert-note"} & set(kinds)
    (compiled,) = (each for each in incident.before_onset if each.kind == "compile")
    assert (compiled.text, compiled.step) == ("step recompiled: shape (rank 5)", 13)


def test_the_history_of_the_host_has_the_findings_of_other_runs(store: Store) -> None:
    store_run(store, "host-a", f"{SLOW},steps=10-19")
    store_run(store, "host-b", "slow-compute:rank=4,factor=1.8,steps=10-19")
    analysed(store, "host-a")

    (incident,) = read_incidents(incident_source(store, "host-b"))

    # Ranks 4 and 5 share host sim-00002; the incident itself is not among the others.
    others = [(one.run_id, one.ranks) for one in incident.history]
    assert ("host-a", (5,)) in others
    assert "host-b" not in {run for run, _ in others}


def test_the_number_of_an_incident_is_the_same_in_each_report(store: Store) -> None:
    store_run(store, "stable", f"{SLOW},steps=10-19", "slow-compute:rank=2,factor=1.6,steps=22-35")
    report = analysed(store, "stable")

    numbers = number_findings(store, report)
    again = number_findings(store, analysed(store, "stable"))

    assert numbers == again
    found = {report.findings[place].ranks: number for place, number in enumerate(numbers)}
    stored = {one.ranks: one.number for one in read_findings(store, "stable")}
    assert {ranks: found[ranks] for ranks in stored} == stored


def test_an_unknown_number_is_none_and_notes_are_the_newest_first(fixed: IncidentSource) -> None:
    for number in range(MAX_NOTES + 1):
        note = Note(at_ns=1_000 + number, by="ana", text=f"<b>{number}</b>\nsecond line")
        write_note(fixed.store, "fixed", 0, note)

    incident = read_incident(fixed, 0)

    assert read_incident(fixed, 7) is None
    assert incident is not None
    assert len(incident.notes) == MAX_NOTES
    assert incident.notes[0].text == f"<b>{MAX_NOTES}</b>\nsecond line"
    assert incident.notes[0].by == "ana"
