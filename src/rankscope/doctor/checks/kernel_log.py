"""Check of the kernel's log: what it says of devices, links and disks."""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from rankscope.analysis.report.text import format_age, format_count
from rankscope.collector.host.kernel_messages import Action, MessageKind, ReadMessage, read_message
from rankscope.tracer.span import NS_PER_S

from ..result import Outcome, error, healthy, not_applicable, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..host import Host

RECENT_S = 3600.0
"""Age up to which a message that asks for a reset is an error: its GPU may have been reset since.
Source: choice; what stays bad is an error of other checks too."""

MAX_AGE_S = 86_400.0
EARLIER = "earlier"
"""Part of an older message: it confirms no finding of now."""

MAX_OUTCOMES = 12

OF_JOBS = frozenset({MessageKind.FAULT, MessageKind.OOM_KILLER})
"""Kinds of messages about a job, which say nothing of the host."""

FAILED = "dmesg: "
"""Beginning of what dmesg writes if it may not read the log."""

UPTIME = re.compile(r"^\[ *(\d+\.\d+)\]")
DATE = re.compile(r"^\[(\w{3} \w{3} [ \d]\d [\d:]{8} \d{4})\]")
ISO_DATE = re.compile(r"^(?:kern +:\w+ *: )?(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")
SYSLOG_DATE = re.compile(r"^(\w{3} [ \d]\d \d\d:\d\d:\d\d) ")
"""Without a year: lines of one log are compared."""


class _Message(NamedTuple):
    message: ReadMessage
    at_s: float | None


def check_kernel_log(host: Host) -> Iterator[Outcome]:
    """Find allow-listed messages of the last day that say something of the host."""
    output = host.first_tool(("dmesg",), ("dmesg", "-T"), ("journalctl", "-k"))
    lines = [] if output is None or output.status else output.text.splitlines()
    if not lines or lines[0].startswith(FAILED):
        yield not_applicable("the kernel's log cannot be read")
        return
    times = [seconds for line in lines if (seconds := _seconds(line)) is not None]
    now_s = _uptime_s(host, times)
    messages = [
        _Message(message, _seconds(line))
        for line in lines
        if (message := read_message(re.sub(DATE, "", line))) is not None
    ]
    outcomes = [*_judge(messages, now_s)]
    yield from outcomes or [
        healthy(f"{format_count(len(lines), 'line')} of the kernel's log, none about a fault")
    ]


def _judge(messages: list[_Message], now_s: float | None) -> Iterator[Outcome]:
    """Yield the messages by text, the newest first."""
    by_text: dict[str, list[_Message]] = {}
    for each in reversed(messages):
        is_noise = each.message.remedy in {Action.FOLLOW, Action.IGNORE}
        if each.message.kind not in OF_JOBS and not is_noise:
            by_text.setdefault(f"{each.message.pci} {each.message.text}".strip(), []).append(each)
    for text, alike in [*by_text.items()][:MAX_OUTCOMES]:
        newest = alike[0]
        age_s = None if now_s is None or newest.at_s is None else max(0.0, now_s - newest.at_s)
        if age_s is not None and age_s > MAX_AGE_S:
            continue
        when = "" if age_s is None else f", {format_age(int(age_s) * NS_PER_S)} ago"
        times = f", {len(alike):,} times" if len(alike) > 1 else ""
        is_recent = (age_s or 0.0) <= RECENT_S
        make = error if newest.message.is_serious and is_recent else warning
        part = "" if is_recent else EARLIER
        yield make(f"{text}{times}{when}", newest.message.remedy, part=part)


def _uptime_s(host: Host, times: list[float]) -> float | None:
    """Return the present time as the log counts it: that of its last line, of a recorded host."""
    uptime = re.match(r"[\d.]+", host.read("/proc/uptime") or "")
    newest = times[-1] if times else None
    if newest is None or host.is_recorded or uptime is None:
        return newest
    return max(float(uptime[0]), newest)


def _seconds(line: str) -> float | None:
    """Return the time of a line, s since the boot or since 1970; None if it has none."""
    if match := UPTIME.match(line):
        return float(match[1])
    try:
        if match := DATE.match(line):
            return datetime.strptime(match[1], "%a %b %d %H:%M:%S %Y").timestamp()  # noqa: DTZ007
        if match := ISO_DATE.match(line):
            return datetime.fromisoformat(match[1]).timestamp()
        if match := SYSLOG_DATE.match(line):
            return datetime.strptime(f"2000 {match[1]}", "%Y %b %d %H:%M:%S").timestamp()  # noqa: DTZ007
    except ValueError:
        return None
    return None
