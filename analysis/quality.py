"""How far a report can be trusted: what is missing, left out or uncertain."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .arrays.grouping import factorize
from .report.report import Quality
from .trace.tables import num_expected_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .replay.model import Reading
    from .trace.tables import RunInfo, StepTable

MOST_STEPS_NAMED = 5


def quality_of(
    run: RunInfo, steps: StepTable, reading: Reading | None, *, isolated: bool = True
) -> Quality:
    """Return what a reader should know of a run's trace before the report is believed.

    Args:
        run: What its collector says of it: drops, clocks, torn records, warnings.
        steps: The steps' rows.
        reading: The run as operations; None: there are no spans, and nothing to read.
        isolated: Whether slowdown by dp position could be replayed.
    """
    warnings = [*run.warnings, *(() if reading is None else reading.warnings)]
    if not isolated:
        warnings.append(
            "slowdown by dp position and worker is left out: so many dp positions whose steps"
            " differ in structure would each take a replay; analyze fewer steps (--steps A:B)"
        )
    if reading is not None and reading.left_out:
        warnings.append(left_out_sentence(reading.left_out))
    if run.num_torn:
        warnings.append(f"{run.num_torn} records were torn when a process died")
    return Quality(
        dropped_spans=run.num_dropped,
        clock_error_ns=run.clock_error_ns,
        coverage_ratio=None if reading is None else _coverage(run, steps, reading),
        warnings=tuple(warnings),
    )


def _coverage(run: RunInfo, steps: StepTable, reading: Reading) -> float | None:
    """Return the share of the job's (rank, step) pairs that entered the replay."""
    num_steps = len(reading.steps) + len(reading.left_out)
    if not num_steps:
        return None
    expected = num_expected_ranks(run)
    if run.source_format == "bytedance":
        expected = run.layout.dp * run.layout.pp
    rows = np.flatnonzero(np.isin(steps.step, reading.steps))
    _, taken = factorize(steps.step[rows], steps.rank[rows])
    return taken / (expected * num_steps)


def left_out_sentence(left_out: Mapping[int, str]) -> str:
    """Name the steps that are left out, by reason; empty without any.

    Args:
        left_out: By step number, why.
    """
    by_reason: dict[str, list[int]] = {}
    for step, reason in sorted(left_out.items()):
        by_reason.setdefault(reason, []).append(step)
    parts = []
    for reason, steps in by_reason.items():
        named = ", ".join(map(str, steps[:MOST_STEPS_NAMED]))
        more = f" and {len(steps) - MOST_STEPS_NAMED} more" * (len(steps) > MOST_STEPS_NAMED)
        word = "step" if len(steps) == 1 else "steps"
        parts.append(f"{word} {named}{more} left out: {reason}")
    return "; ".join(parts)
