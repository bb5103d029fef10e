"""Cards of what ranks recorded of themselves: last operations, settings that differ, memory."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.tracer.span import KINDS, NONE, NS_PER_S, SpanFlag, SpanKind

from ..breakdown.memory import read_peaks
from ..causes.misconfiguration import common_settings
from ..report.proof_card import MAX_GROUPS, ProofCard, ProofFact
from ..report.text import format_bytes, format_count, format_duration, format_ranks
from .samples import compare_samples, make_series, name_ranks, name_steps, shown_columns

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from ..causes.detector import Record
    from ..report.report import Finding
    from ..trace.context import RankExit, RankManifest

UNFINISHED = int(SpanFlag.OPEN | SpanFlag.ERROR)
MAX_TEXT = 120


def states_card(finding: Finding, record: Record) -> ProofCard | None:
    """Return the last operation of each rank, alike ones together, the culprits first.

    It is the communication that the rank's own report of a stall or a loss names as open, or else
    the last one that begins of its spans. None if nothing was recorded.
    """
    last = _open_operations(record)
    last |= _last_spans(record, known=last.keys())
    if not last:
        return None
    end_ns = max(at_ns for _, at_ns in last.values())
    alike: dict[tuple[bool, str], list[int]] = defaultdict(list)
    died = {
        ended.rank: ended
        for ended in record.context.exits
        if ended.epoch == record.run.epochs[-1].epoch and ended.state in ("failed", "lost")
    }
    for rank, (text, _) in sorted(last.items()):
        ended = died.get(rank)
        reason = f"; {ended.state}: {ended.exception or 'without an exit record'}" if ended else ""
        alike[rank not in finding.ranks, text + reason].append(rank)
    facts = []
    order = sorted(alike.items(), key=lambda entry: (entry[0][0], -len(entry[1])))
    for (is_other, text), ranks in order:
        silent_ns = end_ns - max(last[rank][1] for rank in ranks)
        more = f"; then silent for {format_duration(silent_ns)}" if silent_ns >= NS_PER_S else ""
        more += _when_died([died[rank] for rank in ranks if rank in died], died.values())
        facts.append(
            ProofFact(label=format_ranks(ranks), text=text + more, is_culprit=not is_other)
        )
    return ProofCard(facts=_bounded(facts, "state"))


def _when_died(mine: Iterable[RankExit], others: Iterable[RankExit]) -> str:
    """Return how long after the first of all some ranks ended: ", first", ", 1.2 to 9.8 s later".

    Empty if the time of any is unknown, or not known well enough.
    """
    known = [(ended.at_ns, ended.at_error_ns) for ended in others]
    times_ns = sorted(ended.at_ns for ended in mine if ended.at_ns is not None)
    first_ns = min((at_ns for at_ns, _ in known if at_ns is not None), default=None)
    if first_ns is None or not times_ns or any(at_ns is None or error for at_ns, error in known):
        return ""
    low_ns, high_ns = times_ns[0] - first_ns, times_ns[-1] - first_ns
    if high_ns == 0:
        return ", first of all" if len(known) > 1 else ""
    low, high = format_duration(low_ns), format_duration(high_ns)
    return f", {low} later" if low == high else f", {low} to {high} later"


def _bounded(facts: list[ProofFact], noun: str) -> tuple[ProofFact, ...]:
    if len(facts) <= MAX_GROUPS:
        return tuple(facts)
    rest = format_count(len(facts) - MAX_GROUPS + 1, f"more {noun}")
    more = ProofFact(label=rest, text="", is_culprit=False)
    return (*facts[: MAX_GROUPS - 1], more)


def _last_spans(record: Record, *, known: Collection[int]) -> dict[int, tuple[str, int]]:
    """Return, by other rank, the last begun span of the newest epoch and its end, Unix ns."""
    spans = record.spans
    rows = np.flatnonzero(spans.epoch == record.run.epochs[-1].epoch)
    if not len(rows):
        return {}
    order = rows[np.lexsort((spans.start_ns[rows], spans.rank[rows]))]
    is_last = np.append(spans.rank[order][1:] != spans.rank[order][:-1], True)
    last: dict[int, tuple[str, int]] = {}
    for row in order[is_last].tolist():
        if spans.rank[row] in known:
            continue
        is_open = bool(spans.flags[row] & UNFINISHED)
        entry = {
            "name": spans.names[spans.name[row]],
            "kind": KINDS[spans.kind[row]].value,
            "seq": int(spans.seq[row]),
            "step": int(spans.step[row]),
        }
        verb = "inside" if is_open else "after"
        end_ns = int(spans.start_ns[row]) + (0 if is_open else int(spans.duration_ns[row]))
        last[int(spans.rank[row])] = (f"{verb} {_describe(entry)}", end_ns)
    return last


def _open_operations(record: Record) -> dict[int, tuple[str, int]]:
    """Return, by rank, the innermost open span of its last report of a stall or a loss."""
    innermost: dict[int, Mapping[str, Any]] = {}
    for event in record.context.events:
        if event.kind not in ("stalled", "lost") or event.epoch != record.run.epochs[-1].epoch:
            continue
        entries = event.open_spans
        inside = [entry for entry in entries if _number(entry, "seq") >= 0] or entries
        if inside:
            innermost[event.rank] = inside[-1]
    return {
        rank: (f"inside {_describe(entry)}", max(_number(entry, "start_ns"), 0))
        for rank, entry in innermost.items()
    }


def _number(entry: Mapping[str, Any], name: str) -> int:
    value = entry.get(name)
    return value if isinstance(value, int) else NONE


def _describe(entry: Mapping[str, Any]) -> str:
    """Return an operation in words: "all_reduce 41 (dp-comm), step 12"."""
    name, kind = str(entry.get("name", ""))[:MAX_TEXT], str(entry.get("kind", ""))
    seq, step = _number(entry, "seq"), _number(entry, "step")
    number = f" {seq}" if seq >= 0 else ""
    of_kind = f" ({kind})" if kind and kind not in (name, SpanKind.WAIT) else ""
    of_step = f", step {step:,}" if step >= 0 else ""
    return f"{name or kind}{number}{of_kind}{of_step}"


def hosts_card(finding: Finding, record: Record) -> ProofCard | None:
    """Return the hosts of each named tensor-parallel group, and the ranks of the first of them.

    None if no named group is on several hosts, as where equal data is sent to another host.
    """
    infos = record.run.ranks
    groups: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for rank in finding.ranks:
        coords = infos[rank].coords
        groups[coords.dp, coords.pp, coords.cp].append(rank)
    hosts = [sorted({infos[rank].host for rank in ranks}) for ranks in groups.values()]
    if max(map(len, hosts), default=1) == 1:
        return None
    crossing = [
        ProofFact(label=format_ranks(ranks), text=f"on {', '.join(of_group)}", is_culprit=True)
        for ranks, of_group in zip(groups.values(), hosts, strict=True)
    ]
    first = [rank for rank, info in sorted(infos.items()) if info.host == hosts[0][0]]
    host = ProofFact(label=hosts[0][0], text=f"has {format_ranks(first)}", is_culprit=False)
    return ProofCard(facts=_bounded([host, *crossing], "group"))


def settings_card(finding: Finding, record: Record) -> ProofCard | None:
    """Return each setting that the finding names, with its value on every side.

    The sides are the named ranks and the others, or this run and the previous one.
    """
    newest = record.run.epochs[-1].epoch
    manifests = [each for each in record.context.manifests if each.epoch == newest]
    mine = [each for each in manifests if each.rank in finding.ranks]
    others = [each for each in manifests if each.rank not in finding.ranks]
    before = record.context.previous_manifests
    names = sorted({name for each in (*mine, *before) for name in each.settings} | {
        name for each in others for name in each.settings
    })  # fmt: skip
    named = [name for name in names if f"{name} is " in finding.evidence]
    facts = []
    for name in named[: MAX_GROUPS // 2]:
        facts += _sides(name, mine, is_culprit=True)
        if others:
            facts += _sides(name, others, is_culprit=False)
        elif before:
            value = common_settings(before).get(name)
            facts.append(
                ProofFact(label="previous run", text=_setting(name, value), is_culprit=False)
            )
    return ProofCard(facts=tuple(facts)) if facts else None


def _sides(name: str, manifests: Iterable[RankManifest], *, is_culprit: bool) -> list[ProofFact]:
    """Return the two most frequent values of a setting, with the ranks that have each."""
    by_value: dict[str | None, list[int]] = defaultdict(list)
    for each in manifests:
        by_value[each.settings.get(name)].append(each.rank)
    sizes = Counter({value: len(ranks) for value, ranks in by_value.items()})
    return [
        ProofFact(
            label=format_ranks(sorted(by_value[value])),
            text=_setting(name, value),
            is_culprit=is_culprit,
        )
        for value, _ in sizes.most_common(2)
    ]


def _setting(name: str, value: str | None) -> str:
    return f"{name} = {'(not set)' if value is None else value[:MAX_TEXT]}"


def memory_card(finding: Finding, record: Record) -> ProofCard | None:
    """Return the peaks of the named ranks by step beside those of the others."""
    peaks = read_peaks(record.run, record.steps)
    steps, is_culprit = peaks.steps.tolist(), np.isin(peaks.ranks, finding.ranks)
    if not is_culprit.any():
        return None
    known = np.where(peaks.allocated_bytes < 0, np.nan, peaks.allocated_bytes)
    shown = shown_columns(steps, finding.steps)
    label, others = name_ranks(finding.ranks), f"{format_count(int((~is_culprit).sum()), 'other')}"
    quantity = "peak of the memory of tensors so far"
    capacity = record.run.ranks[finding.ranks[0]].memory.capacity_bytes
    facts = () if capacity is None else (
        ProofFact(
            label=format_ranks(finding.ranks[:1]),
            text=f"{format_bytes(capacity)} is what the allocator can have",
            is_culprit=True,
        ),
    )  # fmt: skip
    return ProofCard(
        strips=(
            compare_samples(
                quantity,
                "bytes",
                name_steps(steps, shown),
                culprits=(label, known[is_culprit, -1:]),
                usual=(others, known[~is_culprit, -1:]),
            ),
        ),
        series=make_series(
            quantity,
            "bytes",
            steps,
            culprits=(label, known[is_culprit]),
            usual=(others, known[~is_culprit]),
            shown=shown,
        ),
        facts=facts,
    )
