"""Crashes: which rank failed first and of what, not the many that failed because it did."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from ..report.report import Finding
from ..report.text import format_duration, format_ranks
from .detector import Cause

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ..trace.context import EventRecord, RankExit, RunContext
    from ..trace.tables import EpochInfo, RunInfo
    from .detector import Record

TOLD_CONFIDENCE = 0.95
"""The first failure told its own cause, and every other one came later or only followed."""

LOST_CONFIDENCE = 0.7
"""Its process went without a word: when is known, why is not."""

UNORDERED_FACTOR = 0.8
"""Several ranks failed by themselves, and no clock says which was first."""

MAX_LINE = 160
"""Characters of a message that an evidence sentence quotes."""

DIED = frozenset({"failed", "lost"})

OWN_EVENTS = frozenset({"exit", "lost", "stalled", "alert", "alert-delivery", "pace"})
"""Events that we wrote ourselves: they say nothing that the exit does not."""

OF_THE_JOB = re.compile(
    r"nccl|gloo|c10d|torch\.distributed|dist(backend|network|store)error|tcpstore|process ?group"
    r"|collective|communicator|all_?reduce|rendezvous"
)

TIMEOUT = re.compile(r"timeout|timed out|watchdog caught")

CONNECTION = re.compile(
    r"nccl|gloo|dist(backend|network|store)error|connection (was )?(reset|closed|refused)"
    r"|broken pipe|closed by peer|remote process|peer failure|communicator was aborted"
)

STOPPED = re.compile(r"\b(keyboardinterrupt|signalexception|systemexit|sigterm)")

OWN_NETWORK_ERRORS = ("connectionerror", "connectionreseterror", "brokenpipeerror", "timeouterror")
"""Python's own types: a data loader that loses its server raises them too, so they only count as
cascade where the message speaks of the job's communication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One process that failed or was lost."""

    ended: RankExit
    reason: ExitClass
    host: str

    @property
    def follows(self) -> bool:
        """Whether it only says that the job's communication broke."""
        return self.reason in FOLLOW_UPS


class ExitClass(StrEnum):
    """Why a process ended, as evidence sentences say it."""

    CUDA_OOM = "CUDA out of memory"
    HOST_OOM = "host out of memory"
    DEVICE = "device error"
    EXCEPTION = "exception"
    LOST = (
        "gone without goodbye (ended by a signal: of its launcher or scheduler, of the kernel's"
        " out-of-memory killer, or of a fault in C)"
    )
    TIMEOUT = "communication timeout"
    CONNECTION = "lost connection"
    STOPPED = "told to stop"


FOLLOW_UPS = frozenset({ExitClass.TIMEOUT, ExitClass.CONNECTION, ExitClass.STOPPED})
"""What ranks say that end because another one did."""


OWN_FAULTS: tuple[tuple[ExitClass, re.Pattern[str]], ...] = (
    (
        ExitClass.CUDA_OOM,
        re.compile(
            r"\b(cuda out of memory|hip out of memory|outofmemoryerror|cuda_error_out_of_memory"
            r"|cuda error: out of memory|cublas_status_alloc_failed)"
        ),
    ),
    (
        ExitClass.HOST_OOM,
        re.compile(
            r"\b(memoryerror|_arraymemoryerror|cannot allocate memory|oom-kill|oom killer"
            r"|out of memory: killed process|killed by signal: killed)"
        ),
    ),
    (
        ExitClass.DEVICE,
        re.compile(
            r"\b(xid\b|cuda error|cuda failure|unhandled cuda error|hip error|acceleratorerror"
            r"|uncorrectable|device-side assert|illegal memory access|unspecified launch failure"
            r"|fallen off the bus|cublas_status|cudnn_status)"
        ),
    ),
)
"""Looked for in this order: a device's own error may also speak of memory or of a timeout.
Source: the texts of c10/cuda and of the kernel's NVRM messages."""


CAUSE = Cause(
    name="crash", one="failed first", several="failed first", ends_run=True, has_place=True
)


def detect(record: Record) -> tuple[Finding, ...]:
    """Return the first failure of each epoch that had one."""
    return find_crashes(record.run, record.context)


def find_crashes(run: RunInfo, context: RunContext) -> tuple[Finding, ...]:
    """Name the first failure of each epoch, once for each (ranks, reason).

    A rank that ended with a lost connection, a timeout or a signal followed
    another one, whenever it did. Of the rest the earliest is named; those on
    other hosts too that failed within ``run.clock_error_ns`` of it, for nobody can
    order them (on other hosts of an unknown clock error: all). Where all others
    timed out while one was lost, that one was silent first: a hang, not a crash.

    Confidence, not calibrated: 0.95 where the failure told its cause, 0.7 where the
    process was lost, times 0.8 where several ranks could not be ordered.
    """
    found: list[tuple[int, tuple[Failure, ...], tuple[Failure, ...]]] = []
    for epoch in run.epochs:
        deaths = find_failures(epoch, context)
        own = tuple(death for death in deaths if not death.follows)
        if own and not is_silence(deaths):
            found.append((epoch.epoch, _first(own, run.clock_error_ns), deaths))
    merged: dict[tuple[tuple[int, ...], ExitClass], list[int]] = {}
    for place, (_, first, _) in enumerate(found):
        merged.setdefault((_ranks(first), first[0].reason), []).append(place)
    return tuple(
        _finding([found[place][0] for place in places], *found[places[-1]][1:])
        for places in merged.values()
    )


