"""Quality of a report: what is missing from the trace, left out of the analysis, or uncertain."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KIND_CODES, NONE, SpanFlag, SpanKind
from rankscope.tracer.spool import OTHER_NAME

from .arrays.grouping import factorize, is_one_of, sorted_unique
from .arrays.sorting import stable_argsort
from .readers.tracer.pieces import OVERLAP_SLACK_NS
from .readers.waits import is_communication
from .replay.model import COMPUTE_CODES
from .report.report import Quality
from .report.text import format_count, format_ranges, format_ranks
from .statistics.link_profile import find_lone_links
from .trace.account import TORN, TRUNCATED
from .trace.tables import format_of, is_tp_collapsed, num_expected_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from .replay.model import Reading, Transfers
    from .trace.context import SampleTable
    from .trace.tables import RunInfo, SpanTable, StepTable

ADAPTER_SPEED = "nic-speed-bytes-per-s"
"""Name of the samples of a network adapter's speed; see docs/samples.md."""

MAX_RANGES = 5
"""Ranges of left-out steps that a warning lists before it counts the rest."""


def assess_quality(
    run: RunInfo,
    spans: SpanTable,
    steps: StepTable,
    reading: Reading | None,
    *,
    samples: SampleTable | None = None,
    has_worker_slowdown: bool = True,
) -> Quality:
    """Return the limits of a run's trace, with a warning for each.

    Args:
        reading: Its operations; None if there are no spans.
        samples: Readings of its hosts; None if there are none.
        has_worker_slowdown: Whether the slowdown by dp position and worker was computed.
    """
    warnings = [*run.warnings, *(() if reading is None else reading.warnings)]
    if not has_worker_slowdown:
        warnings.append(
            "slowdown by dp position and worker was not computed: too many dp positions have steps"
            " of unequal structure, and each would need a replay; analyze fewer steps (--steps A:B)"
        )
    if reading is not None and reading.left_out:
        warnings.append(left_out_sentence(reading.left_out))
    if reading is not None:
        warnings += _lone_group_warnings(run, reading.transfers, samples)
    if format_of(run).has_groups:
        warnings += [*_missing_rank_warnings(run), *misreading_warnings(spans)]
    account = run.account
    if num_rows := account.dropped.get(TRUNCATED):
        warnings.append(f"{format_count(num_rows, 'record')} lost: segments of the spool were cut")
    if num_torn := account.dropped.get(TORN):
        warnings.append(f"{format_count(num_torn, 'record')} torn: the process ended while writing")
    return Quality(
        account=account,
        account_by_rank=run.accounts,
        clock_error_ns=run.clock_error_ns,
        coverage_ratio=None if reading is None else _coverage(run, steps, reading),
        warnings=tuple(warnings),
    )


def _lone_group_warnings(
    run: RunInfo, transfers: Transfers, samples: SampleTable | None
) -> list[str]:
    lone = find_lone_links(transfers, run.ranks)
    if not len(lone):
        return []
    num = format_count(len(lone), "link")
    text = (
        f"insufficient evidence about links: {num} between hosts, without an alike one, compared"
        " with its own other steps only. Whether it is slow from the first step on is unknown:"
        " compare with an earlier run on the same hosts"
    )
    hosts = {info.host for info in run.ranks.values()}
    speeds: dict[str, float] = {}  # of each host's fastest adapter
    for code, name in enumerate(() if samples is None else samples.names):
        if samples is not None and name.startswith(ADAPTER_SPEED):
            rows = samples.name == code
            hosts_of = (samples.hosts[host] for host in samples.host[rows].tolist())
            for host, speed in zip(hosts_of, samples.value[rows].tolist(), strict=True):
                if host in hosts:
                    speeds[host] = max(speeds.get(host, 0.0), speed)
    least, most = min(speeds.values(), default=0.0), max(speeds.values(), default=0.0)
    if least < most:
        slow = sorted(host for host, speed in speeds.items() if speed == least)
        text += (
            f". The network adapter of {slow[0]}"
            f"{f' and {len(slow) - 1:,} more' if len(slow) > 1 else ''} runs at"
            f" {least / 1e9:.3g} GB/s, others at up to {most / 1e9:.3g} GB/s"
        )
    return [text]


