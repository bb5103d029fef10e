"""Crashes: the rank that failed first, and its reason."""

from __future__ import annotations

import re
import signal
from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import FLIGHT_RECORDER, NONE, NS_PER_MS, NS_PER_S, SpanKind
from rankscope.tracer.spool import CAUSED_BY, STALL_NS

from ..hosts.logs import (
    AFTER_NS,
    BEFORE_NS,
    KERNEL,
    LOG,
    find_kills,
    is_log_read,
    lines_of_exit,
    read_lines,
)
from ..report.report import Finding
from ..report.text import format_count, format_duration, format_ranks
from ..statistics.thresholds import THRESHOLDS
from .detector import Cause, ProofForm

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from ..hosts.logs import LogLine
    from ..trace.context import EventRecord, RankExit, RunContext, SampleTable
    from ..trace.tables import EpochInfo, RunInfo, SpanTable, StepTable
    from .detector import Record


MAX_LINE = 160
"""Characters of a message that the evidence quotes."""

DIED = frozenset({"failed", "lost"})
CHECKPOINT = SpanKind.CHECKPOINT.value

SILENT_STEPS = 10
"""Times the usual step without a record of any rank: "much longer than a step". Source: choice;
an evaluation may last a few steps."""

MIN_SILENCE_NS = 3_000_000_000
"""A busy machine stops all ranks for shorter times, and ends are dated to a second. Source: choice.
"""

OWN_EVENTS = frozenset(
    {"exit", "lost", "stalled", "alert", "alert-delivery", "pace", FLIGHT_RECORDER, KERNEL, LOG}
)
"""Kinds of events that say nothing which the exit record does not, and lines of logs, which are
joined by time (`explain_exit`)."""

OF_THE_JOB = re.compile(
    r"nccl|gloo|c10d|torch\.distributed|dist(backend|network|store)error|tcpstore|process ?group"
    r"|collective|communicator|all_?reduce|rendezvous|monitoredbarrier"
)
TIMEOUT = re.compile(r"timeout|timed out|watchdog caught|failed to pass monitoredbarrier")
CONNECTION = re.compile(
    r"nccl|gloo|dist(backend|network|store)error|connection (was )?(reset|closed|refused)"
    r"|broken pipe|closed by peer|remote process|peer failure|communicator was aborted"
    r"|caused pair closure|reached monitoredbarrier, but received errors"
)
STOPPED = re.compile(r"\b(keyboardinterrupt|signalexception|systemexit|sigterm)")

XID = re.compile(r"\bXid \(?(?:PCI:\S+ )?(\d+)")
AFTER_S = AFTER_NS // NS_PER_S
WATCHDOG_NS = 3_600 * NS_PER_S
"""An error of a device may be as much earlier than the timeout in which it ends. Source: choice,
twice the longest default of torch (30 min)."""

NETWORK_EXCEPTIONS = ("connectionerror", "connectionreseterror", "brokenpipeerror", "timeouterror")
"""Python's own exceptions. A data loader that loses its server raises them too, so they count as a
lost connection only if the message is about the job's communication."""

CAUSE = Cause(
    name="crash",
    one="failed first",
    several="failed together",
    sentence="The process that started the ranks failed",
    ends_run=True,
    has_place=True,
    proof_form=ProofForm.STATES,
)


class ExitClass(StrEnum):
    """Reason why a process ended; the value is its text in evidence sentences."""

    CUDA_OOM = "CUDA out of memory"
    HOST_OOM = "host out of memory"
    DEVICE = "device error"
    EXCEPTION = "exception"
    LOST = (
        "no exit record (ended by a signal: of its launcher or scheduler, of the kernel's"
        " out-of-memory killer, or of a fault in C code)"
    )
    TIMEOUT = "communication timeout"
    CONNECTION = "lost connection"
    STOPPED = "stopped by a signal"
    DOCUMENT = "bad document"
    """An input that could not be decoded."""


FOLLOW_UPS = frozenset({ExitClass.TIMEOUT, ExitClass.CONNECTION, ExitClass.STOPPED})
"""Reasons of ranks that end because another one did."""

