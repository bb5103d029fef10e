"""Excluded hosts in a run: are they gone since a restart, and did that help?"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from rankscope.analysis.breakdown.host_moves import StepTimes, compare_placements
from rankscope.analysis.report.text import format_time
from rankscope.collector.read.hosts import (
    HostMark,
    is_same_host,
    read_epoch_starts,
    read_host_changes,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rankscope.analysis.report.report import RunReport
    from rankscope.collector.read.hosts import HostChange
    from rankscope.collector.store.store import Store


class HostPresence(StrEnum):
    """Use of an excluded host by a job."""

    GONE = "gone"
    """The job was restarted without it."""

    STILL_USED = "still-used"
    """The job was restarted, and uses it again."""

    UNTIL_RESTART = "until-restart"
    """The job has not been restarted since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcludedHost:
    """An excluded host that a run uses or has used."""

    host: str
    reason: str
    excluded_ns: int
    presence: HostPresence
    epoch: int
    """Newest epoch of the run that was analysed."""

    step_times: StepTimes | None = None
    """With the host, and without it; None if it is not gone."""


def read_excluded_hosts(store: Store, report: RunReport) -> tuple[ExcludedHost, ...]:
    """Return the excluded hosts that the run of a report uses or has used, by name."""
    changes = read_host_changes(store)
    if not changes:
        return ()
    return follow_exclusions(report, changes, read_epoch_starts(store, report.run))


def describe_excluded_hosts(store: Store | None, report: RunReport) -> tuple[str, ...]:
    """Return a sentence about each of them."""
    found = () if store is None else read_excluded_hosts(store, report)
    return tuple(map(format_excluded_host, found))


def follow_exclusions(
    report: RunReport, changes: Iterable[HostChange], epoch_starts: Mapping[int, int]
) -> tuple[ExcludedHost, ...]:
    """Return the excluded hosts that the run of a report uses or has used, by name.

    Args:
        report: The diagnosis of all steps.
        changes: Marks of hosts, in order of time.
        epoch_starts: Start of each epoch, Unix ns.
    """
    newest = {each.host: each for each in changes if each.mark is HostMark.EXCLUDED}
    found = []
    for host, change in sorted(newest.items()):
        used = [
            place
            for place in report.placements
            if any(
                is_same_host(name, host) for name in {name for name, _ in place.of_rank.values()}
            )
        ]
        if not change.is_set or not used:
            continue
        epoch = report.placements[-1].epochs[-1]
        begun_ns = epoch_starts.get(epoch)
        presence, step_times = HostPresence.UNTIL_RESTART, None
        if used[-1] is not report.placements[-1]:
            presence = HostPresence.GONE
            after = report.placements[report.placements.index(used[-1]) + 1 :]
            step_times = compare_placements(report, used[-1:], after)
        elif begun_ns is not None and begun_ns > change.at_ns:
            # An exclusion that had expired before binds no restart.
            if change.until_ns is not None and begun_ns > change.until_ns:
                continue
            presence = HostPresence.STILL_USED
        found.append(
            ExcludedHost(
                host=host, reason=change.reason, excluded_ns=change.at_ns, presence=presence,
                epoch=epoch, step_times=step_times,
            )
        )  # fmt: skip
    return tuple(found)


def format_excluded_host(excluded: ExcludedHost) -> str:
    """Return one sentence about an excluded host."""
    since = f"{excluded.host}, excluded at {format_time(excluded.excluded_ns)} (UTC)"
    if excluded.reason:
        since += f" for {excluded.reason!r}"
    if excluded.presence is HostPresence.STILL_USED:
        return (
            f"warning: {since}, is used again in epoch {excluded.epoch}: start the job with the"
            " node list of `rankscope hosts hostfile` or `rankscope hosts slurm`"
        )
    if excluded.presence is HostPresence.UNTIL_RESTART:
        return f"{since}, is used until the job is restarted."
    if excluded.step_times is None:
        return f"{since}, is gone in epoch {excluded.epoch}."
    return f"{since}, is gone in epoch {excluded.epoch}: {excluded.step_times.text}."
