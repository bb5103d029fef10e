"""Lines of the kernel's log and of the ranks' logs, joined to the ends of processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankscope.tracer.span import NONE, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ..trace.context import EventRecord, RankExit, SampleTable

KERNEL, LOG = "kernel", "log"
"""Kinds of the events of a host's logs."""

AFTER_NS = 5 * NS_PER_S
"""A line is read up to a second after it was written, and a launcher reports an end later. What
comes after that is of something else. Source: choice."""

BEFORE_NS = 60 * NS_PER_S
"""An error of a whole host explains an end that follows within this time. Source: choice."""

KILLS = "oom-killed-processes"
KERNEL_LINES, KERNEL_GAPS = "kernel-log-lines", "kernel-log-gaps"
"""Names of samples: the kernel's count of processes that it killed for want of memory, the lines of
its log that were read, and how often some were lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line of a log that says what is wrong."""

    at_ns: int
    kind: str
    """`KERNEL` or `LOG`."""

    name: str
    """Class of the line: "xid", "oom-killer", "cuda-error", ..."""

    text: str
    host: str
    rank: int
    """-1: the host as a whole."""

    code: int | None = None
    """Number of an Xid."""

    exit_code: int | None = None
    """Of the process, as its launcher reports it: negative is a signal."""

    ends_process: bool = False
    """Whether it explains why a process ends."""

    remedy: str = ""
    file: str = ""

    @property
    def label(self) -> str:
        """Return its class for a reader: "xid-79"."""
        return f"{self.name}-{self.code}" if self.code is not None else self.name


def read_lines(events: Iterable[EventRecord], epoch: int) -> tuple[LogLine, ...]:
    """Return the lines of the logs of one epoch, in order of time."""
    return tuple(
        _line(event) for event in events if event.kind in {KERNEL, LOG} and event.epoch == epoch
    )


def _line(event: EventRecord) -> LogLine:
    data = event.data
    exit_code, signal = _whole(data.get("exit_code")), _whole(data.get("signal"))
    return LogLine(
        at_ns=event.at_ns,
        kind=event.kind,
        name=str(data.get("class") or ""),
        text=event.text,
        host=str(data.get("host") or ""),
        rank=event.rank,
        code=_whole(data.get("code")),
        exit_code=exit_code if signal is None else -signal,
        ends_process=data.get("ends_process") is True,
        remedy=str(data.get("remedy") or ""),
        file=str(data.get("file") or ""),
    )


def _whole(value: Any) -> int | None:  # noqa: ANN401  # any JSON value
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def lines_of_exit(
    lines: Iterable[LogLine], ended: RankExit, host: str, *, before_ns: int = BEFORE_NS
) -> tuple[LogLine, ...]:
    """Return the lines that may explain the end of a process, the rank's own ones first.

    Args:
        lines: Of its epoch.
        ended: The end; of one at an unknown time there are none.
        before_ns: How much earlier the rank's own lines may be. Those of the host as a whole are at
            most `BEFORE_NS` earlier.
    """
    own, of_host = [], []
    for line in lines:
        if ended.at_ns is None or line.at_ns > ended.at_ns + ended.at_error_ns + AFTER_NS:
            continue
        if line.rank == ended.rank and line.at_ns >= ended.at_ns - before_ns:
            own.append(line)
        elif line.rank == NONE and line.host == host and line.at_ns >= ended.at_ns - BEFORE_NS:
            of_host.append(line)
    return (*own, *of_host)


def find_kills(samples: SampleTable, ended: RankExit, host: str) -> int | None:
    """Return how many processes of a host the kernel killed for want of memory at an end.

    None if nothing counted them around that time.
    """
    if host not in samples.hosts or KILLS not in samples.names or ended.at_ns is None:
        return None
    rows = (samples.host == samples.hosts.index(host)) & (
        samples.name == samples.names.index(KILLS)
    )
    at_ns, value = samples.at_ns[rows], samples.value[rows]
    before = at_ns <= ended.at_ns - NS_PER_S
    after = (at_ns > ended.at_ns) & (at_ns <= ended.at_ns + ended.at_error_ns + AFTER_NS)
    if not before.any() or not after.any():
        return None
    return int(value[after].max() - value[before][-1])


def is_log_read(samples: SampleTable, host: str) -> bool:
    """Return whether the kernel's log of a host was read, without a gap."""

    def has(name: str) -> bool:
        if host not in samples.hosts or name not in samples.names:
            return False
        is_host = samples.host == samples.hosts.index(host)
        return bool((is_host & (samples.name == samples.names.index(name))).any())

    return has(KERNEL_LINES) and not has(KERNEL_GAPS)


def first_error(lines: Sequence[LogLine]) -> LogLine | None:
    """Return the first error in the ranks' logs, of those that are no launcher's."""
    of_ranks = (line for line in lines if line.kind == LOG and line.exit_code is None)
    return min(of_ranks, key=lambda line: line.at_ns, default=None)