def _missing_rank_warnings(run: RunInfo) -> list[str]:
    newest = run.epochs[-1]
    num, expected = len(newest.ranks), num_expected_ranks(run)
    if run.imported and num < run.world_size and not is_tp_collapsed(run, newest):
        ranks = sorted(rank.rank for rank in newest.ranks)
        missing = sorted(set(range(run.world_size)).difference(ranks))
        were = "was" if len(missing) == 1 else "were"
        compared, they_wait = ("is", "it waits") if num == 1 else ("are", "they wait")
        text = (
            f"{format_ranks(missing)} of {run.world_size:,} {were} not imported: only"
            f" {format_ranks(ranks)} {compared} compared, and the time in which {they_wait} for"
            " others counts as transfer"
        )
        return [text]
    if num >= expected:
        return []
    text = (
        f"the job declares a world size of {run.world_size:,}, and {format_count(num, 'rank')} were"
        " received: a wrong world size, ranks that are not traced, or process folders without"
        " manifest.json or process.rsp"
    )
    return [text]


def misreading_warnings(spans: SpanTable) -> list[str]:
    """Return a warning for each defect of spans that the analysis cannot see through."""
    warnings = []
    if num := count_unnamed(spans):
        warnings.append(
            f"{format_count(num, 'span')} have no name ({OTHER_NAME}): the name table was full or"
            " empty, and unlike operations are compared as if they were alike"
        )
    rows = find_overlapping(spans)
    if len(rows):
        warnings.append(
            f"{format_count(len(rows), 'compute span')} overlap another on the same track, on"
            f" {_ranks_of(spans, rows)}: their compute times are not known"
        )
    rows = find_unidentified(spans)
    if len(rows):
        warnings.append(
            f"{format_count(len(rows), 'communication')} have no group or number, on"
            f" {_ranks_of(spans, rows)}: their waiting counts as host time of the rank itself"
        )
    return warnings


def count_unnamed(spans: SpanTable) -> int:
    """Return the number of spans with the name of a name table that is full or empty."""
    codes = [code for code, name in enumerate(spans.names) if name == OTHER_NAME]
    return sum(int(np.count_nonzero(spans.name == code)) for code in codes)


def find_overlapping(spans: SpanTable) -> NDArray[np.intp]:
    """Return the rows of compute spans that begin within another of their track and end after it.

    One thread or stream runs one thing at a time, so its spans are nested or disjoint.
    """
    known_end = (spans.flags & SpanFlag.END_BOUND) == 0
    rows = np.flatnonzero(is_one_of(spans.kind, COMPUTE_CODES) & known_end)
    if not len(rows):
        return rows
    start = spans.start_ns[rows]
    track, _ = factorize(spans.epoch[rows], spans.rank[rows], spans.track[rows])
    order = stable_argsort(start)
    order = order[stable_argsort(track[order])]
    rows, start, track = rows[order], start[order], track[order].astype(np.int64)
    end = start + spans.duration_ns[rows]
    # One running maximum serves all tracks: of the place among all ends, track by track. The ends
    # themselves may be too large for it, if a clock was broken.
    by_end = stable_argsort(end)
    order_of_end = np.empty(len(end), dtype=np.int64)
    order_of_end[by_end] = np.arange(len(end))
    last = np.maximum.accumulate(order_of_end + track * len(end))[:-1] - track[1:] * len(end)
    latest = end[by_end[np.maximum(last, 0)]]
    overlap = np.minimum(latest, end[1:]) - start[1:]
    partly = (track[1:] == track[:-1]) & (latest < end[1:]) & (overlap > OVERLAP_SLACK_NS)
    overlapping: NDArray[np.intp] = rows[1:][partly]
    return overlapping


def find_unidentified(spans: SpanTable) -> NDArray[np.intp]:
    """Return the rows of communications without a group or a number, which nothing joins."""
    other = spans.kind == KIND_CODES[SpanKind.OTHER]
    unknown = (spans.group_id == 0) | (spans.seq == NONE)
    return np.flatnonzero(is_communication(spans) & ~other & unknown)


def _ranks_of(spans: SpanTable, rows: NDArray[np.intp]) -> str:
    return format_ranks(sorted_unique(spans.rank[rows]).tolist())


def _coverage(run: RunInfo, steps: StepTable, reading: Reading) -> float | None:
    """Return the share of the job's (rank, step) pairs that were replayed."""
    num_steps = len(reading.steps) + len(reading.left_out)
    if not num_steps:
        return None
    rows = np.flatnonzero(np.isin(steps.step, reading.steps))
    _, num_replayed = factorize(steps.step[rows], steps.rank[rows])
    return num_replayed / (num_expected_ranks(run) * num_steps)


def left_out_sentence(left_out: Mapping[int, str]) -> str:
    """Return the steps that are left out, by reason; empty if there are none."""
    by_reason: dict[str, list[int]] = {}
    for step, reason in sorted(left_out.items()):
        by_reason.setdefault(reason, []).append(step)
    return "; ".join(
        f"{'step' if len(steps) == 1 else 'steps'} {format_ranges(steps, max_ranges=MAX_RANGES)}"
        f" left out: {reason}"
        for reason, steps in by_reason.items()
    )
