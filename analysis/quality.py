"""Quality of a report: what is missing from the trace, left out of the analysis, or uncertain."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .arrays.grouping import factorize
from .report.report import Quality
from .report.text import format_count, format_ranges
from .trace.account import TORN
from .trace.tables import num_expected_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .replay.model import Reading
    from .trace.tables import RunInfo, StepTable

MAX_RANGES = 5
"""Ranges of left-out steps that a warning lists before it counts the rest."""


def assess_quality(
    run: RunInfo, steps: StepTable, reading: Reading | None, *, has_worker_slowdown: bool = True
) -> Quality:
    """Return the limits of a run's trace, with a warning for each.

    Args:
        run: Description of the run: account of its records, clocks, warnings.
        steps: Its step rows.
        reading: Its operations; None if there are no spans.
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
    account = run.account
    if num_torn := account.dropped.get(TORN):
        warnings.append(f"{format_count(num_torn, 'record')} torn: the process ended while writing")
    return Quality(
        account=account,
        account_by_rank=run.accounts,
        clock_error_ns=run.clock_error_ns,
        coverage_ratio=None if reading is None else _coverage(run, steps, reading),
        warnings=tuple(warnings),
    )


def _coverage(run: RunInfo, steps: StepTable, reading: Reading) -> float | None:
    """Return the share of the job's (rank, step) pairs that were replayed."""
    num_steps = len(reading.steps) + len(reading.left_out)
    if not num_steps:
        return None
    expected = num_expected_ranks(run)
    if run.source_format == "bytedance":
        expected = run.layout.dp * run.layout.pp
    rows = np.flatnonzero(np.isin(steps.step, reading.steps))
    _, num_replayed = factorize(steps.step[rows], steps.rank[rows])
    return num_replayed / (expected * num_steps)


def left_out_sentence(left_out: Mapping[int, str]) -> str:
    """Return the steps that are left out, by reason; empty if there are none.

    Args:
        left_out: Reason by step number.
    """
    by_reason: dict[str, list[int]] = {}
    for step, reason in sorted(left_out.items()):
        by_reason.setdefault(reason, []).append(step)
    return "; ".join(
        f"{'step' if len(steps) == 1 else 'steps'} {format_ranges(steps, max_ranges=MAX_RANGES)}"
        f" left out: {reason}"
        for reason, steps in by_reason.items()
    )
