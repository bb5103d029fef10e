"""Both replays of random jobs, compared with the rules written as plain loops."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rankscope.analysis.readers.bytedance.graph import build_model, read_trace
from rankscope.analysis.readers.bytedance.what_if import what_if_trace
from rankscope.analysis.replay.replayer import Replayer, what_if
from rankscope.sources.bytedance_file import read_trace_file
from tests.support.analysis.bytedance_files import source_of, write_meta, write_trace
from tests.support.analysis.bytedance_jobs import MS, Job, from_each_steps_start
from tests.support.analysis.bytedance_oracle import Oracle

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from rankscope.analysis.readers.bytedance.format import TraceColumns
    from rankscope.analysis.replay.replayer import WhatIf
    from rankscope.analysis.trace.tables import RunInfo
    from tests.support.analysis.bytedance_oracle import Results

CLOCK_SHIFT = 5 * MS
"""Two clocks differ by up to twice this, which the format does not count as an error."""


def random_job(rng: random.Random) -> Job:
    pp = rng.choice([1, 2, 2, 3])
    vpp = rng.choice([1, 1, 2, 3]) if pp > 1 else 1
    dp = rng.choice([1, 2, 3])
    num_steps = rng.randint(1, 2)
    workers = [(d, p) for d in range(dp) for p in range(pp)]
    clocks = {worker: rng.randint(-CLOCK_SHIFT, CLOCK_SHIFT) for worker in workers}
    return Job(
        dp=dp,
        pp=pp,
        vpp=vpp,
        tp=rng.choice([1, 4]),
        dsp=rng.choice([1, 1, 2]),
        microbatches=tuple(
            pp * rng.randint(1, 2) if vpp > 1 else rng.randint(1, 5) for _ in range(num_steps)
        ),
        steps=tuple(sorted(rng.sample(range(5_000), num_steps))),
        batched=rng.random() < 0.5,
        records_no_ops=rng.random() < 0.6,
        overlapped=rng.random() < 0.5,
        jitter=rng.choice([0, 0.02, 0.2]),
        length_spread=rng.choice([0, 0.5]),
        stall_chance=rng.choice([0, 0.02]),
        latency_ns=rng.choice([0.05, 0.3, 5]) * MS,
        worker_factor={rng.choice(workers): rng.uniform(1, 3)},
        stage_factor={pp - 1: rng.choice([1, 1.5])},
        link_factor={rng.choice(workers): rng.choice([1, 30])},
        clock_ns=clocks if rng.random() < 0.5 else {},
        seed=rng.randrange(1 << 30),
    )


def imported(job: Job, rng: random.Random, folder: Path) -> tuple[RunInfo, TraceColumns]:
    """Write the job in a random valid way and read it back."""
    rows = from_each_steps_start(job.rows())
    if rng.random() < 0.5:
        rng.shuffle(rows)
    trace = write_trace(folder / "trace.parquet", rows, rng=rng)
    return read_trace_file(trace, write_meta(folder / "meta.yaml", job, as_json=rng.random() < 0.5))


def expected_of(job: Job, run: RunInfo, columns: TraceColumns) -> tuple[Oracle, Results]:
    coords = {info.rank: info.coords for info in run.epochs[0].ranks}
    ops: list[dict[str, Any]] = [
        {
            "dp": coords[rank].dp, "stage": coords[rank].pp, "rank": rank, "step": step,
            "mc": chunk, "type": columns.names[name], "start": start, "end": start + duration,
            "seq": seq,
        }
        for rank, step, name, start, duration, seq, chunk in zip(
            columns.rank.tolist(), columns.step.tolist(), columns.name.tolist(),
            columns.start_ns.tolist(), columns.duration_ns.tolist(), columns.seq.tolist(),
            columns.chunk.tolist(), strict=True,
        )
    ]  # fmt: skip
    oracle = Oracle(ops, job.pp, job.vpp, job.dp * job.dsp)
    return oracle, oracle.results()


def assert_follows(found: WhatIf, expected: Results) -> None:
    def same(times: NDArray[np.float64], by_step: Mapping[int, float]) -> None:
        assert found.steps == tuple(sorted(by_step))
        assert times == pytest.approx(np.array([by_step[s] for s in found.steps]), rel=1e-9)

    same(found.replayed_ns, expected.recorded)
    same(found.ideal_ns, expected.ideal)
    for name in ("by_kind", "by_dp", "by_stage", "by_worker"):
        parts, others = getattr(found, f"{name}_ns"), getattr(expected, name)
        assert set(parts) == set(others)
        for part, times in parts.items():
            same(times, others[part])
    for dp, stage in expected.by_worker:
        slowdown = expected.shortcut[dp, stage]
        assert found.worker_slowdowns()[dp, stage] == pytest.approx(slowdown, rel=1e-9)
    waste = abs(1 - sum(expected.ideal.values()) / sum(expected.recorded.values()))
    for part, other in ((found.m_w, expected.m_w), (found.m_s, expected.m_s)):
        assert part == pytest.approx(other, abs=1e-8 / max(waste, 1e-6))


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=() if seed < 10 else pytest.mark.nightly) for seed in range(30)],
)
def test_every_result_equals_that_of_the_rules_in_plain_loops(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    job = random_job(rng)
    run, columns = imported(job, rng, tmp_path)
    oracle, expected = expected_of(job, run, columns)

    found = what_if_trace(run, columns)
    source = source_of(run, columns)
    trace = read_trace(run, source.span_table)

    assert_follows(found.result, expected)
    assert_follows(what_if(Replayer(build_model(trace))), expected)
    assert found.num_clock_errors == trace.num_clock_errors == oracle.num_clock_errors
    assert dict(zip(found.result.steps, found.actual_ns.tolist(), strict=True)) == oracle.actual
    assert (found.left_out, found.warnings, oracle.num_unpaired) == ({}, (), 0)
