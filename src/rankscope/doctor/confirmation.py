"""Results of host checks beside the findings of a run: which ones confirm it."""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rankscope.analysis.report.report import HostNote
from rankscope.analysis.report.text import format_count
from rankscope.analysis.severity import MATTERS
from rankscope.collector.host.gpu import plain_uuid
from rankscope.collector.read.host_checks import (
    ACTIVE,
    HEALTHY,
    NOT_APPLICABLE,
    StoredCheck,
    read_checks_of_hosts,
    read_rank_places,
    read_run_times,
)
from rankscope.tracer.span import NS_PER_S

from .active.trials import SECTION as ACTIVE_SECTION
from .checks.kernel_log import EARLIER
from .checks.table import CHECKS, END

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rankscope.analysis.report.report import Finding, RunReport
    from rankscope.collector.read.host_checks import RankPlace
    from rankscope.collector.store.store import Store

AFTER_NS = 600 * NS_PER_S
"""Time after the last step in which an examination still belongs to the run."""

NOTE = "host checks"
"""Source of the note beside a finding."""

MAX_HOSTS = 3
"""Hosts of one finding that are written out."""

CAUSES = {check.name: check.causes for check in CHECKS}
ACTIVE_CAUSES = {
    "slow-compute": frozenset({"matmul", "memory"}),
    "clock-throttle": frozenset({"matmul", "memory"}),
    "slow-link": frozenset(
        {"nic-pairs", "groups", "neighbours", "host-all-reduce", "host-all-to-all"}
    ),
    "network-degradation": frozenset({"nic-pairs", "groups"}),
    "data-stall": frozenset({"to-device"}),
}
"""Active tests that confirm a cause."""