BROKEN = FOLLOW_UPS - {ExitClass.STOPPED}
"""Those of a communication that broke. Of a process that is no rank they are its own."""

OF_PROGRAM = frozenset({ExitClass.EXCEPTION, ExitClass.CUDA_OOM, ExitClass.DOCUMENT})
"""Reasons in the program or its input. Ranks that fail so with one message fail for one reason."""

OF_HOST = frozenset({ExitClass.DEVICE, ExitClass.HOST_OOM})
"""Reasons of which a host's own log has a line. Its ranks fail so for one: its power, a switch of
its devices, its memory."""

TRACEBACK = re.compile(r"^(Original )?Traceback \(most recent call last\):")
NUMBER = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?")

STOP_CODES = frozenset({-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP})
"""Exit codes of processes that a person, a launcher or a scheduler asked to end."""

DECODERS = re.compile(
    r"\b(unicodedecodeerror|jsondecodeerror|arrowinvalid|unidentifiedimageerror|zlib\.error"
    r"|badgzipfile|zstderror|tokenizer\w*error|csv\.error|image file is truncated"
    r"|truncated file read)\b"
)
"""Exceptions of readers of documents, and the messages of those that have no type of their own."""

SIGN_CLASSES = {
    "oom-killer": ExitClass.HOST_OOM,
    "host-oom": ExitClass.HOST_OOM,
    "xid": ExitClass.DEVICE,
    "sxid": ExitClass.DEVICE,
    "gpu-reset": ExitClass.DEVICE,
    "cuda-oom": ExitClass.CUDA_OOM,
    "ecc": ExitClass.DEVICE,
    "cuda-error": ExitClass.DEVICE,
    "document": ExitClass.DOCUMENT,
    "timeout": ExitClass.TIMEOUT,
}
"""Reasons by the class of a line that explains an end. Those of the kernel come first, in this
order: what killed a process is not in its own log."""

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
"""Reasons of its own, in the order of search: a device error may also mention memory or a timeout.
Source: the messages of c10/cuda and of the kernel's NVRM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A process that failed or was lost."""

    ended: RankExit
    reason: ExitClass
    message: str
    """The exception that is the reason, in one line; "" if there is none."""

    host: str
    sign: LogLine | None = None
    """The line of a log that says so; None if there is none."""

    exit_code: int | None = None
    """Of its process, by the kernel or its launcher; negative is a signal; None if unknown."""

    @property
    def label(self) -> str:
        """Return its class for a program: "xid-79", "host-oom", "signal-9"."""
        if self.sign is not None and self.sign.name == "xid":
            return self.sign.label
        if self.reason is ExitClass.DEVICE and (xid := XID.search(self.message)):
            return f"xid-{xid[1]}"
        if self.reason is ExitClass.LOST and (self.exit_code or 0) < 0:
            return f"signal-{-(self.exit_code or 0)}"
        return self.reason.name.lower().replace("_", "-")

    @property
    def words(self) -> str:
        """Return its reason in words."""
        code = self.exit_code
        if self.reason is not ExitClass.LOST:
            return self.reason.value
        if code is None:
            return "no exit record" if self.message else self.reason.value
        known = {int(number): number.name for number in signal.Signals}
        if code >= 0:
            return f"ended with status {code} and without an exit record"
        name = f" ({known[-code]})" if -code in known else ""
        return f"killed by signal {-code}{name}"

    @property
    def signature(self) -> str:
        """Return what alike failures have in common; "" if they are no one failure.

        Those of a program have a message; the kernel's log of a host has a line for each rank that
        it ended, or whose device failed.
        """
        if self.reason in OF_PROGRAM:
            return f"{self.reason.name} {NUMBER.sub('#', self.message)}"
        is_own = self.sign is not None and self.sign.rank == self.ended.rank
        return f"{self.label} {self.host}" if is_own and self.reason in OF_HOST else ""

    @property
    def follows(self) -> bool:
        """Return whether it ended only because the job's communication broke."""
        return self.reason in FOLLOW_UPS


