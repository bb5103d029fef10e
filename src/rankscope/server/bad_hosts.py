"""Hosts to alert about: those whose checks report errors, and those that findings name again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rankscope.analysis.alert_signals import HostRecord
from rankscope.analysis.causes.crash import CAUSE as CRASH
from rankscope.analysis.causes.hang import CAUSE as HANG
from rankscope.analysis.causes.misconfiguration import CAUSE as MISCONFIGURATION
from rankscope.analysis.causes.order import CAUSES
from rankscope.analysis.recurrence import MAX_HOSTS_SHARE
from rankscope.collector.read.host_checks import ERROR, read_newest_checks
from rankscope.collector.read.hosts import (
    HostMark,
    count_findings,
    read_host_changes,
    read_named_hosts,
    read_seen_hosts,
)
from rankscope.tracer.span import NS_PER_S

from ..doctor.stored import NEWEST_NS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from rankscope.collector.read.hosts import NamedHosts
    from rankscope.collector.store.store import Store

NAMED_NS = 90 * 86_400 * NS_PER_S
"""Age up to which a finding counts, as for repeat offenders on the page Health."""


OF_PROGRAMS = frozenset({CRASH.name, HANG.name, MISCONFIGURATION.name})
"""Causes that a program may have wherever it runs: always on its first rank, for example. If the
host is at fault, its checks report an error."""


class BadHosts:
    """Reads what checks and findings say against the hosts of a store.

    Args:
        unix_ns: Clock of its rows.
    """

    def __init__(self, store: Store, *, unix_ns: Callable[[], int] = time.time_ns) -> None:
        self._store = store
        self._unix_ns = unix_ns
        self._counted = (-1, -1)
        self._named: dict[str, list[NamedHosts]] = {}

    def read(self, running: Collection[str]) -> tuple[HostRecord, ...]:
        """Return the record of each host that has one.

        Args:
            running: Runs that have not ended: what they do not say yet is no acquittal.

        Raises:
            StoreError: The store could not be read.
        """
        errors: dict[str, list[str]] = {}
        since_ns = self._unix_ns() - NEWEST_NS
        for check in read_newest_checks(self._store, since_ns=since_ns, state=ERROR):
            errors.setdefault(check.host, []).append(
                f"{check.name}{check.part and f', {check.part}'}: {check.reason}"
            )
        self._read_named()
        fit = self._find_fit(running)
        return tuple(
            HostRecord(
                host=host,
                errors=errors.get(host, ()),
                named_by=_causes_by_run(self._named.get(host, ())),
                is_fit_since=host in fit,
            )
            for host in sorted(errors.keys() | self._named.keys())
        )

    def _read_named(self) -> None:
        """Read the findings that name hosts, if there is a new one, since they were taken back."""
        counted = count_findings(self._store)
        if counted == self._counted:
            return
        self._counted, self._named = counted, {}
        taken_back = {
            change.host: change.at_ns
            for change in read_host_changes(self._store)
            if change.mark is HostMark.EXCLUDED and not change.is_set
        }
        for found in read_named_hosts(self._store, since_ns=self._unix_ns() - NAMED_NS):
            if not _is_about_hosts(found):
                continue
            for host in found.hosts:
                if found.opened_ns > taken_back.get(host, 0):
                    self._named.setdefault(host, []).append(found)

    def _find_fit(self, running: Collection[str]) -> set[str]:
        """Return the hosts whose newest run, of those that have ended, no finding names them."""
        fit, decided = set(), set()
        for seen in read_seen_hosts(self._store, self._named):
            is_named = any(found.run_id == seen.run_id for found in self._named[seen.host])
            if seen.host in decided or (seen.run_id in running and not is_named):
                continue
            decided.add(seen.host)
            if not is_named:
                fit.add(seen.host)
        return fit


def _causes_by_run(found: Collection[NamedHosts]) -> dict[str, list[str]]:
    by_run: dict[str, list[str]] = {}
    for each in found:
        by_run.setdefault(each.run_id, []).append(each.cause)
    return by_run


def _is_about_hosts(found: NamedHosts) -> bool:
    """Return whether a finding is about few of its job's hosts, and its cause about ranks."""
    cause = CAUSES.get(found.cause)
    is_of_ranks = cause is not None and cause.has_place and cause.name not in OF_PROGRAMS
    return is_of_ranks and len(found.hosts) <= MAX_HOSTS_SHARE * found.num_hosts
