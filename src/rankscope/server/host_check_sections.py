"""Hosts on the page Health: which are excluded, what is wrong now, what returns, what findings it
confirms.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rankscope.analysis.report.text import EMPTY, format_age, format_count, format_time
from rankscope.collector.read.findings import read_findings
from rankscope.collector.read.host_checks import ERROR, read_newest_checks, read_offenders
from rankscope.collector.read.hosts import (
    HostMark,
    marks_in_force,
    read_host_changes,
    read_runs_of_hosts,
)
from rankscope.dashboard.records.page_results import HealthSection
from rankscope.tracer.span import NS_PER_S

from ..doctor.confirmation import confirm_findings, format_confirmations
from ..doctor.stored import NEWEST_NS, compare_values
from ..sources.stored_findings import to_tracked

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rankscope.collector.read.host_checks import Offender, StoredCheck
    from rankscope.collector.read.hosts import HostChange
    from rankscope.collector.store.store import Store

Part = tuple[HealthSection, tuple[str, ...]]
"""A section, and its problems."""

DAY_NS = 86_400 * NS_PER_S
OFFENDERS_NS = 90 * DAY_NS
FINDINGS_NS = DAY_NS
MAX_ROWS = 200
MAX_FINDINGS = 20


def host_check_parts(store: Store, now_ns: int) -> tuple[Part, ...]:
    """Return the sections about hosts, without rows if there are none.

    Raises:
        StoreError: The store could not be read.
    """
    newest = read_newest_checks(store, since_ns=now_ns - NEWEST_NS)
    offenders = read_offenders(store, since_ns=now_ns - OFFENDERS_NS, most=MAX_ROWS)
    return (
        _marks(store, now_ns),
        _deviations([*newest, *compare_values(newest)], now_ns),
        _offenders(offenders, now_ns),
        _confirmed(store, now_ns),
    )


def _end(mark: HostChange) -> str:
    if mark.until_ns is not None:
        return f"{format_time(mark.until_ns)} UTC"
    return "included" if mark.mark is HostMark.EXCLUDED else EMPTY


def _marks(store: Store, now_ns: int) -> Part:
    """Return the hosts that are excluded, golden or spare; an excluded one in use is a problem."""
    marks = marks_in_force(read_host_changes(store), now_ns)
    excluded = [mark.host for mark in marks if mark.mark is HostMark.EXCLUDED]
    used_by = read_runs_of_hosts(store, excluded)
    runs_of = {
        host: [run_id for run_id, hosts in used_by.items() if host in hosts] for host in excluded
    }
    ordered = sorted(marks, key=lambda mark: (mark.mark is not HostMark.EXCLUDED, mark.host))
    rows = tuple(
        (
            mark.host,
            str(mark.mark),
            mark.reason or EMPTY,
            mark.set_by or EMPTY,
            format_ago(now_ns, mark.at_ns),
            _end(mark),
            ", ".join(runs_of.get(mark.host, [])) or EMPTY,
        )
        for mark in ordered
    )
    problems = tuple(
        f"Run {run_id} trains on {hosts[0]}, which is excluded: restart it with the node list of"
        " rankscope hosts."
        for run_id, hosts in used_by.items()
    )
    return HealthSection(
        title="Excluded hosts, golden and spare ones",
        about="Node lists leave excluded hosts out. rankscope hosts include HOST --yes takes one"
        " back.",
        columns=("host", "mark", "reason", "by", "since", "until", "in use by"),
        rows=rows[:MAX_ROWS],
        bad=frozenset(host for host, runs in runs_of.items() if runs),
        texts=frozenset({"mark", "reason", "by", "since", "until", "in use by"}),
    ), problems


def _deviations(checks: Sequence[StoredCheck], now_ns: int) -> Part:
    by_host = {
        host: [*of_host]
        for host, of_host in groupby(
            sorted(checks, key=lambda check: check.host), key=lambda check: check.host
        )
    }
    bad = {
        host: deviations
        for host, of_host in by_host.items()
        if (deviations := [check for check in of_host if check.is_deviation])
    }
    broken = [host for host, of_host in bad.items() if any(c.state == ERROR for c in of_host)]
    ordered = sorted(bad, key=lambda host: (host not in broken, host))
    rows = tuple(
        (
            host,
            check.state,
            f"{check.name}, {check.part}" if check.part else check.name,
            f"{check.reason}: {check.remedy}" if check.remedy else check.reason,
            format_ago(now_ns, check.at_ns),
        )
        for host in ordered
        for check in sorted(bad[host], key=lambda check: (check.state != ERROR, check.name))
    )
    num_healthy = len(by_host) - len(bad)
    more = f" {MAX_ROWS} of {len(rows):,} are listed." if len(rows) > MAX_ROWS else ""
    about = "Warnings and errors of the newest rankscope doctor of each host within a week."
    if num_healthy:
        about += f" Nothing is wrong on {format_count(num_healthy, 'other host')}."
    about += more
    if by_host and not rows:
        rows = ((format_count(num_healthy, "host"), "healthy", "", "", ""),)
    problem = f"The checks of {format_count(len(broken), 'host')} report errors,"
    problems = (f"{problem} {broken[0]} first: keep jobs from them.",) if broken else ()
    return HealthSection(
        title="Host checks",
        about=about,
        columns=("host", "state", "check", "what is wrong, and what to do", "examined"),
        rows=rows[:MAX_ROWS],
        bad=frozenset(broken),
        texts=frozenset({"state", "check", "what is wrong, and what to do"}),
    ), problems


def _offenders(offenders: Sequence[Offender], now_ns: int) -> Part:
    rows = tuple(
        (
            each.host,
            each.name,
            each.reason,
            f"{each.num_examinations:,}",
            f"{each.num_runs:,}",
            format_ago(now_ns, each.first_ns),
            format_ago(now_ns, each.last_ns),
        )
        for each in offenders
    )
    return HealthSection(
        title="Repeat offenders",
        about="Checks that deviated in several examinations within 90 days, errors first.",
        columns=("host", "check", "last reason", "examinations", "runs", "first", "last"),
        rows=rows,
        texts=frozenset({"check", "last reason"}),
    ), ()


def _confirmed(store: Store, now_ns: int) -> Part:
    recent = [
        finding
        for finding in read_findings(store)
        if finding.ranks and finding.updated_ns >= now_ns - FINDINGS_NS
    ][:MAX_FINDINGS]
    rows = [*_confirmed_rows(store, [finding.run_id for finding in recent], now_ns)]
    return HealthSection(
        title="Findings and host checks",
        about="Findings of the last day, and whether the checks of their hosts confirm them.",
        columns=("run", "finding", "host checks"),
        rows=tuple(rows),
        texts=frozenset({"finding", "host checks"}),
    ), ()


def _confirmed_rows(store: Store, run_ids: Sequence[str], now_ns: int) -> Iterator[tuple[str, ...]]:
    for run_id in dict.fromkeys(run_ids):
        findings = [
            to_tracked(stored).finding
            for stored in read_findings(store, run_id)
            if stored.ranks and stored.updated_ns >= now_ns - FINDINGS_NS
        ]
        confirmed = confirm_findings(store, run_id, findings, now_ns=now_ns)
        for finding, confirmations in zip(findings, confirmed, strict=True):
            text = format_confirmations(confirmations)
            if text:
                ranks = ", ".join(map(str, finding.ranks[:4]))
                more = "..." if len(finding.ranks) > 4 else ""  # noqa: PLR2004  # as listed
                yield run_id, f"{finding.cause} on rank {ranks}{more}", text


def format_ago(now_ns: int, then_ns: int) -> str:
    """Return how long ago something was: "59 s ago"."""
    return f"{format_age(max(0, now_ns - then_ns))} ago"
