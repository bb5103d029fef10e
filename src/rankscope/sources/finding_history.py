"""Recurrence of findings over the epochs and runs of a store."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rankscope.analysis.recurrence import PlacedFinding, Placement, Recurrence, find_recurrence
from rankscope.analysis.report.report import epoch_of
from rankscope.collector.read.findings import (
    MAX_FINDING_RANKS,
    read_finding_jobs,
    read_finding_places,
    read_findings,
    read_places,
)
from rankscope.tracer.topology import Layout

if TYPE_CHECKING:
    from rankscope.analysis.report.report import Finding, RunReport
    from rankscope.analysis.trace.tables import RankInfo, RunInfo
    from rankscope.collector.read.findings import StoredFinding, StoredPlace
    from rankscope.collector.store.store import Store
    from rankscope.tracer.topology import Coords


class FindingHistory:
    """The findings of a store with the places of their ranks, read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        stored = sorted(read_findings(store), key=lambda finding: finding.opened_ns)
        self._jobs = {(job.run_id, job.epoch): job for job in read_finding_jobs(store)}
        self._places: dict[tuple[str, int], dict[int, Placement]] = {}
        for stored_place in read_finding_places(store):
            ranks = self._places.setdefault((stored_place.run_id, stored_place.epoch), {})
            ranks.setdefault(stored_place.rank, _place(stored_place, stored_place))
        found = {(one.run_id, one.number): self._sighting(one) for one in stored}
        self._sightings = {one: sighting for one, sighting in found.items() if sighting is not None}

    def follow_stored(self, finding: StoredFinding) -> Recurrence | None:
        """Return the recurrence of a finding of this store; None if unknown."""
        now = self._sightings.get((finding.run_id, finding.number))
        if now is None:
            return None
        all_ = self._sightings.values()
        also = [one for one in all_ if one.incarnation == now.incarnation]
        return find_recurrence(
            now,
            all_,
            others=also,
            placements=lambda: [
                _place(each, each) for each in read_places(self._store, *now.incarnation)
            ],
        )

    def follow_report(self, report: RunReport, run: RunInfo) -> tuple[Recurrence | None, ...]:
        """Return the recurrence of each finding of a diagnosis, in its order; None if unknown.

        A finding belongs to the epoch of its last step, and is compared with those of the other
        epochs of the run, too.

        Args:
            run: Description of the run, with the places of its ranks.
        """
        places = {
            known.epoch: {info.rank: _place(info, info.coords) for info in known.ranks}
            for known in run.epochs
        }
        newest, now = max(report.epochs, default=-1), []
        for finding in report.findings:
            epoch = epoch_of(finding, report.placements, newest=newest)
            of_rank = places.get(epoch, {})
            hosts = {place.host for place in of_rank.values()}
            now.append(
                _placed(
                    finding, (report.run, epoch), of_rank, layout=report.layout,
                    num_hosts=len(hosts),
                )
            )  # fmt: skip
        known = [one for one in now if one is not None]
        return tuple(
            None
            if one is None
            else find_recurrence(
                one,
                [*self._sightings.values(), *known],
                others=[other for other in known if other.epoch == one.epoch],
                placements=places.get(one.epoch, {}).values,
            )
            for one in now
        )

    def _sighting(self, finding: StoredFinding) -> PlacedFinding | None:
        key = finding.run_id, finding.epoch
        job = self._jobs.get(key)
        if job is None:
            return None
        layout, of_rank = Layout(**job.layout), self._places.get(key, {})
        return _placed(finding, key, of_rank, layout=layout, num_hosts=job.num_hosts)


def recurrence_document(recurrence: Recurrence | None) -> dict[str, Any] | None:
    """Return the value of the JSON key ``follows`` of a finding."""
    return None if recurrence is None else asdict(recurrence)


def format_recurrence(recurrence: Recurrence | None) -> str:
    """Return a recurrence as a sentence; "" if unknown."""
    if recurrence is None:
        return ""
    if recurrence.what is None:
        return f"host or position: {recurrence.evidence}"
    return f"it follows the {recurrence.what}: {recurrence.evidence}"


def _placed(
    finding: Finding | StoredFinding,
    incarnation: tuple[str, int],
    of_rank: dict[int, Placement],
    *,
    layout: Layout,
    num_hosts: int,
) -> PlacedFinding | None:
    """Return a finding with the places of its ranks; None if it names no rank, or too many."""
    if not finding.ranks or len(finding.ranks) > MAX_FINDING_RANKS:
        return None
    run_id, epoch = incarnation
    return PlacedFinding(
        run_id=run_id,
        epoch=epoch,
        cause=finding.cause,
        placements=tuple(of_rank[rank] for rank in finding.ranks if rank in of_rank),
        sizes=(layout.dp, layout.pp, layout.tp),
        num_hosts=num_hosts,
    )


def _place(rank: RankInfo | StoredPlace, at: Coords | StoredPlace) -> Placement:
    return Placement(host=rank.host, dp=at.dp, pp=at.pp, tp=at.tp, local_rank=rank.local_rank)