def detect(record: Record) -> tuple[Finding, ...]:
    """Return the first failure of each epoch that had one."""
    from .hang import find_hang  # which imports this module

    run, context, steps = record.run, record.context, record.steps
    has_lost = any(ended.state == "lost" for ended in context.exits)
    hung = [
        epoch.epoch
        for epoch in (run.epochs if has_lost else ())
        if find_hang(run, epoch, record.spans, steps, context) is not None
    ]
    return find_crashes(run, context, steps, hung=hung)


def find_crashes(
    run: RunInfo, context: RunContext, steps: StepTable, *, hung: Collection[int] = ()
) -> tuple[Finding, ...]:
    """Find the first failure of each epoch; one finding for each (ranks, reason).

    A rank that ended with a lost connection, a timeout or a signal followed another one, whatever
    its time. Of the others the earliest is named, with those on other hosts that failed within
    ``run.clock_error_ns`` of it, because the clocks cannot order them (if the clock error is
    unknown, all on other hosts). If all others timed out while one was lost, that one was silent
    first: a hang, not a crash. Processes that were ended one after the other, as by a launcher
    that stops the job, have no first one (`_ended_together`). Nor have ranks that fail by
    themselves with one message: a module that is missing, a loss that is not a number, or devices
    of one host with one Xid.

    The confidence is not calibrated: `ended_confidence`, times `doubt_factor` if the process was
    lost, and again if several ranks could not be ordered.

    Args:
        hung: Epochs in which a hang ended the processes.
    """
    crashes: list[tuple[EpochInfo, tuple[Failure, ...], tuple[Failure, ...]]] = []
    alike: set[str] = set()
    for epoch in run.epochs:
        failures = find_failures(epoch, context, steps)
        independent = own_failures(failures)
        if independent and epoch.epoch not in hung:
            first = _first(independent, run.clock_error_ns)
            if len(independent) == len(failures):
                first += tuple(
                    other for other in _ended_together(independent, first[0]) if other not in first
                )
            signature = first[0].signature
            same = [other for other in independent if other.signature == signature != ""]
            if len(same) > 1 and all(other in same for other in first):
                first = (first[0], *(other for other in same if other is not first[0]))
                alike.add(signature)
            crashes.append((epoch, first, failures))
    merged: dict[tuple[object, ...], list[int]] = {}
    for index, (_, first, _) in enumerate(crashes):
        # Of alike failures a launcher that stops the job may leave another part in each epoch.
        is_alike = first[0].signature in alike
        key = (first[0].signature,) if is_alike else (_ranks(first), first[0].reason)
        merged.setdefault(key, []).append(index)
    findings = []
    for indices in merged.values():
        most = max(indices, key=lambda index: (len(crashes[index][1]), index))
        of_epoch, first, failures = crashes[most]
        ranks = tuple(sorted({rank for index in indices for rank in _ranks(crashes[index][1])}))
        epochs = [crashes[index][0].epoch for index in indices]
        is_alike = first[0].signature in alike
        failed_in = [failure.ended.step for failure in first if failure.ended.step is not None]
        is_lost = all(failure.reason is ExitClass.LOST for failure in first)
        doubt = THRESHOLDS.doubt_factor ** (is_lost + (len(ranks) > 1 and not is_alike))
        finding = Finding(
            cause=CAUSE.name,
            ranks=ranks,
            steps=(min(failed_in), max(failed_in)) if failed_in else None,
            confidence=THRESHOLDS.ended_confidence * doubt,
            evidence=_evidence(
                epochs, first, failures, num_ranks=len(of_epoch.ranks), is_alike=is_alike
            ),
            end_class=first[0].label,
            epoch=epochs[-1],
        )
        findings.append(finding)
    return tuple(findings)


