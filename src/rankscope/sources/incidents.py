"""Incidents: the findings of a store with their cost, circumstances, and whether they are fixed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankscope.analysis.causes.misconfiguration import belongs_to_one_process, common_settings
from rankscope.analysis.recurrence import MAX_HOSTS_SHARE
from rankscope.analysis.report.report import GRACE_STEPS
from rankscope.analysis.report.text import format_count, format_duration, format_ranks
from rankscope.analysis.report.tracked_findings import FindingTracker
from rankscope.analysis.severity import ends_run
from rankscope.analysis.statistics.step_change import MIN_STEPS, compare_step_times
from rankscope.analysis.trace.context import RankManifest
from rankscope.collector.read.findings import MAX_FINDING_RANKS, read_findings
from rankscope.collector.read.incidents import (
    read_checkpoints,
    read_events_between,
    read_incarnations,
    read_notes,
)
from rankscope.collector.read.ranks import read_host_findings, read_hosts
from rankscope.collector.read.runs import read_manifests, read_previous_run
from rankscope.collector.read.steps import read_step_times
from rankscope.collector.spool.descriptions import ENDED, FAILED, LOST, RUNNING
from rankscope.dashboard.records.incident import (
    Circumstance,
    Fix,
    FixOutcome,
    Incident,
    IncidentState,
    Moment,
    ShownNote,
)
from rankscope.dashboard.records.rank_details import HostFinding
from rankscope.tracer.span import NS_PER_S

from .finding_history import FindingHistory, format_recurrence
from .stored_findings import to_tracked
from .stored_reports import lost_device_h

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rankscope.analysis.report.report import RunReport
    from rankscope.collector.identity import Row
    from rankscope.collector.read.findings import StoredFinding
    from rankscope.collector.read.incidents import Incarnation
    from rankscope.collector.store.store import Store

LOOKBACK_STEPS = 3 * GRACE_STEPS
"""Steps before an onset in which changes are looked for. Source: choice, three times the steps
within which an onset is known."""

MAX_COMPARED = 200
"""Steps that are compared at either end of a finding, before it and since."""

MAX_SETTINGS = 12
"""Settings that are listed, the commit first."""

MAX_CHARS = 120
"""Characters of a value and of the text of an event."""

MAX_HOSTS = 4
"""Hosts of an incident whose other findings are read."""

MAX_HISTORY = 20
"""Other findings that are listed, the newest."""

MAX_ROWS = 4 * MAX_COMPARED

ENDS = frozenset({ENDED, FAILED, LOST})
"""States of an epoch that is over."""

PLANNED = frozenset({"checkpoint", "evaluation"})
"""Causes that planned pauses are."""

Key = tuple[int, int]
"""Epoch and step: steps repeat after a restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentSource:
    """The store and the run that incidents are read from."""

    store: Store
    run_id: str
    num_ranks: int
    state: str
    """State of the run."""

    report: RunReport | None
    """Its diagnosis, which knows the planned pauses; None: not made."""


def read_incidents(source: IncidentSource) -> tuple[Incident, ...]:
    """Return the incidents of a run, in the order in which they opened."""
    stored = read_findings(source.store, source.run_id)
    if not stored:
        return ()
    history = FindingHistory(source.store)
    return tuple(_read(source, finding, stored, history) for finding in stored)


def read_incident(source: IncidentSource, number: int) -> Incident | None:
    """Return one incident of a run; None if the run has none of this number."""
    stored = read_findings(source.store, source.run_id)
    finding = next((each for each in stored if each.number == number), None)
    if finding is None:
        return None
    return _read(source, finding, stored, FindingHistory(source.store))


def read_shown_notes(store: Store, run_id: str, number: int) -> tuple[ShownNote, ...]:
    """Return the notes about an incident, the newest first."""
    return tuple(
        ShownNote(at_ns=note.at_ns, by=note.by, text=note.text)
        for note in read_notes(store, run_id, number)
    )