ERRORS = {
    "nofile": re.compile(r"too many open files|EMFILE|errno 24", re.IGNORECASE),
    "memlock": re.compile(r"memlock|ibv_reg_mr|cannot allocate memory", re.IGNORECASE),
    "shared-memory": re.compile(
        r"shared memory|/dev/shm|bus error|SIGBUS|no space left", re.IGNORECASE
    ),
    "disk-space": re.compile(r"no space left|ENOSPC|errno 28", re.IGNORECASE),
}
"""What a process says that has reached a limit, by part or name of the check. A limit that most
jobs never reach confirms an end only if its error is in the evidence or in the logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """Results of the checks of one host beside one finding."""

    host: str
    at_ns: int | None
    """Unix time of the examination; None: the host was not examined since the onset."""

    confirming: tuple[StoredCheck, ...] = ()
    """Deviations that explain the finding."""

    others: tuple[StoredCheck, ...] = ()
    """Other deviations of the host."""

    num_healthy: int = 0
    num_not_applicable: int = 0

    @property
    def text(self) -> str:
        """One clause about this host."""
        if self.at_ns is None:
            return f"{self.host} was not examined"
        if self.confirming:
            return f"confirmed: {self.host}, {_describe(self.confirming)}"
        counted = f"{self.num_healthy} healthy, {self.num_not_applicable} not applicable"
        text = f"{self.host}: not confirmed by host checks ({counted})"
        return f"{text}; it has other problems: {_describe(self.others)}" if self.others else text


def confirm_findings(
    store: Store, run_id: str, findings: Sequence[Finding], *, now_ns: int | None = None
) -> tuple[tuple[Confirmation, ...], ...]:
    """Return what the checks of the hosts of each finding say of it, in the order of the findings.

    An examination counts if it was made after the onset of the finding, and at most `AFTER_NS`
    after the run's last step, or after ``now_ns`` if its end is unknown. The newest one that
    confirms counts, else the newest.
    """
    named = {rank for finding in findings for rank in finding.ranks}
    if not named:
        return ((),) * len(findings)
    places = [place for place in read_rank_places(store, run_id) if place.rank in named]
    steps = {finding.steps[0] for finding in findings if finding.steps is not None}
    times_ns = read_run_times(store, run_id, steps)
    end_ns = times_ns.get(None, time.time_ns() if now_ns is None else now_ns) + AFTER_NS
    onsets_ns = [
        times_ns.get(finding.steps[0], 0) if finding.steps is not None else 0
        for finding in findings
    ]
    hosts = {place.host for place in places}
    first_ns = min(onsets_ns, default=0)
    checks = read_checks_of_hosts(store, hosts, first_ns=first_ns, last_ns=end_ns) if hosts else ()
    found = []
    for finding, onset_ns in zip(findings, onsets_ns, strict=True):
        since = [check for check in checks if check.at_ns >= onset_ns]
        found.append(tuple(_confirm(finding, places, since)))
    return tuple(found)


def with_host_checks(store: Store, report: RunReport) -> RunReport:
    """Return a report with what the checks of their hosts say beside the findings that matter.

    Raises:
        StoreError: The store could not be read.
    """
    confirmed = confirm_findings(store, report.run, report.findings)
    findings = tuple(
        replace(finding, host_notes=(*finding.host_notes, HostNote(source=NOTE, text=text)))
        if finding.severity in MATTERS and (text := format_confirmations(confirmations))
        else finding
        for finding, confirmations in zip(report.findings, confirmed, strict=True)
    )
    return replace(report, findings=findings)


def find_unexamined(store: Store, run_id: str, finding: Finding) -> frozenset[str]:
    """Return the hosts of a finding that were not examined since its onset.

    None of one that does not matter.
    """
    if finding.severity not in MATTERS:
        return frozenset()
    (confirmations,) = confirm_findings(store, run_id, [finding])
    return frozenset(each.host for each in confirmations if each.at_ns is None)


def confirmation_document(confirmations: Iterable[Confirmation]) -> list[dict[str, Any]]:
    """Return the value of the JSON key ``host_checks`` of a finding."""
    return [
        {
            "host": each.host,
            "at_ns": each.at_ns,
            "is_confirmed": bool(each.confirming),
            "text": each.text,
            "num_healthy": each.num_healthy,
            "num_not_applicable": each.num_not_applicable,
            "confirming": [asdict(check) for check in each.confirming],
            "others": [asdict(check) for check in each.others],
        }
        for each in confirmations
    ]


def format_confirmations(confirmations: Sequence[Confirmation]) -> str:
    """Return a sentence about the hosts of a finding; "" if none of them was examined."""
    examined = [each for each in confirmations if each.at_ns is not None]
    if not examined:
        return ""
    ordered = sorted(confirmations, key=lambda each: (not each.confirming, each.at_ns is None))
    more = len(ordered) - MAX_HOSTS
    text = "; ".join(each.text for each in ordered[:MAX_HOSTS])
    return f"{text}; and {format_count(more, 'other host')}" if more > 0 else text


def _confirm(
    finding: Finding, places: Iterable[RankPlace], checks: Sequence[StoredCheck]
) -> Iterable[Confirmation]:
    own = [place for place in places if place.rank in finding.ranks]
    if finding.hosts:
        own = [place for place in own if place.host in finding.hosts]
    newest_epoch = max((place.epoch for place in own), default=-1)
    if not finding.hosts:
        own = [place for place in own if place.epoch == newest_epoch]
    for host in sorted({place.host for place in own}):
        devices = {plain_uuid(place.device_uuid) for place in own if place.host == host} - {""}
        examinations = [
            [*group]
            for _, group in groupby(
                (check for check in checks if check.host == host), key=lambda check: check.at_ns
            )
        ]
        yield _of_host(finding, host, devices, examinations)


def _of_host(
    finding: Finding, host: str, devices: set[str], examinations: Sequence[Sequence[StoredCheck]]
) -> Confirmation:
    best: Confirmation | None = None
    for checks in reversed(examinations):
        deviations = [check for check in checks if check.is_deviation]
        confirming = [check for check in deviations if _confirms(check, finding, devices)]
        states = [check.state for check in checks]
        now = Confirmation(
            host=host,
            at_ns=checks[0].at_ns,
            confirming=tuple(confirming),
            others=tuple(check for check in deviations if check not in confirming),
            num_healthy=states.count(HEALTHY),
            num_not_applicable=states.count(NOT_APPLICABLE),
        )
        if confirming:
            return now
        if best is None or (checks[0].occasion != ACTIVE and best.num_healthy == 0):
            best = now
    return best or Confirmation(host=host, at_ns=None)


def _confirms(check: StoredCheck, finding: Finding, devices: set[str]) -> bool:
    """Return whether a deviation explains a finding, on one of its devices if it is of a device."""
    cause, error = finding.cause, ERRORS.get(check.part, ERRORS.get(check.name))
    if check.section == ACTIVE_SECTION:
        return check.name in ACTIVE_CAUSES.get(cause, ())
    if cause not in CAUSES.get(check.name, ()) or check.part == EARLIER:
        return False
    said = (finding.evidence, *(note.text for note in finding.host_notes))
    if cause in END and error is not None and not any(map(error.search, said)):
        return False
    return not check.device or not devices or plain_uuid(check.device) in devices


def _describe(checks: Sequence[StoredCheck]) -> str:
    texts = [f"{check.part or check.name}: {check.reason}" for check in checks[:2]]
    more = len(checks) - len(texts)
    return ", ".join(texts) + (f" and {more} more" if more else "")