def find_failures(epoch: EpochInfo, context: RunContext, steps: StepTable) -> tuple[Failure, ...]:
    """Return the processes of an epoch that failed or were lost, in order of time.

    A job that works records something in each step. If all were silent for `SILENT_STEPS` usual
    steps, or for `STALL_NS`, before the first of them was lost, the job hung and was stopped; so
    were the processes that had written a dump of the flight recorder in which ranks wait. Of
    exits that follow another one, an exception in whose context that was raised is the
    reason, unless most ranks have one of its type: then it is how a library works.
    """
    hosts = {info.rank: info.host for info in epoch.ranks}
    exits = [ended for ended in context.exits if ended.epoch == epoch.epoch]
    events: dict[int, list[EventRecord]] = {ended.rank: [] for ended in exits}
    for event in context.events:
        if event.epoch == epoch.epoch and event.rank in events:
            events[event.rank].append(event)
    died = [ended for ended in exits if ended.state in DIED]
    of_type = Counter(ended.origin.partition(":")[0] for ended in died)
    lost = (event for of in events.values() for event in of if event.kind == "lost")
    is_saving = any(span.get("kind") == CHECKPOINT for event in lost for span in event.open_spans)
    was_silent = not is_saving and (find_silence(died) or 0) >= _least_silence_ns(epoch, steps)
    dumps = [event for event in context.events if event.kind == FLIGHT_RECORDER]
    dumps = [event for event in dumps if event.epoch == epoch.epoch and event.data.get("has_dump")]
    has_hung = any(event.data.get("open") for event in dumps)
    lived = {event.rank for event in dumps if has_hung}
    failures = []
    lines = read_lines(context.events, epoch.epoch)
    for ended in died:
        reason, message = classify_exit(ended, events[ended.rank]), format_exit(ended)
        host = hosts.get(ended.rank, "")
        before_ns = WATCHDOG_NS if reason is ExitClass.TIMEOUT else BEFORE_NS
        of_exit = lines_of_exit(lines, ended, host, before_ns=before_ns)
        if ended.rank == NONE:  # what started the ranks, none of which died: it follows nothing
            reason = ExitClass.EXCEPTION if reason in BROKEN else reason
            of_exit = ()
        is_lost = reason is ExitClass.LOST
        reason, message, sign = explain_exit(
            reason, message, of_exit, _what_kernel_says(context.samples, ended, host)
        )
        # What the kernel did to some process of the host is no reason of a job that hung before.
        is_own = sign is not None and sign.rank != NONE
        if is_lost and not is_own and (was_silent or ended.rank in lived):
            reason = ExitClass.STOPPED
        kind, _, text = ended.origin.partition(":")
        is_rare = 0 < of_type[kind] <= THRESHOLDS.majority_share * len(exits)
        if kind and is_rare and reason in FOLLOW_UPS:
            earlier = replace(ended, exception=kind, message=text.strip(), origin="")
            if (origin := classify_exit(earlier)) not in FOLLOW_UPS:
                reason, message = origin, format_exit(earlier)
        failures.append(
            Failure(
                ended=ended,
                reason=reason,
                message=message,
                host=host,
                sign=sign,
                exit_code=find_exit_code(of_exit, ended),
            )
        )
    if len(failures) == len(epoch.ranks) and all(map(_is_stopped, failures)):
        return tuple(replace(failure, reason=ExitClass.STOPPED) for failure in failures)
    return tuple(failures)


def _is_stopped(failure: Failure) -> bool:
    """Return whether a process was ended by a signal that asks it to end; none sends it itself."""
    is_asked = failure.reason is ExitClass.LOST and failure.exit_code in STOP_CODES
    return is_asked or failure.reason is ExitClass.STOPPED


def _least_silence_ns(epoch: EpochInfo, steps: StepTable) -> float:
    """Return for how long a job must have recorded nothing to have hung."""
    rows = (steps.epoch == epoch.epoch) & (steps.end_ns > steps.start_ns)
    usual_ns = float(np.median((steps.end_ns - steps.start_ns)[rows])) if rows.any() else STALL_NS
    return min(max(SILENT_STEPS * usual_ns, MIN_SILENCE_NS), STALL_NS)


