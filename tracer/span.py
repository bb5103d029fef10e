"""The span, the record that all packages share, and its kinds and flags.

Standard library only, so that reading a trace never loads torch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntFlag, StrEnum
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    from collections.abc import Iterable

UnixNs = NewType("UnixNs", int)
"""Nanoseconds since 1970 on the reference clock, after alignment."""

MonotonicNs = NewType("MonotonicNs", int)
"""Nanoseconds of one host's ``CLOCK_MONOTONIC``; comparable within one boot of one host only."""

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000

FLIGHT_RECORDER = "flight-recorder"
"""Kind of the event that has the content of a rank's dump of a flight recorder."""

STEPS_COUNTED = "steps-counted"
"""Kind of the event that says that the tracer counts the steps of a process from 0."""

NONE = -1
"""Value of an integer column that is unknown or does not apply (step, micro-batch, peer, ...)."""


class SpanKind(StrEnum):
    """Kinds of work on a track, spelled as the table stores them.

    A kind's position is its code in the spool and in numpy columns (`KIND_CODES`): append new
    kinds, never reorder.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    TP_COMM = "tp-comm"
    CP_COMM = "cp-comm"
    EP_COMM = "ep-comm"
    DP_COMM = "dp-comm"
    PP_SEND = "pp-send"
    PP_RECV = "pp-recv"
    WAIT = "wait"
    HOST = "host"
    DATA = "data"
    GC = "gc"
    CHECKPOINT = "checkpoint"
    OTHER = "other"

    # The hash of an enumeration is a Python function, and differs from that of an equal string.
    __hash__ = str.__hash__


class IdleName(StrEnum):
    """Names of ``host`` spans inside compute in which nothing was computed.

    The tracer writes none: it does not know the kernels of a phase. Imported profiles have them.
    """

    LATE = "launched late"
    """The device had become idle before its host launched more."""

    SYNCHRONIZED = "synchronized"
    """The host waited for its device, and launched more only then."""

    IDLE = "idle"
    """The device had work and did not compute: the usual time between two kernels, another stream;
    or a processor between two operators."""

    __hash__ = str.__hash__


KINDS: tuple[SpanKind, ...] = tuple(SpanKind)
"""Every kind, in code order."""

KIND_CODES: dict[SpanKind, int] = {kind: code for code, kind in enumerate(KINDS)}
"""Code of each kind in the spool and in numpy columns."""

COMM_KINDS: frozenset[SpanKind] = frozenset(
    {
        SpanKind.TP_COMM,
        SpanKind.CP_COMM,
        SpanKind.EP_COMM,
        SpanKind.DP_COMM,
        SpanKind.PP_SEND,
        SpanKind.PP_RECV,
    }
)
"""Kinds that are always communication; a span of kind `OTHER` is so if it has a group."""


def pack_kinds(kinds: Iterable[SpanKind]) -> int:
    """Return kinds as a bit mask: bit `k` is set if the kind of code `k` is among them."""
    return sum(1 << KIND_CODES[kind] for kind in set(kinds))


def unpack_kinds(bits: int) -> tuple[SpanKind, ...]:
    """Return the kinds of a bit mask, in code order."""
    return tuple(kind for code, kind in enumerate(KINDS) if bits >> code & 1)


class SpanFlag(IntFlag):
    """Properties of a span beyond its times; stored as 16 bits."""

    NOTHING = 0

    ASYNC = 1
    """The call returned before the work was done."""

    COALESCED = 2
    """One of several operations that one call issued together."""

    DEVICE_BEGIN_KNOWN = 4
    """The start was measured on the device."""

    DEVICE_END_KNOWN = 8
    """The end was measured on the device."""

    HOST_CLOCK = 16
    """Start and end were read on the host (always so on CPU)."""

    OPEN = 32
    """The span had begun and not ended when the process was last seen."""

    ERROR = 64
    """An exception ended the span."""

    END_BOUND = 128
    """The end is an upper bound: the work was done by then, at an unknown time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanColumn:
    """A column of the table `spans`."""

    name: str
    dtype: str
    """numpy type, or `text`. Texts are codes in the spool and in numpy columns."""

    missing: int | None = None
    """Value if a source does not have the column; None: every source has it."""

    offset: int | None = None
    """Offset in the record of the spool if the record holds the value as it is stored. From
    `tracer.spool.COMM_OFFSET` on, only records of communications hold it."""

    nullable: bool = False
    in_analysis: bool = True
    """Whether it is a column of `analysis.trace.tables.SpanTable`."""


