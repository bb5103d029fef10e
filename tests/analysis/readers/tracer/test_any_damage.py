"""Damaged rows of a job (lost, repeated, with other numbers): the analysis reports or raises."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.trace.errors import AnalysisError
from rankscope.analysis.trace.rows import select_rows
from rankscope.analysis.trace.tables import SpanTable
from rankscope.tracer.topology import Layout
from tests.support.analysis.cluster import MS, gpt_cluster, source_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tests.support.analysis.cluster import Source

NUM_STEPS = 8
NUM_JOBS = 40
"""Jobs of each case: about two seconds."""

VALUES: dict[str, tuple[int, ...]] = {
    "step": (0, 1, 7, 8, 2**31 - 1),
    "rank": (0, 7, 8),
    "kind": tuple(range(15)),
    "start_ns": (0, 1),
    "duration_ns": (0, 1, 10**9, 10**15),
    "launch_ns": (-1, 0, 1),
    "group_id": (0, 1, 2**64 - 1),
    "seq": (-1, 0, 1, 2**62),
    "src_rank": (-1, 0, 7, 2**31 - 1),
    "dst_rank": (-1, 0, 7, 2**31 - 1),
    "microbatch": (-1, 0, 3, 2**31 - 1),
    "chunk": (-1, 0, 1, 2**31 - 1),
    "num_bytes": (-1, 0, 2**62),
    "interval_id": (0, 1, 2**62),
    "flags": (0, 1, 8, 64, 0xFFFF),
    "depth": (0, 1, 32_767),
}
"""Values of each column for damaged rows: usual ones and bounds."""

Columns = dict[str, Any]


@pytest.fixture(scope="module")
def intact() -> Source:
    def forward_ns(rank: int, step: int, _: int) -> int:
        return (15 if rank == 5 and step >= 3 else 10) * MS

    layout = Layout(dp=2, tp=2, pp=2)
    return source_of(gpt_cluster(layout, num_steps=NUM_STEPS, forward_ns=forward_ns))


def forge(columns: Columns, rng: random.Random, array_rng: np.random.Generator) -> Columns:
    """Return the columns with one kind of damage."""
    num = len(columns["rank"])
    name = rng.choice(sorted(VALUES))
    kind = rng.choice(("some", "of a rank", "mixed", "lost", "repeated", "another clock"))
    changed = columns | {name: columns[name].copy()}
    if kind == "mixed":
        changed[name] = array_rng.permutation(columns[name])
    elif kind in ("some", "of a rank"):
        rows: NDArray[Any] = (
            array_rng.integers(0, num, rng.choice((1, 3, num // 2 + 1)))
            if kind == "some"
            else columns["rank"] == rng.randrange(8)
        )
        changed[name][rows] = np.array(rng.choice(VALUES[name])).astype(columns[name].dtype)
    elif kind == "another clock":
        on_rank = columns["rank"] == rng.randrange(8)
        ahead_ns = rng.choice((MS, -MS, 3600 * 10**9))
        changed["start_ns"] = columns["start_ns"] + np.where(on_rank, ahead_ns, 0)
    else:
        share = rng.choice((0.001, 0.3, 0.9))
        keep = array_rng.random(num) > share
        twice = np.concatenate((np.arange(num), np.flatnonzero(~keep)))
        rows = np.flatnonzero(keep) if kind == "lost" else np.sort(twice)
        changed = {each: column[rows] for each, column in columns.items()}
    return changed


def damage(source: Source, seed: int) -> Source:
    """Return the job with one to three kinds of damage, rows in the order of the store."""
    rng, array_rng = random.Random(seed), np.random.default_rng(seed)
    spans, steps = source.span_table, source.step_table
    columns: Columns = {
        field.name: getattr(spans, field.name)
        for field in fields(SpanTable)
        if field.name not in ("names", "tracks")
    }
    for _ in range(rng.choice((1, 1, 2, 3))):
        if len(columns["rank"]):
            columns = forge(columns, rng, array_rng)
    order = np.lexsort(tuple(columns[name] for name in ("start_ns", "rank", "step", "epoch")))
    spans = replace(spans, **{name: column[order] for name, column in columns.items()})
    if rng.random() < 0.3:
        steps = select_rows(steps, array_rng.random(len(steps)) > rng.choice((0.05, 0.5)))
    return replace(source, span_table=spans, step_table=steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    "first_seed",
    [0, *(pytest.param(k * NUM_JOBS, marks=pytest.mark.nightly) for k in range(1, 5))],
)
def test_analysis_of_damaged_rows_returns_a_report_or_raises_its_own_error(
    intact: Source, first_seed: int
) -> None:
    num_reports = 0
    for seed in range(first_seed, first_seed + NUM_JOBS):
        try:
            report = analyze_run(damage(intact, seed), "run")
        except AnalysisError:
            continue
        assert report.findings, seed
        num_reports += 1

    assert num_reports > NUM_JOBS / 2