def was_stopped_at_work(
    epoch: EpochInfo, failures: Sequence[Failure], spans: SpanTable, steps: StepTable
) -> bool:
    """Return whether a job was stopped from outside, and had begun something shortly before.

    What its ranks were in at that moment is no hang: it is where a job that works is at any time.
    """
    reasons = {failure.reason for failure in failures}
    at_ns = [_at_ns(failure) for failure in failures if failure.ended.at_ns is not None]
    if ExitClass.STOPPED not in reasons or ExitClass.TIMEOUT in reasons or not at_ns:
        return False
    begun_ns = spans.start_ns[(spans.epoch == epoch.epoch) & (spans.start_ns <= min(at_ns))]
    return len(begun_ns) > 0 and min(at_ns) - begun_ns.max() < _least_silence_ns(epoch, steps)


def explain_exit(
    reason: ExitClass, message: str, lines: Sequence[LogLine], kernel_says: tuple[int | None, str]
) -> tuple[ExitClass, str, LogLine | None]:
    """Return reason and message of an end with what the logs say, and the line that says it.

    A kernel's line about the rank itself explains its end whatever its exception was: a device that
    fails shows as a timeout, and a killed data loader as an exception. Lines of the whole host, and
    those of its own log, explain only an end that has no exit record.

    Args:
        reason: What its exception is.
        lines: Of `lines_of_exit`.
        kernel_says: How many processes the kernel killed for want of memory, and that in words;
            None if nothing counted them.
    """
    is_lost = reason is ExitClass.LOST
    for name, of_sign in SIGN_CLASSES.items():
        for line in lines:
            is_due = line.ends_process if line.kind == KERNEL else is_lost
            if line.name == name and is_due and (is_lost or line.rank != NONE):
                log = f"the kernel's log of {line.host}" if line.kind == KERNEL else "its log"
                return of_sign, f"{_cut(line.text)}, in {log}", line
    fault = next((line for line in lines if is_lost and line.name == "fault"), None)
    if fault is not None:
        return reason, f"{_cut(fault.text)}, in the kernel's log of {fault.host}", fault
    kills, text = kernel_says
    if not is_lost:
        return reason, message, None
    return ExitClass.HOST_OOM if kills else reason, text, None


def _what_kernel_says(samples: SampleTable, ended: RankExit, host: str) -> tuple[int | None, str]:
    """Return the kernel's out-of-memory kills at an end, and in words what its log has of it."""
    kills = find_kills(samples, ended, host)
    if kills:
        text = f"the kernel's out-of-memory killer ended {format_count(kills, 'process')} of {host}"
        return kills, f"{text} within {AFTER_S} s of it"
    if is_log_read(samples, host):
        return kills, "no trace of the kernel's out-of-memory killer, or of a fault, in its log"
    return kills, "" if kills is None else "no trace of the kernel's out-of-memory killer"


def find_exit_code(lines: Iterable[LogLine], ended: RankExit) -> int | None:
    """Return the exit code of a process, by the kernel or else by its launcher's log."""
    of_launcher = (
        line.exit_code for line in lines if line.exit_code is not None and line.rank == ended.rank
    )
    return ended.exit_code if ended.exit_code is not None else next(of_launcher, None)


def find_silence(ends: Iterable[RankExit]) -> int | None:
    """Return for how long no rank had recorded anything when the first was lost, ns.

    A rank whose last record is unknown is compared with the latest one of the others. If nothing
    watched the processes, the last sign of any counts: one without signs may have been frozen as
    well as dead. None if no rank was lost, or nothing is known of their last records.
    """
    lost = [ended for ended in ends if ended.state == "lost" and ended.at_ns is not None]
    latest_ns = max((ended.recorded_ns or 0 for ended in lost), default=0)
    if not latest_ns:
        return None
    if all(ended.at_error_ns for ended in lost):
        return max(ended.at_ns or 0 for ended in lost) - latest_ns
    return min((ended.at_ns or 0) - (ended.recorded_ns or latest_ns) for ended in lost)