SPAN_COLUMNS: tuple[SpanColumn, ...] = (
    SpanColumn(name="step", dtype="int32", offset=8),
    SpanColumn(name="start_ns", dtype="int64"),
    SpanColumn(name="kind", dtype="text"),
    SpanColumn(name="name", dtype="text"),
    SpanColumn(name="track", dtype="text"),
    SpanColumn(name="group_id", dtype="uint64", missing=0, offset=64),
    SpanColumn(name="seq", dtype="int64", missing=NONE, offset=72),
    SpanColumn(name="src_rank", dtype="int32", missing=NONE, offset=80),
    SpanColumn(name="dst_rank", dtype="int32", missing=NONE, offset=84),
    SpanColumn(name="microbatch", dtype="int32", missing=NONE, offset=12),
    SpanColumn(name="chunk", dtype="int32", missing=NONE, offset=16),
    SpanColumn(name="duration_ns", dtype="int64"),
    SpanColumn(name="launch_ns", dtype="int64", missing=NONE),
    SpanColumn(name="num_bytes", dtype="int64", missing=NONE, offset=88),
    SpanColumn(name="interval_id", dtype="int64", missing=0, offset=96),
    SpanColumn(name="parent_row", dtype="uint32", nullable=True, in_analysis=False),
    SpanColumn(name="flags", dtype="uint16", missing=0),
    SpanColumn(name="depth", dtype="int16", missing=0),
    SpanColumn(name="row", dtype="uint32", in_analysis=False),
)
"""Columns of the table `spans`, besides those that name a row's run, epoch, rank and segment.

The wire schema, the decoder of the spool, the statements that read spans and the arrays of the
analysis are made from it. `SpanTable` explains each. docs/extending.md shows how to add one.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One piece of work on one track of one rank, over ``[start_ns, start_ns + duration_ns)``."""

    rank: int
    """Global rank, ``0 <= rank < world_size``; never a position inside a group."""

    step: int
    """Optimizer step; a restart is a new epoch, in which steps may repeat. `NONE` outside any."""

    kind: SpanKind
    name: str
    start_ns: UnixNs
    duration_ns: int
    """Never negative, and never changed by clock alignment."""

    track: str = ""
    group_id: int = 0
    """Hash of the group (`hash_group`); 0 if the span is not communication."""

    seq: int = NONE
    """Per (group, epoch) from 0; for p2p per ordered pair (src, dst) in the group."""

    src_rank: int = NONE
    dst_rank: int = NONE
    microbatch: int = NONE
    chunk: int = NONE
    num_bytes: int = NONE
    flags: SpanFlag = SpanFlag.NOTHING

    def __post_init__(self) -> None:
        if self.duration_ns < 0:
            raise ValueError(
                f"span {self.name!r} on rank {self.rank}"
                f" ends {-self.duration_ns} ns before it starts"
            )

    @property
    def end_ns(self) -> UnixNs:
        """First nanosecond after the span."""
        return UnixNs(self.start_ns + self.duration_ns)


def hash_group(name: str, members: Iterable[int]) -> int:
    """Return the 64-bit id of a communication group, equal on all its members.

    Args:
        name: The group's name in the job, equal on all members.
        members: Global ranks, in any order.

    Returns:
        A number in ``[1, 2**64)``; 0 means "no group".
    """
    text = f"{name}\0{','.join(map(str, sorted(members)))}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1
