"""Notes on a finding's hosts: readings, logs and stacks, beside its evidence."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from rankscope.tracer.span import NONE, NS_PER_S

from .causes.crash import CAUSE as CRASH
from .causes.detector import HostTime, ShownIn
from .causes.hang import CAUSE as HANG
from .causes.order import CAUSES
from .hosts.deviations import MEMORY, PRESSURE, STORAGE, HostReadings
from .hosts.logs import KERNEL, LOG, first_error, read_lines
from .hosts.stacks import classify_hang, describe_groups, group_stacks
from .report.report import NOT_MEASURED, HostNote
from .report.text import (
    format_bytes,
    format_count,
    format_duration,
    format_names,
    format_percent,
    format_ranks,
)
from .severity import ends_run, is_alarm
from .statistics.thresholds import THRESHOLDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .causes.detector import Record
    from .hosts.deviations import Deviation
    from .hosts.logs import LogLine
    from .report.report import Finding

MAX_FINDINGS = 8
"""Findings that get notes, the first."""

MAX_DEVIATIONS = 5
MIN_WAIT = 0.1
"""Share of the time without a CPU from which that may hold a rank up. Source: a finding of one rank
is an excess of 10 %."""

USERS = {"io": STORAGE, "memory": MEMORY}
"""Readings of the processes that may be why others wait, by what these wait for."""

WORDS = {STORAGE: "moved {}/s to and from disks of {}", MEMORY: "held {} of {}"}
WAITED = {"io": "a disk", "memory": "memory"}

MAX_LINES = 4
MAX_RANKS = 64
"""A finding of more ranks is of the job: no single host explains it."""

LAST_NS = 60 * NS_PER_S
"""Time before the end of a run that ended, from which readings and lines count."""

AROUND_NS = 10 * NS_PER_S
MAX_TEXT = 160


def with_host_notes(findings: Iterable[Finding], record: Record) -> tuple[Finding, ...]:
    """Return findings with what their hosts say, and hangs with their class.

    Alarms that name ranks get notes, and what ended the run.

    Args:
        findings: Those of the report, the first one on top.
    """
    noted = []
    for number, finding in enumerate(findings):
        is_known = finding.cause in CAUSES and is_alarm(finding)
        if number < MAX_FINDINGS and is_known and len(finding.ranks) <= MAX_RANKS:
            noted.append(_with_notes(finding, record))
        else:
            noted.append(finding)
    return tuple(noted)


def _with_notes(finding: Finding, record: Record) -> Finding:
    epoch = _epoch_of(finding, record)
    bounds = _bounds_ns(finding, record)
    events = record.context.events
    notes: list[HostNote] = []
    end_class = finding.end_class
    if finding.cause == HANG.name:
        place = classify_hang(finding.ranks, events, epoch=epoch, steps=finding.steps)
        end_class = "" if place is None else place.name.lower().replace("_", "-")
        notes += [HostNote(source="hang class", text=place.value)] if place is not None else []
    steps = finding.steps
    if finding.cause == HANG.name and steps is not None:
        steps = (steps[0], 1 << 31)
    if finding.cause != CRASH.name and (groups := group_stacks(events, epoch=epoch, steps=steps)):
        notes.append(HostNote(source="stacks", text=describe_groups(groups)))
    if bounds is not None and finding.ranks:
        infos = next(each.ranks for each in record.run.epochs if each.epoch == epoch)
        readings = HostReadings(
            samples=record.context.samples,
            begin_ns=bounds[0],
            end_ns=bounds[1],
            places={
                info.rank: (info.host, info.rank if info.local_rank == NONE else info.local_rank)
                for info in infos
            },
        )
        hosts = {readings.places[rank][0] for rank in finding.ranks if rank in readings.places}
        notes += _reading_notes(finding, readings, hosts - {""}, record)
        lines = read_lines(events, epoch)
        notes += _kernel_notes(finding, lines, hosts, bounds)
        if ends_run(finding):
            notes += _log_notes(lines, bounds)
    return replace(finding, end_class=end_class, host_notes=tuple(notes))


def _epoch_of(finding: Finding, record: Record) -> int:
    """Return the epoch that a finding ended, or that of its last step, or the newest."""
    if finding.epoch is not None:
        return finding.epoch
    epochs = [epoch.epoch for epoch in record.run.epochs]
    if finding.steps is None:
        return epochs[-1]
    rows = record.steps.step <= finding.steps[1]
    return int(record.steps.epoch[rows][-1]) if rows.any() else epochs[-1]


def _bounds_ns(finding: Finding, record: Record) -> tuple[int, int] | None:
    """Return first and last Unix time of a finding; None if they are unknown."""
    steps = record.steps
    if not ends_run(finding):
        if finding.steps is None:
            return None
        rows = (steps.step >= finding.steps[0]) & (steps.step <= finding.steps[1])
        return (
            (int(steps.start_ns[rows].min()), int(steps.end_ns[rows].max())) if rows.any() else None
        )
    epoch = _epoch_of(finding, record)
    ends_ns = steps.end_ns[steps.epoch == epoch]
    exits = [ended for ended in record.context.exits if ended.epoch == epoch]
    named = [ended.at_ns for ended in exits if ended.at_ns and ended.rank in finding.ranks]
    if not named and not len(ends_ns):
        return None
    end_ns = max(named) if named else int(ends_ns.max())
    begin_ns = end_ns - LAST_NS
    if finding.cause == HANG.name and len(ends_ns):  # a hang begins with its last step
        begin_ns = min(begin_ns, int(ends_ns.max()))
    return begin_ns, end_ns + AROUND_NS


def _reading_notes(
    finding: Finding, readings: HostReadings, hosts: set[str], record: Record
) -> Iterator[HostNote]:
    deviations = readings.deviations(finding.ranks)
    taken = [
        *_takers_of_cpus(finding, readings, hosts),
        *_users(finding, readings, hosts, deviations),
    ]
    if taken:
        yield HostNote(source="processes", text="; ".join(taken))
    if deviations:
        shown = [_of_place(each, readings) for each in deviations[:MAX_DEVIATIONS]]
        rest = len(deviations) - len(shown)
        text = "; ".join([*shown, *([f"and {rest} more"] if rest > 0 else [])])
        yield HostNote(source="readings", text=text)
    if record.run.source_format != "rankscope" or record.run.imported or not hosts:
        return
    kinds = _relevant_kinds(finding, record)
    missing = readings.not_measured(kinds, hosts)
    if missing:
        names = [f"{kind} of {format_names(tuple(of))}" for kind, of in missing.items()]
        yield HostNote(source=NOT_MEASURED, text=", ".join(names))


def _takers_of_cpus(finding: Finding, readings: HostReadings, hosts: set[str]) -> Iterator[str]:
    """Yield the processes that took the CPUs of these ranks, and who had none for how long.

    What keeps all ranks waiting alike is no evidence against one of them.
    """
    own, others = readings.queue_wait(finding.ranks)
    is_short = own is not None and own >= MIN_WAIT
    is_waiting = is_short and (own or 0.0) >= THRESHOLDS.peer_peak_factor * (others or 0.0)
    may_have_grown = isinstance(CAUSES[finding.cause].shown_in, HostTime) and not is_short
    is_named = False
    for host, name, cores, before in readings.processes(hosts):
        has_grown = before is not None and cores >= THRESHOLDS.min_growth_factor * before
        if is_waiting or (may_have_grown and has_grown):
            usual = "" if before is None else f", in other steps {before:.2f}"
            yield f"{_process(name)} took {cores:.2f} CPUs of {host}{usual}"
            is_named = True
    if is_named and own is not None:
        usual = "" if others is None else f", other ranks {format_percent(others)}"
        who = format_ranks(finding.ranks)
        yield f"{who} had no CPU for {format_percent(own)} of the time{usual}"
    if is_named and (pressure := readings.pressure(hosts, "cpu")) is not None:
        yield f"some process there had none for {format_percent(pressure)}"


def _users(
    finding: Finding, readings: HostReadings, hosts: set[str], deviations: Iterable[Deviation]
) -> Iterator[str]:
    is_of_host = isinstance(CAUSES[finding.cause].shown_in, HostTime)
    risen = {deviation.name for deviation in deviations}
    for what, of in USERS.items():
        stalled = readings.pressure(hosts, what) or 0.0
        if stalled < MIN_WAIT or not (is_of_host or PRESSURE.format(what) in risen):
            continue
        users = readings.processes(hosts, of)
        for host, name, used, _ in users:
            yield f"{_process(name)} {WORDS[of].format(format_bytes(round(used)), host)}"
        if users:
            share = format_percent(stalled)
            yield f"some process waited for {WAITED[what]} for {share} of the time"


def _relevant_kinds(finding: Finding, record: Record) -> tuple[str, ...]:
    shown_in = CAUSES[finding.cause].shown_in
    if shown_in is ShownIn.TRANSFERS:
        return ("network",)
    if shown_in is ShownIn.COMPUTE:
        ranks = record.run.ranks
        names = {ranks[rank].device_name for rank in finding.ranks if rank in ranks}
        return ("CPU",) if names <= {"cpu", ""} else ("GPU",)
    if finding.cause in {"data-stall", "checkpoint"}:
        return ("CPU", "disk")
    return ("CPU",) if isinstance(shown_in, HostTime) else ()


def _process(name: str) -> str:
    """Return a process for a sentence: `stress-ng[4242]` becomes "stress-ng (pid 4242)"."""
    command, bracket, pid = name.rpartition("[")
    number = pid.removesuffix("]")
    is_one = bracket and number.isdigit()
    return f"{command} (pid {number})" if is_one else f"{name} (all processes of it)"


def _of_place(deviation: Deviation, readings: HostReadings) -> str:
    host, device = deviation.place
    ranks = tuple(rank for rank, place in readings.places.items() if place == deviation.place)
    owner = format_ranks(ranks[:1]) if device != NONE and ranks else host
    return f"{owner}: {deviation.text}"


def _kernel_notes(
    finding: Finding, lines: Iterable[LogLine], hosts: set[str], bounds: tuple[int, int]
) -> Iterator[HostNote]:
    """Yield what the kernel's log has of these ranks and hosts in the time, and shortly before."""
    found = [
        line
        for line in lines
        if line.kind == KERNEL
        and (line.rank in finding.ranks or (line.rank == NONE and line.host in hosts))
        and bounds[0] - LAST_NS <= line.at_ns <= bounds[1]
    ]
    counts = Counter(line.text for line in found)
    first = {line.text: line for line in reversed(found)}
    shown = [
        f"{line.text}{f' ({counts[text]} times)' if counts[text] > 1 else ''} on {line.host}"
        + (f", rank {line.rank}" if line.rank != NONE else "")
        + (f" ({line.remedy.replace('`', '')})" if line.remedy else "")
        for text, line in sorted(first.items(), key=lambda item: item[1].at_ns)
    ]
    if shown:
        rest = len(shown) - MAX_LINES
        more = [f"{format_count(rest, 'more message')}"] if rest > 0 else []
        yield HostNote(source="kernel log", text="; ".join([*shown[:MAX_LINES], *more]))


def _log_notes(lines: Iterable[LogLine], bounds: tuple[int, int]) -> Iterator[HostNote]:
    of_ranks = [line for line in lines if line.kind == LOG and line.at_ns <= bounds[1]]
    first = first_error(of_ranks)
    if first is None:
        return
    who = f"rank {first.rank}" if first.rank != NONE else first.host
    text = f"first error: {who} ({first.name}), {first.text[:MAX_TEXT]}"
    ranks = tuple(sorted({line.rank for line in of_ranks if line.rank not in {NONE, first.rank}}))
    if ranks:
        later = min(line.at_ns for line in of_ranks if line.rank in ranks) - first.at_ns
        after = format_duration(max(later, 0))
        text += f"; then {format_count(len(ranks), 'other rank')}, the first {after} later"
    yield HostNote(source="rank logs", text=text)