def own_failures(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Return the failures that did not follow another one; none if the job hung before.

    A process that dies breaks its connections at once. Only one that hangs lets the others run
    into their timeout, so if they did, and those that did not follow were lost then, or no process
    noticed that, it was silent.
    """
    failures = tuple(failures)
    independent = tuple(failure for failure in failures if not failure.follows)
    at_ns = [_at_ns(failure) for failure in failures if failure.reason is ExitClass.TIMEOUT]
    has_noticed = any(failure.reason is ExitClass.CONNECTION for failure in failures)
    is_silence = at_ns and (
        not has_noticed or all(_at_ns(failure) >= min(at_ns) for failure in independent)
    )
    if is_silence and all(failure.reason is ExitClass.LOST for failure in independent):
        return ()
    return independent


def _first(failures: Sequence[Failure], clock_error_ns: int | None) -> tuple[Failure, ...]:
    """Return the earliest failure, and those that cannot be ordered against it."""
    timed = [failure for failure in failures if failure.ended.at_ns is not None]
    if not timed:
        return tuple(failures)
    first = min(timed, key=_at_ns)
    return tuple(
        failure
        for failure in failures
        if failure is first
        or failure.ended.at_ns is None
        or (
            failure.host != first.host
            and (clock_error_ns is None or _at_ns(failure) - _at_ns(first) <= clock_error_ns)
        )
    )


def _ended_together(failures: Sequence[Failure], first: Failure) -> tuple[Failure, ...]:
    """Return the lost processes of a host whose order says nothing, the first one included.

    A launcher that stops a job, or the kernel that ends all processes of a group, ends one after
    the other. If one died before that, the launcher noticed it first (torchrun looks every 0.1 s):
    its distance to the next is longer than from that one to the last, or than a launcher waits if
    there are two. Only if no process noticed a broken connection, and the times are that exact.
    """
    timed = [
        failure
        for failure in failures
        if failure.reason is ExitClass.LOST
        and failure.host == first.host
        and failure.ended.at_ns is not None
    ]
    if first not in timed or len(timed) == 1:
        return (first,)
    times = sorted(map(_at_ns, timed))
    spread_ns = times[-1] - times[1] if len(times) > 2 else NS_PER_S  # noqa: PLR2004
    error_ns = max(failure.ended.at_error_ns for failure in timed)
    return (first,) if times[1] - times[0] > max(spread_ns, error_ns) else tuple(timed)


def _at_ns(failure: Failure) -> int:
    return failure.ended.at_ns or 0


def _ranks(failures: Iterable[Failure]) -> tuple[int, ...]:
    return tuple(sorted({failure.ended.rank for failure in failures} - {NONE}))


def _evidence(
    epochs: list[int],
    first: tuple[Failure, ...],
    failures: tuple[Failure, ...],
    *,
    num_ranks: int,
    is_alike: bool,
) -> str:
    """Return which rank failed, where and why, and which ranks followed when.

    Args:
        num_ranks: Of the job.
        is_alike: Whether the first failures have one message, each by itself.
    """
    failure = first[0]
    has_no_first = is_alike and len(first) > 1
    text = _alike_text(first, num_ranks) if has_no_first else _first_text(first)
    named = {other.ended.rank for other in first}
    rest = [other for other in failures if other.ended.rank not in named]
    followed = [other for other in rest if other.follows]
    lost = [other for other in rest if other.reason is ExitClass.LOST]
    by_themselves = [other for other in rest if other not in followed and other not in lost]
    text += _others_text(followed, failure, "followed")
    text += _others_text(lost, failure, "ended too")
    text += _others_text(by_themselves, failure, "failed by themselves")
    if len(epochs) > 1:
        text += f"; the same in {len(epochs)} epochs ({', '.join(map(str, epochs))})"
    return text


def _first_text(first: Sequence[Failure]) -> str:
    """Return who failed first, and who cannot be ordered against it."""
    failure = first[0]
    is_first = len(first) == 1 and failure.ended.rank != NONE
    verb = "failed first" if is_first else "failed"
    text = f"{_name(failure)} {verb}{_reason(failure)}"
    together = [other for other in first[1:] if other.host == failure.host]
    elsewhere = [other for other in first[1:] if other not in together]
    if elsewhere:
        text += f"; the clocks cannot order {format_ranks(_ranks(elsewhere))} against it"
    if together:
        spread_ns = max(_at_ns(other) - _at_ns(failure) for other in together)
        text += (
            f"; {format_ranks(_ranks(together))} of its host ended within"
            f" {format_duration(max(spread_ns, NS_PER_MS))} of it, as if the job had been stopped"
        )
    return text


def _alike_text(alike: Sequence[Failure], num_ranks: int) -> str:
    """Return which ranks of a job failed by themselves, and within which time."""
    failure = alike[0]
    who = f"all {num_ranks:,} ranks" if len(alike) == num_ranks else format_ranks(_ranks(alike))
    text = f"{who} failed by themselves{_reason(failure)}; {_name(failure)} first"
    if all(other.ended.at_ns is not None for other in alike):
        later_ns = max(map(_at_ns, alike)) - _at_ns(failure)
        text += f", the last {format_duration(later_ns)} later"
    return text


def _name(failure: Failure) -> str:
    if failure.ended.rank == NONE:
        return "the process that started the ranks"
    host = f" (host {failure.host})" if failure.host else ""
    return f"rank {failure.ended.rank}{host}"


def _reason(failure: Failure) -> str:
    step = "" if failure.ended.step is None else f" in step {failure.ended.step}"
    message = f" ({failure.message})" if failure.message else ""
    return f"{step}: {failure.words}{message}"


def reason_in(evidence: str) -> str:
    """Return the reason and the message in the evidence of a crash; "" if it has none."""
    return evidence.partition(": ")[2].partition("; ")[0]


def _others_text(rest: Sequence[Failure], first: Failure, verb: str) -> str:
    if not rest:
        return ""
    text = f"; {format_count(len(_ranks(rest)), 'other')} {verb}"
    later = [_at_ns(other) for other in rest if other.ended.at_ns is not None]
    if later and first.ended.at_ns is not None:
        text += f", the first {format_duration(max(min(later) - _at_ns(first), 0))} later"
    reasons = sorted({other.reason.value for other in rest})
    return f"{text} ({', '.join(reasons)})"


def classify_exit(ended: RankExit, events: Iterable[EventRecord] = ()) -> ExitClass:
    """Return the reason why a process that failed or was lost ended.

    Args:
        events: Other events of its rank, such as lines of the kernel's log.
    """
    lines = [f"{event.kind}: {event.text}" for event in events if event.kind not in OWN_EVENTS]
    text = f"{ended.exception}: {ended.message}".lower()
    for whole in (text, *(line.lower() for line in lines)):
        for reason, words in OWN_FAULTS:
            if words.search(whole):
                return reason
    if ended.state == "lost":
        return ExitClass.LOST
    if STOPPED.search(text) or DECODERS.search(text):
        return ExitClass.STOPPED if STOPPED.search(text) else ExitClass.DOCUMENT
    of_job = OF_THE_JOB.search(text) is not None
    if ended.exception.lower().rpartition(".")[2] in NETWORK_EXCEPTIONS and not of_job:
        return ExitClass.EXCEPTION
    if of_job and TIMEOUT.search(text):
        return ExitClass.TIMEOUT
    return ExitClass.CONNECTION if CONNECTION.search(text) else ExitClass.EXCEPTION


def format_exit(ended: RankExit) -> str:
    """Return the exception, or the one that it was raised from, with its first line.

    The text of one that was raised in another process ends with that one's traceback, whose last
    line is added. All of it has at most `MAX_LINE` characters.
    """
    text, _, cause = ended.message.strip().rpartition(CAUSED_BY)
    lines = (cause if text else f"{ended.exception}: {cause}").strip().split("\n")
    message = lines[0].strip()
    if any(TRACEBACK.search(line) for line in lines):
        message += f" {lines[-1].strip()}"
    return _cut(message if ended.message.strip() else ended.exception)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_LINE else f"{text[: MAX_LINE - 3]}..."
