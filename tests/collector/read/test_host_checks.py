"""Results of host checks in the store: newest examinations, offenders, hosts to be examined."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.host.heartbeat import heartbeat_row
from rankscope.collector.read.findings import StoredFinding, write_findings
from rankscope.collector.read.host_checks import (
    REFRESH_NS,
    TABLE,
    ExaminationRequests,
    StoredCheck,
    check_row,
    read_newest_checks,
    read_offenders,
)
from rankscope.collector.retention.retention import expire_host_checks
from tests.collector.host.test_heartbeat import BEAT
from tests.support.collector.serving import serving

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store
    from tests.collector.conftest import FakeClock

pytestmark = pytest.mark.slow

NOW_NS = 1_800_000_000 * 10**9
CHECK = StoredCheck(
    host="gpu07", at_ns=NOW_NS, occasion="command", section="GPUs", name="gpu-ecc", state="error",
    part="GPU 3", reason="5 uncorrectable memory errors", remedy="reset the GPU",
)  # fmt: skip
FINDING = StoredFinding(
    run_id="", number=0, epoch=0, cause="slow-compute", ranks=(1,), onset_step=3, last_step=9,
    checked_step=9, slowdown=1.5, recoverable_ratio=0.9, confidence=0.9, evidence="slow",
    opened_ns=NOW_NS, updated_ns=NOW_NS, closed_ns=None,
)  # fmt: skip


@pytest.fixture(autouse=True)
def empty(store: Store) -> None:
    for table in (TABLE, "findings", "ranks"):
        store.command(f"TRUNCATE TABLE {table}")


def write(store: Store, *checks: StoredCheck) -> None:
    store.insert_rows(TABLE, [check_row(check) for check in checks])


def test_the_newest_examination_of_each_host_and_its_active_tests_are_read(store: Store) -> None:
    active = replace(CHECK, at_ns=NOW_NS - 5, occasion="active", name="matmul", section="active")
    healthy = replace(CHECK, at_ns=NOW_NS + 9, state="healthy", part="")
    other = replace(CHECK, host="gpu08")
    write(store, CHECK, CHECK, active, healthy, other)

    assert read_newest_checks(store, since_ns=0) == (active, healthy, other)


def test_offenders_deviated_in_several_examinations(store: Store) -> None:
    write(store, CHECK, replace(CHECK, host="once"))
    for number in (1, 2):
        again = replace(CHECK, at_ns=NOW_NS + number, run_id=f"run{number}", state="warning")
        write(store, again, replace(again, host="healthy", state="healthy"))

    (offender,) = read_offenders(store, since_ns=0, most=9)

    assert (offender.host, offender.name, offender.is_error) == ("gpu07", "gpu-ecc", True)
    assert (offender.num_examinations, offender.num_runs) == (3, 2)
    assert (offender.first_ns, offender.last_ns) == (NOW_NS, NOW_NS + 2)


def test_a_host_is_examined_once_for_each_new_finding(
    store: Store, run_id: str, clock: FakeClock
) -> None:
    requests = ExaminationRequests(store, unix_ns=lambda: NOW_NS + 10**9, monotonic_ns=clock)
    places = [(0, "gpu06"), (1, "gpu07"), (2, "gpu08")]
    store.insert_rows(
        "ranks",
        [{"run_id": run_id, "epoch": 0, "rank": rank, "host": host} for rank, host in places],
    )
    hosts = [host for _, host in places]
    assert requests.wanted(hosts) == []

    write_findings(store, [replace(FINDING, run_id=run_id)])
    assert requests.wanted(hosts) == []  # all agents share an answer
    clock.advance_s(REFRESH_NS / 1e9)
    assert requests.wanted(hosts) == ["gpu07"]
    assert requests.wanted(["gpu08"]) == []

    write(store, replace(CHECK, at_ns=NOW_NS + 1))
    clock.advance_s(REFRESH_NS / 1e9)
    assert requests.wanted(hosts) == []


def test_a_closed_or_old_finding_asks_for_nothing(store: Store, run_id: str) -> None:
    store.insert_rows("ranks", [{"run_id": run_id, "epoch": 0, "rank": 1, "host": "gpu07"}])
    old = replace(FINDING, run_id=run_id, opened_ns=NOW_NS - 3600 * 10**9)
    write_findings(store, [old, replace(FINDING, run_id=run_id, number=1, closed_ns=NOW_NS)])

    requests = ExaminationRequests(store, unix_ns=lambda: NOW_NS + 10**9)

    assert requests.wanted(["gpu07"]) == []


def test_the_answer_to_heartbeats_asks_and_the_rows_are_taken(store: Store, run_id: str) -> None:
    row = heartbeat_row(BEAT) | {"run_id": run_id, "host": "gpu07"}
    with serving(
        store, to_examine=lambda hosts: sorted({"gpu07", "gpu09"} & {*hosts})
    ) as collector:
        asked = collector.rows("heartbeats", [row])
        taken = collector.rows(TABLE, [check_row(CHECK), check_row(replace(CHECK, host="gpu09"))])
        nameless = collector.rows(TABLE, [{"host": "gpu07"}])

    assert asked.json() == {"schema": 1, "num_rows": 1, "to_examine": ["gpu07"]}
    assert (taken.status_code, nameless.status_code) == (200, 422)
    assert {check.host for check in read_newest_checks(store, since_ns=0)} == {"gpu07", "gpu09"}


def test_old_checks_expire(store: Store) -> None:
    write(store, CHECK, replace(CHECK, at_ns=NOW_NS - 9))

    assert expire_host_checks(store, before_ns=NOW_NS) == 1
    assert read_newest_checks(store, since_ns=0) == (CHECK,)


def test_invisible_letters_are_escaped_and_texts_cut() -> None:
    row = check_row(replace(CHECK, host="a\x1bb", reason="x" * 5000, remedy="a\nb"))

    assert (row["host"], len(row["reason"]), row["remedy"]) == ("a\\x1bb", 1000, "a\\nb")
