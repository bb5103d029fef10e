"""What the last words of a process say of why it ended."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..trace.context import EventRecord, RankExit

MAX_LINE = 160
"""Characters of a message that an evidence sentence quotes."""


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


CASCADE = frozenset({ExitClass.TIMEOUT, ExitClass.CONNECTION, ExitClass.STOPPED})
"""What ranks say that end because another one did."""

DIED = frozenset({"failed", "lost"})
OWN_EVENTS = frozenset({"exit", "lost", "stalled", "alert", "alert-delivery", "pace"})
"""Events that we wrote ourselves: they say nothing that the exit does not."""

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


def exit_class(ended: RankExit, events: Iterable[EventRecord] = ()) -> ExitClass:
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
    return _cascade(ended.exception.lower(), text) or ExitClass.EXCEPTION


def last_words(ended: RankExit) -> str:
    """Return exception type and the first line of its message, at most `MAX_LINE` characters."""
    message = ended.message.strip().split("\n")[0].strip()
    text = f"{ended.exception}: {message}" if message else ended.exception
    return text if len(text) <= MAX_LINE else f"{text[: MAX_LINE - 3]}..."


def _own_fault(text: str) -> ExitClass | None:
    return next((kind for kind, words in OWN_FAULTS if words.search(text)), None)


def _cascade(exception: str, text: str) -> ExitClass | None:
    if STOPPED.search(text):
        return ExitClass.STOPPED
    of_job = OF_THE_JOB.search(text) is not None
    if exception.rpartition(".")[2] in OWN_NETWORK_ERRORS and not of_job:
        return None
    if of_job and TIMEOUT.search(text):
        return ExitClass.TIMEOUT
    return ExitClass.CONNECTION if CONNECTION.search(text) else None