def find_failures(epoch: EpochInfo, context: RunContext) -> tuple[Failure, ...]:
    """Return the processes of one epoch that failed or were lost, as they came."""
    hosts = {info.rank: info.host for info in epoch.ranks}
    events: dict[int, list[EventRecord]] = {}
    for event in context.events:
        if event.epoch == epoch.epoch:
            events.setdefault(event.rank, []).append(event)
    return tuple(
        Failure(
            ended=ended,
            reason=classify_exit(ended, events.get(ended.rank, ())),
            host=hosts.get(ended.rank, ""),
        )
        for ended in context.exits
        if ended.epoch == epoch.epoch and ended.state in DIED
    )


def is_silence(deaths: Iterable[Failure]) -> bool:
    """Return whether the only ranks that did not follow were lost, while others timed out.

    A process that dies breaks its connections at once; only one that stands
    still lets the others run into their timeout.
    """
    own = [death for death in deaths if not death.follows]
    timeouts = any(death.reason is ExitClass.TIMEOUT for death in deaths)
    broken = any(death.reason is ExitClass.CONNECTION for death in deaths)
    return timeouts and not broken and all(death.reason is ExitClass.LOST for death in own)


def _first(own: Sequence[Failure], clock_error_ns: int | None) -> tuple[Failure, ...]:
    """Return the earliest failure, and those that nobody can order against it."""
    timed = [death for death in own if death.ended.at_ns is not None]
    if not timed:
        return tuple(own)
    first = min(timed, key=_at_ns)
    return tuple(
        death
        for death in own
        if death is first
        or death.ended.at_ns is None
        or (
            death.host != first.host
            and (clock_error_ns is None or _at_ns(death) - _at_ns(first) <= clock_error_ns)
        )
    )


def _at_ns(death: Failure) -> int:
    return death.ended.at_ns or 0


def _ranks(deaths: Iterable[Failure]) -> tuple[int, ...]:
    return tuple(sorted({death.ended.rank for death in deaths}))


def _finding(epochs: list[int], first: tuple[Failure, ...], deaths: tuple[Failure, ...]) -> Finding:
    steps = [death.ended.step for death in first if death.ended.step is not None]
    lost = all(death.reason is ExitClass.LOST for death in first)
    ranks = _ranks(first)
    return Finding(
        cause=CAUSE.name,
        ranks=ranks,
        steps=(min(steps), max(steps)) if steps else None,
        slowdown=None,
        recoverable_ratio=None,
        confidence=(LOST_CONFIDENCE if lost else TOLD_CONFIDENCE)
        * (UNORDERED_FACTOR if len(ranks) > 1 else 1.0),
        evidence=_evidence(epochs, first, deaths),
    )


def _evidence(epochs: list[int], first: tuple[Failure, ...], deaths: tuple[Failure, ...]) -> str:
    """Say who failed, where, of what, and who followed when."""
    death = first[0]
    host = f" (host {death.host})" if death.host else ""
    step = "" if death.ended.step is None else f" in step {death.ended.step}"
    words = format_exit(death.ended)
    text = f"rank {death.ended.rank}{host} failed first{step}: {death.reason.value}"
    text += f" ({words})" if words else ""
    if len(first) > 1:
        text += f"; {format_ranks(_ranks(first[1:]))} cannot be ordered against it by their clocks"
    named = {other.ended.rank for other in first}
    rest = [other for other in deaths if other.ended.rank not in named]
    text += _followers([other for other in rest if other.follows], death, "followed")
    text += _followers(
        [other for other in rest if not other.follows], death, "failed by themselves"
    )
    if len(epochs) > 1:
        text += f"; the same in {len(epochs)} epochs ({', '.join(map(str, epochs))})"
    return text


def _followers(rest: Sequence[Failure], first: Failure, verb: str) -> str:
    if not rest:
        return ""
    ranks = _ranks(rest)
    text = f"; {len(ranks):,} other{'s' * (len(ranks) > 1)} {verb}"
    later = [_at_ns(other) for other in rest if other.ended.at_ns is not None]
    if later and first.ended.at_ns is not None:
        text += f", the first {format_duration(max(min(later) - _at_ns(first), 0))} later"
    reasons = sorted({other.reason.value for other in rest})
    return f"{text} ({', '.join(reasons)})"


def classify_exit(ended: RankExit, events: Iterable[EventRecord] = ()) -> ExitClass:
    """Return why a process that failed or was lost ended.

    Args:
        ended: How it ended.
        events: What else is known of its rank, as the kernel's lines.
    """
    told = [f"{event.kind}: {event.text}" for event in events if event.kind not in OWN_EVENTS]
    text = f"{ended.exception}: {ended.message}".lower()
    for whole in (text, *(line.lower() for line in told)):
        found = _own_fault(whole)
        if found is not None:
            return found
    if ended.state == "lost":
        return ExitClass.LOST
    return _follow_up(ended.exception.lower(), text) or ExitClass.EXCEPTION


def format_exit(ended: RankExit) -> str:
    """Return exception type and the first line of its message, at most `MAX_LINE` characters."""
    message = ended.message.strip().split("\n")[0].strip()
    text = f"{ended.exception}: {message}" if message else ended.exception
    return text if len(text) <= MAX_LINE else f"{text[: MAX_LINE - 3]}..."


def _own_fault(text: str) -> ExitClass | None:
    return next((kind for kind, words in OWN_FAULTS if words.search(text)), None)


def _follow_up(exception: str, text: str) -> ExitClass | None:
    if STOPPED.search(text):
        return ExitClass.STOPPED
    of_job = OF_THE_JOB.search(text) is not None
    if exception.rpartition(".")[2] in OWN_NETWORK_ERRORS and not of_job:
        return None
    if of_job and TIMEOUT.search(text):
        return ExitClass.TIMEOUT
    return ExitClass.CONNECTION if CONNECTION.search(text) else None