def read_host_history(store: Store, host: str, *, most: int) -> tuple[HostFinding, ...]:
    """Return the newest findings of all runs that name a rank on a host."""
    rows = read_host_findings(store, host, most=most, most_ranks=MAX_FINDING_RANKS) if host else []
    return tuple(
        HostFinding(
            run_id=row["run_id"],
            number=row["position"],
            cause=row["cause"],
            ranks=tuple(row["ranks"]),
            steps=None
            if row["first_step"] is None or row["last_step"] is None
            else (row["first_step"], row["last_step"]),
            opened_ns=row["analysed_ns"],
            is_open=row["closed_ns"] is None,
        )
        for row in rows
    )


def number_findings(store: Store, report: RunReport) -> tuple[int | None, ...]:
    """Return the number of the incident of each finding of a report; None: it has none."""
    tracker = FindingTracker(report.run, map(to_tracked, read_findings(store, report.run)))
    numbers = tracker.match(report)
    return tuple(numbers.get(place) for place in range(len(report.findings)))


def _read(
    source: IncidentSource,
    finding: StoredFinding,
    stored: Sequence[StoredFinding],
    history: FindingHistory,
) -> Incident:
    store, run_id = source.store, source.run_id
    incarnations = read_incarnations(store, run_id)
    times = _StepTimes.read(store, finding, incarnations)
    onset = times.onset(finding)
    alike = [each for each in stored if _place(each) == _place(finding)]
    place = alike.index(finding)
    fix = None
    if finding.closed_ns is not None and onset is not None:
        fix = _check_fix(times, finding, onset, source.report, until=alike[place + 1 :][:1])
    restarted = _restart_after(finding, incarnations)
    hosts_of = read_hosts(store, run_id, finding.epoch)
    named = {hosts_of[rank][0] for rank in finding.ranks if rank in hosts_of} - {""}
    return Incident(
        run=run_id,
        number=finding.number,
        cause=finding.cause,
        severity=finding.severity,
        ranks=finding.ranks,
        hosts=tuple(sorted(named)),
        evidence=finding.evidence,
        confidence=finding.confidence,
        state=_state(source, finding, fix, restarted),
        onset=onset,
        last=times.last(finding),
        checked_step=finding.checked_step,
        opened_ns=finding.opened_ns,
        closed_ns=finding.closed_ns,
        saved_s=finding.saved_s,
        lost_device_h=lost_device_h(finding, source.num_ranks),
        fix=fix,
        restarted=restarted,
        came_back_from=alike[place - 1].number if place else None,
        came_back_as=alike[place + 1].number if place + 1 < len(alike) else None,
        before_onset=tuple(_circumstances(source, finding, onset, incarnations, times)),
        history=_other_findings(store, finding, named, {host for host, _ in hosts_of.values()}),
        follows=format_recurrence(history.follow_stored(finding)),
        notes=read_shown_notes(store, run_id, finding.number),
    )


def _place(finding: StoredFinding) -> tuple[str, tuple[int, ...]]:
    """Return what an incident that comes back has in common with the earlier one."""
    return finding.cause, finding.ranks


def _state(
    source: IncidentSource, finding: StoredFinding, fix: Fix | None, restarted: Moment | None
) -> IncidentState:
    if fix is not None and fix.outcome is FixOutcome.VERIFIED:
        return IncidentState.FIXED
    if finding.closed_ns is not None or restarted is not None:
        return IncidentState.ENDED
    if source.state == RUNNING:
        return IncidentState.ONGOING
    is_end = ends_run(to_tracked(finding).finding)
    return IncidentState.ENDED_RUN if is_end else IncidentState.OPEN_AT_END


def _restart_after(finding: StoredFinding, incarnations: Sequence[Incarnation]) -> Moment | None:
    """Return the first step of the epoch after the one that a finding ended."""
    later = [each for each in incarnations if each.epoch > finding.epoch]
    if not later or not ends_run(to_tracked(finding).finding):
        return None
    return Moment(epoch=later[0].epoch, step=later[0].first_step, at_ns=later[0].begin_ns)


