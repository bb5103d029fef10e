"""Whether what is slow follows its host or its position in the layout, over epochs and runs.

About 3 % of machines fail a week, the same ones again (Imbue): a host that was slow before, at
another position, is to be taken out; a position that is slow on every host is the job's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from .causes.order import CAUSES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set

Position = tuple[int, int, int]
"""(dp, pp, tp)."""

MOST_HOSTS_SHARE = 0.5
"""A finding that names more of the job's hosts says nothing of any of them."""

MOST_NAMED = 3


class Following(StrEnum):
    """What stays the same where something is slow again."""

    HOST = "host"
    POSITION = "position"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one rank stands."""

    host: str
    dp: int
    pp: int
    tp: int

    @property
    def position(self) -> Position:
        """Its place in the layout."""
        return self.dp, self.pp, self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """One finding of one epoch of a run, and where the ranks stood that it names."""

    run_id: str
    epoch: int
    cause: str
    places: tuple[Place, ...]
    sizes: tuple[int, int, int]
    """Of the axes dp, pp, tp: positions of another layout are not comparable."""

    num_hosts: int
    """Of the job."""

    @property
    def incarnation(self) -> tuple[str, int]:
        """(run, epoch): within one, ranks do not move."""
        return self.run_id, self.epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """What is known of a place that was told before."""

    what: Following | None
    """None: it cannot be told apart."""

    evidence: str
    """One sentence with numbers."""


def follow(
    now: Sighting,
    history: Iterable[Sighting],
    *,
    also: Iterable[Sighting] = (),
    placement: Callable[[], Iterable[Place]],
) -> Followed | None:
    """Say what the finding ``now`` has in common with those of its cause in other epochs and runs.

    It follows the *host* where the same host was told at a position that now lies
    on another host. It follows the *position* where the same (dp, pp, tp) of an
    equal layout was told on another host. The host that took the other's place
    must not be told now. Where nothing moved that could tell host from position,
    or where both were seen, it is said that neither can be.

    Args:
        now: The finding.
        history: Findings of any epoch of any run; those of this epoch are passed over.
        also: The other findings of this epoch.
        placement: Returns where all ranks of this epoch stand; asked only where it is needed.

    Returns:
        None where no other epoch or run told of the host or the position, or
        where the cause has no place.
    """
    if not _is_local(now):
        return None
    hosts = _hosts(now)
    told = hosts.union(*(_hosts(one) for one in also if _cause(one) == _cause(now)))
    past = [one for one in history if _cause(one) == _cause(now) and _is_local(one)]
    past = [one for one in past if one.incarnation != now.incarnation]
    known = [one for one in past if hosts & _hosts(one)]
    host_now = {place.position: place.host for place in placement()} if known else {}
    moved = {one: _moved(now, one, host_now, told) for one in known}
    moved = {one: hosts for one, hosts in moved.items() if hosts}
    stayed = {one: _stayed(now, one, told) for one in past}
    stayed = {one: positions for one, positions in stayed.items() if positions}
    if moved and stayed:
        return Followed(what=None, evidence=_both_evidence(moved, stayed))
    if moved:
        return Followed(what=Following.HOST, evidence=_host_evidence(now, moved))
    if stayed:
        return Followed(what=Following.POSITION, evidence=_position_evidence(now, stayed))
    if known:
        return Followed(what=None, evidence=_unmoved_evidence(now, known))
    return None


def _cause(sighting: Sighting) -> str:
    cause = CAUSES.get(sighting.cause)
    return sighting.cause if cause is None else cause.recurs_as or cause.name


def _hosts(sighting: Sighting) -> set[str]:
    return {place.host for place in sighting.places} - {""}


def _is_local(sighting: Sighting) -> bool:
    hosts = _hosts(sighting)
    most = max(1, MOST_HOSTS_SHARE * sighting.num_hosts)
    cause = CAUSES.get(sighting.cause)
    return cause is not None and cause.has_place and 0 < len(hosts) <= most


def _moved(
    now: Sighting, then: Sighting, host_now: Mapping[Position, str], told: Set[str]
) -> set[str]:
    """Return the hosts told both times that have left the position at which they were told."""
    both = _hosts(now) & _hosts(then)
    return {
        place.host
        for place in then.places
        if place.host in both
        and (
            then.sizes != now.sizes
            or host_now.get(place.position, place.host) not in {place.host, *told}
        )
    }


def _stayed(now: Sighting, then: Sighting, told: Set[str]) -> set[Position]:
    """Return the positions told both times, whose host then is not told now."""
    if now.sizes != then.sizes:
        return set()
    before = {place.position: place.host for place in then.places if place.host}
    return {
        place.position
        for place in now.places
        if place.host and place.position in before and before[place.position] not in told
    }


def _host_evidence(now: Sighting, moved: Mapping[Sighting, set[str]]) -> str:
    hosts = set[str]().union(*moved.values())
    here = next(place for place in now.places if place.host in hosts)
    before = next(place for one in moved for place in one.places if place.host == here.host)
    return (
        f"host {name_some(sorted(hosts))} was told in {_incarnations(moved)} too, at another"
        f" position: {_position_text(before)} then, {_position_text(here)} now"
    )


def _position_evidence(now: Sighting, stayed: Mapping[Sighting, set[Position]]) -> str:
    positions = set[Position]().union(*stayed.values())
    here = next(place for place in now.places if place.position in positions)
    hosts = {
        place.host for one in stayed for place in one.places if place.position == here.position
    }
    return (
        f"{_position_text(here)} was told in {_incarnations(stayed)} too, on"
        f" {name_some(sorted(hosts))} then, on {here.host} now"
    )


def _both_evidence(moved: Collection[Sighting], stayed: Collection[Sighting]) -> str:
    return (
        f"cannot tell: {_incarnations(moved)} had the same host at another position,"
        f" {_incarnations(stayed)} the same position on another host"
    )


def _unmoved_evidence(now: Sighting, known: Collection[Sighting]) -> str:
    hosts = sorted(_hosts(now).intersection(set[str]().union(*map(_hosts, known))))
    return (
        f"cannot tell: host {name_some(hosts)} was told in {_incarnations(known)} too, but nothing"
        " moved in between that would tell it from its position"
    )


def _incarnations(sightings: Collection[Sighting]) -> str:
    """Write out runs and epochs: "run a (epoch 1)", "runs a (epoch 0), b (epoch 0) and 3 more"."""
    told: dict[str, set[int]] = {}
    for one in sightings:
        told.setdefault(one.run_id, set()).add(one.epoch)
    names = [f"{run} (epoch {', '.join(map(str, sorted(epochs)))})" for run, epochs in told.items()]
    return f"{'run' if len(names) == 1 else 'runs'} {name_some(names)}"


def name_some(names: Sequence[str]) -> str:
    """Write out the first few names: "a", "a and b", "a, b, c and 4 more"."""
    shown, rest = list(names[:MOST_NAMED]), len(names) - MOST_NAMED
    if rest > 0:
        return f"{', '.join(shown)} and {rest:,} more"
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _position_text(place: Place) -> str:
    return f"(dp {place.dp}, pp {place.pp}, tp {place.tp})"
