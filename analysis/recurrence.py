"""Recurrence of findings: do they follow their host or their position, over epochs and runs?

About 3 % of machines fail per week, and the same ones again (Imbue). A host that was named before
at another position should be replaced; a position that is named on every host is a property of the
job.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import NONE

from .causes.order import CAUSES
from .report.report import RankPlacements, format_hosts, placements_of
from .report.text import format_names

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set

    from .report.report import Finding
    from .trace.tables import RunInfo, StepTable

Position = tuple[int, int, int]
"""(dp, pp, tp)."""

MAX_HOSTS_SHARE = 0.5
"""Share of the job's hosts that a finding may name; with more, it is about none of them."""


class Follows(StrEnum):
    """The thing that a recurring finding has in common with the earlier one."""

    HOST = "host"
    POSITION = "position"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Host and position of one rank."""

    host: str
    dp: int
    pp: int
    tp: int
    local_rank: int = NONE
    """Position among the ranks of its host; -1 if unknown."""

    @property
    def position(self) -> Position:
        """Its position in the layout."""
        return self.dp, self.pp, self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedFinding:
    """A finding of one epoch of a run, with the placements of its ranks."""

    run_id: str
    epoch: int
    cause: str
    placements: tuple[Placement, ...]
    sizes: tuple[int, int, int]
    """Of the axes dp, pp, tp: positions of unequal layouts are not comparable."""

    num_hosts: int
    """Of the job."""

    @property
    def incarnation(self) -> tuple[str, int]:
        """(run, epoch), within which ranks do not move."""
        return self.run_id, self.epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """A finding that has been made before. The fields are those of the JSON key ``follows``."""

    what: Follows | None
    """None if host and position cannot be distinguished."""

    evidence: str
    """One sentence with numbers."""


def find_placements(
    run: RunInfo, steps: StepTable, numbers: Sequence[int]
) -> tuple[RankPlacements, ...]:
    """Return where the ranks of a run are in some steps, in order of time.

    Args:
        steps: Rows of these steps; of a step in several epochs, the newest counts.
        numbers: The steps, ascending.
    """
    pairs = np.unique(np.stack((steps.step, steps.epoch), axis=1), axis=0)
    epoch_of = dict(pairs.tolist())
    of_epoch = {
        known.epoch: {info.rank: (info.host, info.local_rank) for info in known.ranks}
        for known in run.epochs
    }
    placements: list[RankPlacements] = []
    for epoch, steps_there in groupby(numbers, key=lambda step: epoch_of.get(step, NONE)):
        now = RankPlacements(
            epochs=(epoch,), steps=tuple(steps_there), of_rank=of_epoch.get(epoch, {})
        )
        before = placements[-1] if placements else now
        if any(before.of_rank.get(rank, place) != place for rank, place in now.of_rank.items()):
            placements.append(now)
        else:
            epochs = sorted({*before.epochs, epoch})
            merged = RankPlacements(
                epochs=tuple(epochs),
                steps=tuple(sorted({*before.steps, *now.steps})),
                of_rank=before.of_rank | now.of_rank,
            )
            placements[-1:] = [merged]
    return tuple(placements)


def name_hosts(finding: Finding, placements: tuple[RankPlacements, ...], run: RunInfo) -> Finding:
    """Return a finding with the hosts of its ranks, also in its evidence.

    They are those of the epoch that it ended, or else of its last step.
    """
    of_rank = placements_of(finding, placements).of_rank if placements else {}
    ended = next((epoch for epoch in run.epochs if epoch.epoch == finding.epoch), None)
    if ended is not None:
        of_rank = {info.rank: (info.host, info.local_rank) for info in ended.ranks}
    hosts = dict.fromkeys(of_rank[rank][0] for rank in finding.ranks if rank in of_rank)
    named = replace(finding, hosts=tuple(host for host in hosts if host))
    names = format_hosts(named, placements)
    if not names or named.hosts[0] in finding.evidence:
        return named
    return replace(named, evidence=f"on {names}, {finding.evidence}")


def find_recurrence(
    now: PlacedFinding,
    history: Iterable[PlacedFinding],
    *,
    others: Iterable[PlacedFinding] = (),
    placements: Callable[[], Iterable[Placement]],
) -> Recurrence | None:
    """Compare a finding with those of the same cause in other epochs and runs.

    It follows the *host* if the same host was named at a position that is now on another host. It
    follows the *position* if the same (dp, pp, tp) was named on another host. In both cases the
    other host must not be named now. If nothing moved, or if both were seen, host and position
    cannot be distinguished. Findings of unequal layouts are not compared: their positions have
    other work, so neither a host nor a position is the same.

    Args:
        history: Findings of any epoch of any run; those of this epoch are ignored.
        placements: Returns the placements of all ranks of this epoch; called only if needed.

    Returns:
        None if no other epoch or run named the host or the position, if the cause does not belong
        to a host, or if there is only one host.
    """
    if not _is_local(now) or now.num_hosts == 1:
        return None
    hosts = _hosts(now)
    named = hosts.union(*(_hosts(other) for other in others if _cause(other) == _cause(now)))
    past = [earlier for earlier in history if _cause(earlier) == _cause(now) and _is_local(earlier)]
    past = [
        earlier
        for earlier in past
        if earlier.incarnation != now.incarnation
        and earlier.num_hosts > 1
        and earlier.sizes == now.sizes
    ]
    same_host = [earlier for earlier in past if hosts & _hosts(earlier)]
    host_now = (
        {placement.position: placement.host for placement in placements()} if same_host else {}
    )
    moved = {earlier: _moved_hosts(now, earlier, host_now, named) for earlier in same_host}
    moved = {earlier: hosts for earlier, hosts in moved.items() if hosts}
    stayed = {earlier: _same_positions(now, earlier, named) for earlier in past}
    stayed = {earlier: positions for earlier, positions in stayed.items() if positions}
    if moved and stayed:
        text = (
            f"unknown: {_format_runs(moved)} had the same host at another position,"
            f" {_format_runs(stayed)} the same position on another host"
        )
        return Recurrence(what=None, evidence=text)
    if moved:
        return Recurrence(what=Follows.HOST, evidence=_host_evidence(now, moved))
    if stayed:
        return Recurrence(what=Follows.POSITION, evidence=_position_evidence(now, stayed))
    if same_host:
        same_hosts = sorted(_hosts(now).intersection(set[str]().union(*map(_hosts, same_host))))
        text = (
            f"unknown: host {format_names(same_hosts)} was also named in {_format_runs(same_host)},"
            " but nothing has moved since, so host and position cannot be distinguished"
        )
        return Recurrence(what=None, evidence=text)
    return None


def _cause(finding: PlacedFinding) -> str:
    cause = CAUSES.get(finding.cause)
    return finding.cause if cause is None else cause.recurs_as or cause.name


def _hosts(finding: PlacedFinding) -> set[str]:
    return {placement.host for placement in finding.placements} - {""}


def _is_local(finding: PlacedFinding) -> bool:
    """Return whether a finding is about few hosts, and its cause about ranks."""
    hosts = _hosts(finding)
    most = max(1, MAX_HOSTS_SHARE * finding.num_hosts)
    cause = CAUSES.get(finding.cause)
    return cause is not None and cause.has_place and 0 < len(hosts) <= most


def _moved_hosts(
    now: PlacedFinding,
    then: PlacedFinding,
    host_now: Mapping[Position, str],
    named: Set[str],
) -> set[str]:
    """Return the hosts named both times that have left the position at which they were named."""
    both = _hosts(now) & _hosts(then)
    return {
        placement.host
        for placement in then.placements
        if placement.host in both
        and host_now.get(placement.position, placement.host) not in {placement.host, *named}
    }


def _same_positions(now: PlacedFinding, then: PlacedFinding, named: Set[str]) -> set[Position]:
    """Return the positions named both times whose earlier host is not named now."""
    before = {placement.position: placement.host for placement in then.placements if placement.host}
    return {
        placement.position
        for placement in now.placements
        if placement.host
        and placement.position in before
        and before[placement.position] not in named
    }


def _host_evidence(now: PlacedFinding, moved: Mapping[PlacedFinding, set[str]]) -> str:
    hosts = set[str]().union(*moved.values())
    here = next(placement for placement in now.placements if placement.host in hosts)
    before = [
        placement
        for earlier in moved
        for placement in earlier.placements
        if placement.host == here.host
    ]
    there = next(placement for placement in before if placement.position != here.position)
    is_same_device = here.local_rank == there.local_rank != NONE
    device = f", on the same device (local rank {here.local_rank})" if is_same_device else ""
    return (
        f"host {format_names(sorted(hosts))} was also named in {_format_runs(moved)}, at another"
        f" position: {_format_position(there)} there, {_format_position(here)} here{device}"
    )


def _position_evidence(now: PlacedFinding, stayed: Mapping[PlacedFinding, set[Position]]) -> str:
    positions = set[Position]().union(*stayed.values())
    here = next(placement for placement in now.placements if placement.position in positions)
    hosts = {
        placement.host
        for earlier in stayed
        for placement in earlier.placements
        if placement.position == here.position
    }
    return (
        f"{_format_position(here)} was also named in {_format_runs(stayed)}, on"
        f" {format_names(sorted(hosts))} there, on {here.host} here"
    )


def _format_runs(findings: Collection[PlacedFinding]) -> str:
    """Return runs and epochs: "run a (epoch 1)", "runs a (epoch 0), b (epoch 0) and 3 more"."""
    epochs: dict[str, set[int]] = {}
    for finding in findings:
        epochs.setdefault(finding.run_id, set()).add(finding.epoch)
    names = [
        f"{run} (epoch {', '.join(map(str, sorted(numbers)))})" for run, numbers in epochs.items()
    ]
    return f"{'run' if len(names) == 1 else 'runs'} {format_names(names)}"


def _format_position(placement: Placement) -> str:
    return f"(dp {placement.dp}, pp {placement.pp}, tp {placement.tp})"
