"""Excluded hosts in a run: are they gone since a restart, and did that help?"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from rankscope.analysis.report.text import format_change, format_seconds, format_time
from rankscope.analysis.statistics.step_change import StepChange, compare_step_times
from rankscope.collector.read.hosts import HostMark, read_epoch_starts, read_host_changes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rankscope.analysis.report.report import RunReport
    from rankscope.collector.read.hosts import HostChange
    from rankscope.collector.store.store import Store

NOISE = {True: ", beyond noise", False: ", within noise", None: ", noise unknown"}


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

    step_s: tuple[float, float] | None = None
    """Mean step with the host, and without it; None if it is not gone, or no step was kept."""

    change: StepChange | None = None


def read_excluded_hosts(store: Store, report: RunReport) -> tuple[ExcludedHost, ...]:
    """Return the excluded hosts that the run of a report uses or has used, by name."""
    changes = read_host_changes(store)
    if not changes:
        return ()
    return follow_exclusions(report, changes, read_epoch_starts(store, report.run))


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
            if any(name == host for name, _ in place.of_rank.values())
        ]
        if not change.is_set or not used:
            continue
        epoch = report.placements[-1].epochs[-1]
        begun_ns = epoch_starts.get(epoch)
        presence, step_s, step_change = HostPresence.UNTIL_RESTART, None, None
        if used[-1] is not report.placements[-1]:
            presence = HostPresence.GONE
            after = report.placements[report.placements.index(used[-1]) + 1 :]
            times = [
                [
                    seconds
                    for place in places
                    for step in place.steps
                    if (seconds := report.actual_s_by_step.get(step)) is not None
                ]
                for places in (used[-1:], after)
            ]
            step_change = compare_step_times(*times)
            if all(times):
                step_s = (sum(times[0]) / len(times[0]), sum(times[1]) / len(times[1]))
        elif begun_ns is not None and begun_ns > change.at_ns:
            # An exclusion that had expired before binds no restart.
            if change.until_ns is not None and begun_ns > change.until_ns:
                continue
            presence = HostPresence.STILL_USED
        found.append(
            ExcludedHost(
                host=host, reason=change.reason, excluded_ns=change.at_ns, presence=presence,
                epoch=epoch, step_s=step_s, change=step_change,
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
    gone = f"{since}, is gone in epoch {excluded.epoch}"
    if excluded.step_s is None or excluded.change is None:
        return f"{gone}; no step to compare."
    before, after = map(format_seconds, excluded.step_s)
    change = format_change(excluded.change.ratio)
    noise = NOISE[excluded.change.is_significant]
    return f"{gone}: a step is {change} ({before} to {after}{noise})."
