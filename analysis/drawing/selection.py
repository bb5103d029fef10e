"""A selected span, with what it waited for and delayed; the spans of a box against the rest."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.tracer.span import KIND_CODES, KINDS, NONE, NS_PER_S, SpanKind

from .raster import ALL_ROWS, Viewport, find_unfinished

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from numpy.typing import NDArray

    from ..report.report import Finding, Proof, RunReport
    from .raster import StepPicture
    from .timeline import StepTimeline

MARGIN = 1.0
"""Time around a proof that is shown, over its length, on each side: enough to see what came before
and after, and who waited."""

MAX_CULPRITS, MAX_PARTNERS, MAX_WAITING, MAX_PEERS = 16, 16, 12, 20
"""Ranks of each kind that show a finding of a large job: 64 rows, which a screen can show."""

MAX_ARROWS = 32
"""Ranks that a delay is drawn to: more arrows hide the spans, and the table has them all."""

MIN_SHARE_DIFFERENCE = 0.05
"""Difference of two shares below which a property does not count."""

MAX_ALIKE = 2_000
"""Alike spans of a step that are drawn, the longest: more hide each other."""

_MAX_DIGITS = 9
"""Digits of a rank, which has 32 bits."""

_AXES = ("dp", "tp", "pp", "cp", "ep")
_PLACE = attrgetter(*_AXES)

_WAIT = KIND_CODES[SpanKind.WAIT]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanPlace:
    """Place of a span in a step, which stays the same when the step is read again."""

    rank: int
    kind: SpanKind
    at_ns: int
    """A time within the span, from the step's begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlikeSpan:
    """A span of the same kind, name and micro-batch as another one."""

    step: int
    rank: int
    begin_ns: int
    """From its step's begin."""

    duration_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Begin of one member of a communication."""

    rank: int
    after_ns: int
    """Since the first member began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofSpan:
    """The span of a proof beside those that do the same work on other ranks."""

    kind: str
    duration_ns: int
    num_alike: int
    median_ns: int
    """Of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """A delay that one rank passed on to another. Times are from the step's begin."""

    from_rank: int
    from_ns: int
    to_rank: int
    to_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanFacts:
    """A span of a timeline, and its relations to other ranks; None is unknown or meaningless."""

    rank: int
    kind: str
    name: str
    """Text from outside."""

    begin_ns: int
    """From the step's begin."""

    duration_ns: int
    wait_ns: int | None
    transfer_ns: int | None
    num_bytes: int | None
    bytes_per_s: float | None
    """Payload over transfer."""

    microbatch: int | None
    waited_for: int | None
    """The rank that arrived last, if this one waited for it."""

    before: str | None
    """What the rank that arrived last did before: kind of its last span that was none of
    communication."""

    before_ns: int | None
    """Duration of that span."""

    delayed: tuple[int, ...]
    """Ranks that waited for this one, ascending."""

    members: tuple[Arrival, ...]
    """Members of its communication that are loaded, the first to arrive first; without
    ``wait_ns``, one is missing."""

    arrows: tuple[Arrow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Property:
    """A property that spans of a box have more often than the rest."""

    name: str
    value: str
    """Text from outside if the property is a name or a host."""

    inside_ratio: float
    """Share of the box' time in spans with it."""

    outside_ratio: float
    """Share of all other time."""


def find_span(timeline: StepTimeline, place: SpanPlace) -> int | None:
    """Return the row of the span at a place, of several the last to begin; None if none is there.

    Args:
        timeline: The step, or some of its spans.
    """
    spans = timeline.spans
    at_ns = timeline.begin_ns + place.at_ns
    own = (spans.rank == place.rank) & (spans.kind == KIND_CODES[place.kind])
    own &= (spans.start_ns <= at_ns) & (at_ns < spans.start_ns + np.maximum(spans.duration_ns, 1))
    rows = np.flatnonzero(own)
    return int(rows[np.argmax(spans.start_ns[rows])]) if len(rows) else None


def find_alike(timeline: StepTimeline, row: int) -> tuple[AlikeSpan, ...]:
    """Return the spans of a step that do the same work as one of them, which is among them.

    Of more than `MAX_ALIKE` the longest are returned.
    """
    spans = timeline.spans
    alike = np.ones(len(spans), dtype=np.bool_)
    for column in (spans.kind, spans.name, spans.microbatch, spans.chunk):
        alike &= column == column[row]
    rows = np.flatnonzero(alike)
    longest = rows[np.argsort(-spans.duration_ns[rows], kind="stable")][:MAX_ALIKE]
    columns = (spans.rank[longest], spans.start_ns[longest], spans.duration_ns[longest])
    return tuple(
        AlikeSpan(
            step=timeline.step,
            rank=rank,
            begin_ns=start_ns - timeline.begin_ns,
            duration_ns=duration_ns,
        )
        for rank, start_ns, duration_ns in zip(*(one.tolist() for one in columns), strict=True)
    )


def compare_proof(timeline: StepTimeline, proof: Proof, ranks: Collection[int]) -> ProofSpan | None:
    """Return a proof's span beside alike ones; None if it is no span of compute, or has no others.

    Args:
        timeline: The step of the proof, or some of its spans.
        ranks: The ranks at fault, which are no others.
    """
    spans = timeline.spans
    own = (spans.rank == proof.rank) & ~timeline.communication
    own &= spans.start_ns == timeline.begin_ns + proof.begin_ns
    rows = np.flatnonzero(own)
    if not len(rows):
        return None
    row = int(rows[np.argmax(spans.duration_ns[rows])])
    others_ns = [
        one.duration_ns for one in find_alike(timeline, row) if one.rank not in {*ranks, proof.rank}
    ]
    if not others_ns:
        return None
    return ProofSpan(
        kind=KINDS[int(spans.kind[row])].value,
        duration_ns=int(spans.duration_ns[row]),
        num_alike=len(others_ns),
        median_ns=round(float(np.median(others_ns))),
    )


def describe_span(timeline: StepTimeline, row: int) -> SpanFacts:
    """Return the facts of a span, and what it waited for and delayed.

    A communication waited for the member that arrived last, and delayed the others if it was that
    member. Other spans delay those whom the next communication of their rank delays.

    Args:
        timeline: The step, or some of its spans: ranks that are not loaded are not found.
    """
    spans = timeline.spans
    begin_ns = timeline.begin_ns
    rank = int(spans.rank[row])
    source = row if timeline.communication[row] else _next_communication(timeline, row)
    members = _members(timeline, source)
    last = int(timeline.last_rank[row])
    wait_ns = int(timeline.wait_ns[row]) if timeline.wait_ns[row] >= 0 else None
    transfer_ns = None if wait_ns is None else int(timeline.transfer_ns[row])
    num_bytes = int(spans.num_bytes[row]) if spans.num_bytes[row] != NONE else None
    waited_for = last if wait_ns and last not in (NONE, rank) else None
    delayed: NDArray[np.intp] = np.zeros(0, dtype=np.intp)
    if source is not None and int(timeline.last_rank[source]) == rank:
        delayed = members[(spans.rank[members] != rank) & (timeline.wait_ns[members] > 0)]
    culprit = (
        members[spans.rank[members] == waited_for][:1].tolist() if waited_for is not None else []
    )
    before = _before(timeline, culprit[0]) if culprit else None
    arrows = []
    if waited_for is not None and wait_ns is not None:
        at_ns = int(spans.start_ns[row]) - begin_ns + wait_ns
        arrows.append(Arrow(from_rank=waited_for, from_ns=at_ns, to_rank=rank, to_ns=at_ns))
    if source is not None:
        from_ns = int(spans.start_ns[source]) - begin_ns
        arrows += [
            Arrow(from_rank=rank, from_ns=from_ns, to_rank=other, to_ns=from_ns)
            for other in spans.rank[delayed][:MAX_ARROWS].tolist()
        ]
    first_ns = int(spans.start_ns[members].min()) if len(members) else 0
    return SpanFacts(
        rank=rank,
        kind=KINDS[int(spans.kind[row])].value,
        name=spans.names[int(spans.name[row])],
        begin_ns=int(spans.start_ns[row]) - begin_ns,
        duration_ns=int(spans.duration_ns[row]),
        wait_ns=wait_ns,
        transfer_ns=transfer_ns,
        num_bytes=num_bytes,
        bytes_per_s=num_bytes / transfer_ns * NS_PER_S if num_bytes and transfer_ns else None,
        microbatch=int(spans.microbatch[row]) if spans.microbatch[row] != NONE else None,
        waited_for=waited_for,
        before=None if before is None else KINDS[int(spans.kind[before])].value,
        before_ns=None if before is None else int(spans.duration_ns[before]),
        delayed=tuple(sorted(spans.rank[delayed].tolist())),
        members=tuple(
            Arrival(rank=int(spans.rank[one]), after_ns=int(spans.start_ns[one]) - first_ns)
            for one in (members if timeline.communication[row] else [])
        ),
        arrows=tuple(arrows),
    )


def frame_proof(proof: Proof) -> Viewport:
    """Return the part of a step that shows a proof, with a margin and all ranks."""
    margin_ns = max(round(MARGIN * (proof.end_ns - proof.begin_ns)), 1)
    return Viewport(
        begin_ns=max(proof.begin_ns - margin_ns, 0),
        end_ns=proof.end_ns + margin_ns,
        first_row=0,
        end_row=ALL_ROWS,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RelatedRanks:
    """The ranks of a large job in which a finding shows, from the top; none is in two of them."""

    culprits: tuple[int, ...]
    """The rank of the proof, then others that the finding names."""

    partners: tuple[int, ...]
    """Ranks of its groups: those that differ from it on one axis other than dp. Those of its own
    stage come first, then the other stages in their order, along which the delay passes."""

    peers: tuple[int, ...]
    """Ranks in its place of other replicas, those next to its own first: they do the same work."""

    waiting: tuple[int, ...]
    """Ranks that wait longest for the culprits: the delay has reached them."""

    @property
    def sections(self) -> dict[str, tuple[int, ...]]:
        """Return those that there are by the name of their group, from the top."""
        named = {
            "at fault": self.culprits,
            "groups": self.partners,
            "alike": self.peers,
            "waiting": self.waiting,
        }
        return {name: ranks for name, ranks in named.items() if ranks}

    @property
    def all(self) -> tuple[int, ...]:
        """Return all of them, from the top."""
        return tuple(chain.from_iterable(self.sections.values()))


def find_related(report: RunReport, finding: Finding) -> RelatedRanks | None:
    """Return the ranks that show a finding beside those that are alike; None without a proof."""
    if finding.proof is None or finding.proof.rank not in report.coords:
        return None
    first, coords = finding.proof.rank, report.coords
    own = coords[first]
    culprits = tuple(dict.fromkeys((first, *finding.ranks)))[:MAX_CULPRITS]
    taken = set(culprits)

    of_own = _PLACE(own)
    differing: dict[str, list[int]] = {axis: [] for axis in _AXES}  # by the only axis that differs
    for rank, at in coords.items():
        axes = [
            axis
            for axis, *places in zip(_AXES, _PLACE(at), of_own, strict=True)
            if places[0] != places[1]
        ]
        if len(axes) == 1 and rank not in taken:
            differing[axes[0]].append(rank)
    peers = sorted(differing.pop("dp"), key=lambda rank: (abs(coords[rank].dp - own.dp), rank))
    stages = differing.pop("pp")
    of_stage = sorted(chain.from_iterable(differing.values()))
    partners = (*of_stage, *sorted(stages, key=lambda rank: coords[rank].pp))[:MAX_PARTNERS]
    taken |= {*partners, *peers}
    waiting = (
        waits.rank
        for waits in report.longest_waits
        if waits.rank not in taken and any(on.rank in culprits for on in waits.waits_on)
    )
    return RelatedRanks(
        culprits=culprits,
        partners=partners,
        waiting=tuple(islice(waiting, MAX_WAITING)),
        peers=tuple(peers[:MAX_PEERS]),
    )


def find_stop(timeline: StepTimeline) -> int | None:
    """Return when a step came to a stop: its last operation began, and communication never ended.

    In nanoseconds since the step's begin; None if all communication ended.
    """
    if not find_unfinished(timeline).any():
        return None
    return int(timeline.spans.start_ns.max()) - timeline.begin_ns


def find_rank_stops(timeline: StepTimeline, ranks: Iterable[int]) -> dict[int, int]:
    """Return when some ranks came to a stop: what they had begun last had ended, or never did.

    In nanoseconds since the step's begin, by rank; a rank without spans is left out.
    """
    spans = timeline.spans
    until_ns = spans.start_ns + np.where(find_unfinished(timeline), 0, spans.duration_ns)
    # A wait for what never ended has not ended either.
    is_work = (spans.kind != _WAIT) | (timeline.blocked_ns >= 0)
    of_rank = {rank: np.flatnonzero((spans.rank == rank) & is_work) for rank in ranks}
    return {
        rank: int(until_ns[rows].max()) - timeline.begin_ns
        for rank, rows in of_rank.items()
        if len(rows)
    }


def frame_stop(stop_ns: int, culprit_ns: int | None = None) -> Viewport:
    """Return the part of a step that shows how it came to a stop, with a margin and all ranks.

    Args:
        stop_ns: When the last rank came to a stop.
        culprit_ns: When the first culprit did: the part begins half of that before; None: at the
            step's begin.
    """
    begin_ns = 0 if culprit_ns is None else max(min(culprit_ns, stop_ns) // 2, 0)
    end_ns = stop_ns + stop_ns // 4 + 1
    return Viewport(begin_ns=begin_ns, end_ns=end_ns, first_row=0, end_row=ALL_ROWS)


def choose_finding(
    findings: Iterable[Finding], cause: str, ranks: tuple[int, ...]
) -> Finding | None:
    """Return the first finding of a cause that has steps, on some of these ranks if any."""
    return next(
        (
            finding
            for finding in findings
            if finding.cause == cause
            and finding.steps is not None
            and (not ranks or not finding.ranks or not set(ranks).isdisjoint(finding.ranks))
        ),
        None,
    )


def find_proof(
    findings: Iterable[Finding], *, epoch: int, step: int, ranks: tuple[int, ...]
) -> Finding | None:
    """Return the first finding of exactly these ranks whose proof is in a step."""
    return next(
        (
            finding
            for finding in findings
            if finding.proof is not None
            and (finding.proof.epoch, finding.proof.step, finding.ranks) == (epoch, step, ranks)
        ),
        None,
    )


def compare_box(timeline: StepTimeline, inside: NDArray[np.bool_]) -> tuple[Property, ...]:
    """Return what spans of a box have in common against the rest, the largest difference first.

    Compared are the shares of time, so that many short spans do not outweigh a long one.

    Args:
        inside: Shape (spans,): those of the box.
    """
    spans = timeline.spans
    weight = spans.duration_ns.astype(np.float64)
    totals = weight[inside].sum(), weight[~inside].sum()
    if not totals[0] or not totals[1]:
        return ()
    waiting = np.where(timeline.wait_ns * 2 > spans.duration_ns, 1, 0)
    hosts = sorted(set(timeline.hosts.values()))
    host_code = {rank: hosts.index(host) for rank, host in timeline.hosts.items()}
    ranks = spans.rank.tolist()
    columns: dict[str, tuple[NDArray[Any], list[str]]] = {
        "kind": (spans.kind, [kind.value for kind in KINDS]),
        "name": (spans.name, list(spans.names)),
        "rank": (spans.rank, [str(rank) for rank in range(int(spans.rank.max(initial=0)) + 1)]),
        "micro-batch": (spans.microbatch, []),
        "mostly waiting": (waiting, ["no", "yes"]),
        "host": (np.array([host_code.get(rank, NONE) for rank in ranks], np.int64), hosts),
    }
    for axis in ("pp", "dp", "tp", "cp", "ep"):
        places = {rank: getattr(at, axis) for rank, at in timeline.coords.items()}
        codes = np.array([places.get(rank, NONE) for rank in ranks], np.int64)
        columns[axis.upper()] = codes, []
    found = []
    for name, (codes, texts) in columns.items():
        values, index = np.unique(np.asarray(codes, np.int64), return_inverse=True)
        shares = [
            np.bincount(index[own], weights=weight[own], minlength=len(values)) / total
            for own, total in zip((inside, ~inside), totals, strict=True)
        ]
        for code, share, other in zip(values.tolist(), *(s.tolist() for s in shares), strict=True):
            if code != NONE and share - other >= MIN_SHARE_DIFFERENCE:
                value = texts[code] if texts else str(code)
                found.append(
                    Property(name=name, value=value, inside_ratio=share, outside_ratio=other)
                )
    return tuple(sorted(found, key=lambda one: one.outside_ratio - one.inside_ratio))


def _members(timeline: StepTimeline, row: int | None) -> NDArray[np.intp]:
    """Return the rows of the members of a row's communication, the first to arrive first."""
    spans = timeline.spans
    if row is None:
        return np.zeros(0, dtype=np.intp)
    own = timeline.communication
    for column in (spans.group_id, spans.seq, spans.src_rank, spans.dst_rank):
        own = own & (column == column[row])
    if spans.seq[row] == NONE:  # inferred from the times, without a number
        own = (np.arange(len(spans)) == row) & (timeline.wait_ns >= 0)
    rows = np.flatnonzero(own)
    return rows[np.argsort(spans.start_ns[rows], kind="stable")]


def _next_communication(timeline: StepTimeline, row: int) -> int | None:
    spans = timeline.spans
    end_ns = spans.start_ns[row] + spans.duration_ns[row]
    own = (spans.rank == spans.rank[row]) & (timeline.wait_ns >= 0) & (spans.start_ns >= end_ns)
    rows = np.flatnonzero(own)
    return int(rows[np.argmin(spans.start_ns[rows])]) if len(rows) else None


def _before(timeline: StepTimeline, row: int) -> int | None:
    """Return the span of the rank that ended last before a row began, communication left out."""
    spans = timeline.spans
    end_ns = spans.start_ns + spans.duration_ns
    own = (spans.rank == spans.rank[row]) & ~timeline.communication & (spans.kind != _WAIT)
    rows = np.flatnonzero(own & (end_ns <= spans.start_ns[row]))
    return int(rows[np.argmax(end_ns[rows])]) if len(rows) else None


def find_ranks(step: StepTimeline | StepPicture, text: str) -> tuple[int, ...]:
    """Return the ranks that a text names, ascending: by number, or by a part of their host's name.

    Args:
        step: The step, with the hosts of its ranks.
        text: What to look for; case does not matter.
    """
    number, wanted = _rank_number(text), text.strip().lower()
    if number is not None:
        return (number,)
    hosts = step.hosts.items()
    return tuple(sorted(rank for rank, host in hosts if wanted and wanted in host.lower()))


def find_spans(timeline: StepTimeline, text: str, *, most: int) -> tuple[NDArray[np.intp], int]:
    """Return spans that match a text, the longest first, and how many there are.

    A number is a rank; other texts are part of a kind, a name or a host.

    Args:
        text: What to look for; case does not matter.
    """
    spans, wanted = timeline.spans, text.strip().lower()
    matches = np.isin(spans.rank, find_ranks(timeline, text))
    if _rank_number(text) is None:
        kinds = [code for code, kind in enumerate(KINDS) if wanted in kind.value]
        names = [code for code, name in enumerate(spans.names) if wanted in name.lower()]
        matches |= np.isin(spans.kind, kinds) | np.isin(spans.name, names)
    rows = np.flatnonzero(matches)
    longest = rows[np.argsort(-spans.duration_ns[rows], kind="stable")]
    return longest[:most], len(rows)


def _rank_number(text: str) -> int | None:
    """Return the number of a text such as "33" or "rank 33"; None for any other."""
    number = text.strip().lower().removeprefix("rank").strip()
    is_number = number.isascii() and number.isdigit() and len(number) <= _MAX_DIGITS
    return int(number) if is_number else None