@dataclass(frozen=True, slots=True)
class _StepTimes:
    """Times of the steps around a finding."""

    rows: Mapping[Key, Row]
    """By epoch and step, ascending, without steps that not all ranks have ended."""

    first_steps: frozenset[Key]
    """The first step of each epoch, in which the job starts up."""

    @classmethod
    def read(
        cls, store: Store, finding: StoredFinding, incarnations: Sequence[Incarnation]
    ) -> _StepTimes:
        """Read the steps around the onset of a finding, around its end, and after a restart."""
        of_finding = (finding.onset_step, finding.last_step)
        ends = {step for step in of_finding if step is not None} or {finding.checked_step}
        ends |= {each.first_step for each in incarnations if each.epoch > finding.epoch}
        rows: dict[Key, Row] = {}
        for end in ends:
            found = read_step_times(
                store,
                finding.run_id,
                most=MAX_ROWS,
                first=max(end - MAX_COMPARED, 0),
                last=end + MAX_COMPARED,
            )
            rows |= {(row["epoch"], row["step"]): row for row in found}
        most_ranks: dict[int, int] = {}
        for (epoch, _), row in rows.items():
            most_ranks[epoch] = max(row["num_ranks"], most_ranks.get(epoch, 0))
        newest = {key[0]: key for key in sorted(rows)}
        for epoch, key in newest.items():
            if rows[key]["num_ranks"] < most_ranks[epoch]:
                del rows[key]
        first_steps = frozenset((each.epoch, each.first_step) for each in incarnations)
        return cls(dict(sorted(rows.items())), first_steps)

    def onset(self, finding: StoredFinding) -> Moment | None:
        """Return the first step that shows a finding, in the newest epoch that it can be of."""
        step = finding.onset_step
        if step is None:
            return None
        epochs = [key[0] for key in self.rows if key[1] == step and key[0] <= finding.epoch]
        # It opened after its onset: a step of this number that came later is a repetition.
        begun = [
            epoch for epoch in epochs if self.rows[epoch, step]["last_ns"] <= finding.opened_ns
        ]
        epoch = max(begun or epochs, default=finding.epoch)
        at_ns = self.at_ns((epoch, step), "first_ns")
        if at_ns is None:  # it never ended, and began when the one before did
            at_ns = self.at_ns((epoch, step - 1), "last_ns")
        return Moment(epoch=epoch, step=step, at_ns=at_ns)

    def last(self, finding: StoredFinding) -> Moment | None:
        """Return the last step that shows a finding, in the newest epoch that it can be of.

        The epoch of a finding is that of its placement, which a restart on the same hosts keeps.
        """
        step = finding.last_step
        if step is None:
            return None
        epochs = [key[0] for key in self.rows if key[1] == step and key[0] <= finding.epoch]
        epoch = max(epochs, default=finding.epoch)
        return Moment(epoch=epoch, step=step, at_ns=self.at_ns((epoch, step), "last_ns"))

    def at_ns(self, key: Key, name: str) -> int | None:
        """Return the begin or the end of a step; None if it is not stored."""
        row = self.rows.get(key)
        return None if row is None else int(row[name])

    def seconds(self, keys: Iterable[Key]) -> list[float]:
        """Return the times of steps."""
        rows = map(self.rows.__getitem__, keys)
        return [(row["last_ns"] - row["first_ns"]) / NS_PER_S for row in rows]


