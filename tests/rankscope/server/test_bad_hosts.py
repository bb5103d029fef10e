"""Hosts to alert about: errors of their checks, and findings of several runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.read.findings import write_findings
from rankscope.collector.read.host_checks import TABLE, check_row
from rankscope.collector.read.hosts import HostChange, HostMark, write_host_changes
from rankscope.server.alert_watch import HOSTS_NS, AlertWatch
from rankscope.server.alerting import Alerting
from rankscope.server.bad_hosts import BadHosts
from rankscope.server.reports import Reports
from rankscope.sources.store_source import StoreSource
from tests.collector.read.test_host_checks import CHECK, FINDING, NOW_NS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope.analysis.alert_signals import HostRecord
    from rankscope.collector.store.store import Store

pytestmark = pytest.mark.slow

S = 1_000_000_000


def write_run(
    store: Store, run_id: str, *, at_s: int, named: Sequence[int] = (), cause: str = "slow-compute"
) -> None:
    """Store a run of hosts a to d with two ranks each, and one finding of some ranks."""
    store.insert_rows(
        "ranks",
        [
            {"run_id": run_id, "epoch": 0, "rank": rank, "host": "abcd"[rank // 2],
             "started_ns": NOW_NS + at_s * S}
            for rank in range(8)
        ],
    )  # fmt: skip
    if named:
        at_ns = NOW_NS + at_s * S
        finding = replace(FINDING, run_id=run_id, ranks=tuple(named), cause=cause)
        write_findings(store, [replace(finding, severity="warning", opened_ns=at_ns)])


def named(records: Sequence[HostRecord]) -> dict[str, tuple[list[str], bool]]:
    return {each.host: (list(each.named_by), each.is_fit_since) for each in records}


def test_a_host_is_named_by_the_runs_whose_findings_are_about_it(empty_store: Store) -> None:
    write_run(empty_store, "one", at_s=1, named=[2, 3])
    write_run(empty_store, "two", at_s=2, named=[3], cause="host-stall")
    # Of most hosts, of the program, of no rank in particular: about no host.
    write_run(empty_store, "all", at_s=3, named=[0, 2, 4, 6])
    write_run(empty_store, "code", at_s=4, named=[2], cause="crash")
    write_run(empty_store, "three", at_s=5, named=[2])

    hosts = BadHosts(empty_store, unix_ns=lambda: NOW_NS)
    (record,) = hosts.read(running=())

    assert record.host == "b"
    assert dict(record.named_by) == {
        "one": ["slow-compute"], "two": ["host-stall"], "three": ["slow-compute"],
    }  # fmt: skip
    assert not record.is_fit_since


def test_a_later_run_without_a_finding_or_a_person_clears_a_host(empty_store: Store) -> None:
    store, hosts = empty_store, BadHosts(empty_store, unix_ns=lambda: NOW_NS)
    write_run(store, "one", at_s=1, named=[2])
    write_run(store, "good", at_s=2)

    assert named(hosts.read(running=("good",))) == {"b": (["one"], False)}
    assert named(hosts.read(running=())) == {"b": (["one"], True)}

    write_run(store, "two", at_s=3, named=[2])
    assert named(hosts.read(running=("two",))) == {"b": (["one", "two"], False)}

    change = HostChange(host="b", mark=HostMark.EXCLUDED, at_ns=NOW_NS + 2 * S, is_set=False)
    write_host_changes(store, [change])
    write_run(store, "three", at_s=4, named=[2])
    assert named(hosts.read(running=())) == {"b": (["two", "three"], False)}


def test_an_error_of_a_host_alerts_until_its_checks_have_none(empty_store: Store) -> None:
    store, now_ns = empty_store, [NOW_NS + S]
    for at_s, run in enumerate(("one", "two", "three")):
        write_run(store, run, at_s=at_s, named=[6])
    store.insert_rows(TABLE, [check_row(replace(CHECK, host="b", reason="5 memory errors"))])
    source = StoreSource(store)
    alerting = Alerting(store, page_url=lambda run, *_: f"/{run}", unix_ns=lambda: now_ns[0])
    watch = AlertWatch(store, source, Reports(source), alerting, unix_ns=lambda: now_ns[0])

    watch.turn()

    assert {(alert.hosts, alert.severity, alert.text) for alert in alerting.alerts} == {
        (("b",), "critical",
         "the checks of host b report errors: gpu-ecc, GPU 3: 5 memory errors"),
        (("d",), "warning",
         "findings of 3 runs name host d: slow-compute in one, two and three"),
    }  # fmt: skip
    assert {alert.rule for alert in alerting.alerts} == {"bad-host"}

    fit = replace(CHECK, host="b", state="healthy", part="", at_ns=NOW_NS + 2 * S)
    store.insert_rows(TABLE, [check_row(fit)])
    write_run(store, "good", at_s=9)
    for _ in range(4):
        now_ns[0] += HOSTS_NS
        watch.turn()

    assert all(alert.resolved_ns is not None for alert in alerting.alerts)

    now_ns[0] += HOSTS_NS
    again = replace(CHECK, host="b", reason="6 memory errors", at_ns=now_ns[0])
    store.insert_rows(TABLE, [check_row(again)])
    watch.turn()
    assert [alert.key for alert in alerting.alerts if alert.resolved_ns is None] == ["b#2"]