def _check_fix(
    times: _StepTimes,
    finding: StoredFinding,
    onset: Moment,
    report: RunReport | None,
    *,
    until: Sequence[StoredFinding],
) -> Fix | None:
    """Compare the steps since a finding ended with those that showed it.

    Of a step that was repeated after a restart, the newest counts, as in the diagnosis.

    Args:
        times: Times of the steps around it.
        finding: The finding, which is closed.
        report: The diagnosis of the run, which knows the planned pauses.
        until: The finding as which it came back, if it did.
    """
    end = times.last(finding)
    if end is None:
        return None
    first, last = (onset.epoch, onset.step), (end.epoch, end.step)
    returned = times.onset(until[0]) if until else None
    skipped: set[int] = set()
    if report is not None:
        skipped = {*report.warmup_steps, *report.planned_steps}
    if finding.cause in PLANNED:
        skipped = set()
    steady = [key for key in times.rows if key not in times.first_steps and key[1] not in skipped]
    newest = {step: epoch for epoch, step in times.rows}  # ascending: the last one counts
    valid = [key for key in steady if newest[key[1]] == key[0]]
    shown = [key for key in valid if first <= key <= last and first[1] <= key[1] <= last[1]]
    since = [key for key in valid if key > last]
    if returned is not None:
        since = [key for key in since if key < (returned.epoch, returned.step)]
    usual = [key for key in steady if key < first][-MAX_COMPARED:]
    before_s, after_s, usual_s = (times.seconds(keys) for keys in (shown, since, usual))
    change = compare_step_times(before_s, after_s)
    outcome = FixOutcome.NOT_BETTER
    if change.is_significant is None:
        outcome = FixOutcome.TOO_FEW
    elif change.is_significant and change.ratio is not None and change.ratio < 1:
        outcome = FixOutcome.VERIFIED
    return Fix(
        outcome=outcome,
        first_step=since[0][1] if since else end.step + 1,
        num_before=len(before_s),
        num_after=len(after_s),
        num_needed=MIN_STEPS,
        before_s=_mean(before_s),
        after_s=_mean(after_s),
        margin_s=change.margin_s,
        usual_s=_mean(usual_s),
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _circumstances(
    source: IncidentSource,
    finding: StoredFinding,
    onset: Moment | None,
    incarnations: Sequence[Incarnation],
    times: _StepTimes,
) -> Iterator[Circumstance]:
    """Yield what changed before an onset; without one, before the last step of its epoch."""
    store, run_id = source.store, source.run_id
    epoch = finding.epoch if onset is None else onset.epoch
    now = next((each for each in incarnations if each.epoch == epoch), None)
    if now is None:
        return
    step = now.last_step if onset is None else onset.step
    earlier = [each for each in incarnations if each.epoch < epoch]
    num_before = step - now.first_step
    is_near = num_before <= LOOKBACK_STEPS

    def at_start(kind: str, text: str) -> Circumstance:
        return Circumstance(kind=kind, text=text, step=now.first_step, num_steps_before=num_before)

    if earlier:
        before = earlier[-1]
        state = f" ({before.state})" if before.state in ENDS else ""
        text = (
            f"epoch {epoch} began with step {now.first_step:,};"
            f" epoch {before.epoch}{state} had steps up to {before.last_step:,}"
        )
        yield at_start("restart", text)
        if is_near:
            yield from (at_start("host", text) for text in _moves(store, finding, before, now))
            manifests = read_manifests(store, run_id)
            then, since = (_settings(manifests, each.epoch) for each in (before, now))
            yield from (at_start("setting", text) for text in _changed(then, since))
    elif is_near and (previous := read_previous_run(store, run_id)) is not None:
        manifests = read_manifests(store, previous)
        then = _settings(manifests, max((each[0] for each in manifests), default=0))
        since = _settings(read_manifests(store, run_id), epoch)
        for text in _changed(then, since):
            yield at_start("setting", f"{text} (against the previous run, {previous})")
    yield from _pauses(source, finding, (epoch, step), first=now.first_step)
    yield from _events(source, (epoch, step), times, first=now.first_step)


def _moves(
    store: Store, finding: StoredFinding, before: Incarnation, now: Incarnation
) -> Iterator[str]:
    """Yield the ranks at fault that a restart moved to another host, and how many others."""
    then, since = (read_hosts(store, finding.run_id, each.epoch) for each in (before, now))
    moved = {
        rank: (then[rank][0], host)
        for rank, (host, _) in sorted(since.items())
        if rank in then and host and then[rank][0] and then[rank][0] != host
    }
    of_finding = [rank for rank in finding.ranks if rank in moved]
    for rank in of_finding[:MAX_HOSTS]:
        host, other = moved[rank]
        yield f"rank {rank} moved from {host} to {other}"
    others = [rank for rank in moved if rank not in of_finding[:MAX_HOSTS]]
    if others:
        hosts = sorted({moved[rank][1] for rank in others})
        more = f" and {len(hosts) - MAX_HOSTS:,} more" if len(hosts) > MAX_HOSTS else ""
        verb = "moved" if of_finding else "and no rank at fault moved"
        yield f"{format_ranks(others)} {verb}, to {', '.join(hosts[:MAX_HOSTS])}{more}"


def _settings(
    manifests: Iterable[tuple[int, int, Mapping[str, str]]], epoch: int
) -> dict[str, str]:
    """Return the settings that most ranks of an epoch share; empty if no manifest is stored."""
    own = [
        RankManifest(epoch=of, rank=rank, settings=settings)
        for of, rank, settings in manifests
        if of == epoch
    ]
    return common_settings(own) if own else {}


def _changed(then: Mapping[str, str], since: Mapping[str, str]) -> list[str]:
    """Return the settings that differ, the commit first; none if one side has no manifest."""
    if not then or not since:
        return []
    names = sorted(
        (
            name
            for name in {*then, *since}
            if then.get(name) != since.get(name) and not belongs_to_one_process(name)
        ),
        key=lambda name: (not name.startswith("git."), name),
    )
    texts = [
        f"{name}: {_value(then.get(name))} -> {_value(since.get(name))}"
        for name in names[:MAX_SETTINGS]
    ]
    if len(names) > MAX_SETTINGS:
        texts.append(format_count(len(names) - MAX_SETTINGS, "more setting"))
    return texts


def _value(value: str | None) -> str:
    if value is None:
        return "unset"
    return value if len(value) <= MAX_CHARS else f"{value[: MAX_CHARS - 1]}…"


def _pauses(
    source: IncidentSource, finding: StoredFinding, onset: Key, *, first: int
) -> Iterator[Circumstance]:
    """Yield the checkpoints and the other planned pauses in the steps before an onset."""
    if finding.cause in PLANNED:
        return
    epoch, step = onset
    first = max(step - LOOKBACK_STEPS, first)
    pauses = {
        row["step"]: Circumstance(
            kind="checkpoint",
            text=f"a checkpoint on {format_count(row['num_ranks'], 'rank')},"
            f" {format_duration(row['longest_ns'])} at most",
            step=row["step"],
            num_steps_before=step - row["step"],
        )
        for row in read_checkpoints(
            source.store, source.run_id, epoch=epoch, first=first, last=step
        )
    }
    planned = () if source.report is None else source.report.planned_steps
    for number in planned:
        if first <= number <= step and number not in pauses:
            pauses[number] = Circumstance(
                kind="planned pause",
                text="a pause of all ranks, such as an evaluation",
                step=number,
                num_steps_before=step - number,
            )
    yield from (pauses[number] for number in sorted(pauses))


def _events(
    source: IncidentSource, onset: Key, times: _StepTimes, *, first: int
) -> Iterator[Circumstance]:
    """Yield the kinds of events in the steps before an onset."""
    epoch, step = onset
    begins = {
        number: row["first_ns"]
        for (of, number), row in times.rows.items()
        if of == epoch and max(step - LOOKBACK_STEPS, first) <= number <= step
    }
    last_ns = times.at_ns(onset, "last_ns")
    if not begins or last_ns is None:
        return
    first_ns = min(begins.values())
    for row in read_events_between(
        source.store, source.run_id, epoch=epoch, first_ns=first_ns, last_ns=last_ns
    ):
        own = max(number for number, at_ns in begins.items() if at_ns <= row["first_ns"])
        others = f", and {row['num'] - 1:,} more" if row["num"] > 1 else ""
        text = _value(row["first_text"].partition("\n")[0])
        yield Circumstance(
            kind=row["kind"],
            text=f"{text} (rank {row['first_rank']}{others})",
            step=own,
            num_steps_before=step - own,
        )


def _other_findings(
    store: Store, finding: StoredFinding, named: set[str], hosts: set[str]
) -> tuple[HostFinding, ...]:
    """Return the other findings on the hosts of a finding; none if it is about most hosts."""
    if len(named) > max(1, MAX_HOSTS_SHARE * len(hosts)):
        return ()
    others = {
        (each.run_id, each.number): each
        for host in sorted(named)[:MAX_HOSTS]
        for each in read_host_history(store, host, most=MAX_HISTORY)
    }
    others.pop((finding.run_id, finding.number), None)
    newest = sorted(others.values(), key=lambda each: -each.opened_ns)
    return tuple(newest[:MAX_HISTORY])
