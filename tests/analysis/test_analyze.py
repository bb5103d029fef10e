from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.readers.tracer.reader import read_traced
from rankscope.analysis.replay.replayer import Replayer
from rankscope.analysis.report.document import to_document
from rankscope.analysis.trace.context import RankManifest, RunContext
from rankscope.analysis.trace.errors import EmptyRunError
from rankscope.analysis.trace.rows import select_rows
from rankscope.analysis.verdict import verdict_sentence
from rankscope.tracer.span import KIND_CODES, SpanKind
from rankscope.tracer.topology import Layout
from tests.support.analysis.bytedance_cluster import ByteDanceCluster
from tests.support.analysis.cluster import MS, Source, gpt_cluster, source_of
from tests.support.analysis.exit_builders import context_of, failed
from tests.support.analysis.sample_builders import samples

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankscope.analysis.report.report import RunReport
    from rankscope.analysis.trace.context import SampleTable

LAYOUT = Layout(pp=2, dp=2, tp=2)


def jitter(seed: int = 0) -> Callable[[int, int, int], float]:
    """Return noise of 1 %, equal for equal (rank, step, micro-batch)."""

    def draw(rank: int, step: int, mb: int) -> float:
        return 1.0 + 0.01 * float(np.random.default_rng((seed, rank, step, mb)).normal())

    return draw


def job(
    slow: dict[int, float], *, layout: Layout = LAYOUT, since: int = 0, num_steps: int = 8
) -> Source:
    """Return a job; ranks in ``slow`` compute longer by that factor from step ``since`` on."""
    noise = jitter()

    def forward_ns(rank: int, step: int, mb: int) -> int:
        factor = slow.get(rank, 1.0) if step >= since else 1.0
        return int(10 * MS * factor * noise(rank, step, mb))

    return source_of(gpt_cluster(layout, num_steps=num_steps, forward_ns=forward_ns))


def causes(report: RunReport) -> list[tuple[str, tuple[int, ...]]]:
    return [(finding.cause, finding.ranks) for finding in report.findings]


def test_the_slow_rank_is_named_and_its_tensor_parallel_partner_is_not() -> None:
    report = analyze_run(job({5: 1.8}, since=3), "tiny")

    assert causes(report) == [("slow-compute", (5,))]
    assert report.top_finding.steps == (3, 7)
    assert report.top_finding.recoverable_ratio == pytest.approx(1.0, abs=0.1)
    assert verdict_sentence(report).startswith(
        "Rank 5 (dp 0, stage 1, tp 1) computes slowly in steps 3 to 7"
        " (slow-compute). 7 ranks are held up by it;"
    )


def test_all_other_ranks_wait_on_the_slow_one() -> None:
    report = analyze_run(job({5: 1.8}), "tiny")

    assert {entry.rank for entry in report.starved} >= {0, 1, 2, 3, 4, 6, 7}
    culprits = {entry.rank: entry.waits_on[0].rank for entry in report.starved if entry.rank != 5}
    assert set(culprits.values()) == {5}
    for entry in report.starved:
        assert 0 < entry.wait_ratio < 1


def test_a_job_with_nothing_wrong_is_healthy() -> None:
    report = analyze_run(job({}), "tiny")

    assert causes(report) == [("healthy", ())]
    assert verdict_sentence(report).startswith("Healthy: differences between ranks")


def test_two_slow_ranks_of_different_strength_are_both_named() -> None:
    report = analyze_run(job({2: 1.3, 5: 1.8}), "tiny")

    assert sorted(causes(report)) == [("slow-compute", (2,)), ("slow-compute", (5,))]


def test_a_stage_with_more_work_is_an_imbalance_and_no_slow_rank() -> None:
    report = analyze_run(job(dict.fromkeys((4, 5, 6, 7), 1.5)), "tiny")

    assert causes(report) == [("stage-imbalance", (4, 5, 6, 7))]
    assert verdict_sentence(report).startswith("Stage 1 has more work than the others")


def test_two_ranks_that_differ_are_insufficient_evidence() -> None:
    report = analyze_run(job({1: 1.8}, layout=Layout(dp=2)), "tiny")

    assert causes(report) == [("insufficient-evidence", ())]
    assert "fewer than 3 peers among 2 ranks" in report.top_finding.evidence


def test_one_of_two_ranks_is_named_if_it_became_slower() -> None:
    report = analyze_run(job({1: 1.8}, layout=Layout(dp=2), since=4, num_steps=10), "tiny")

    assert causes(report) == [("slow-compute", (1,))]
    assert report.top_finding.steps == (4, 9)


def test_the_full_replay_reproduces_the_recorded_steps() -> None:
    source = job({5: 1.8})
    reading = read_traced(source.info, source.span_table, source.step_table)

    full = Replayer(reading.model).full_recorded()

    assert full == pytest.approx(reading.actual_ns.astype(float), rel=1e-9)


def test_compute_items_contain_no_waits() -> None:
    source = source_of(gpt_cluster(LAYOUT, num_steps=1, forward_ns=lambda *_: 10 * MS))
    reading = read_traced(source.info, source.span_table, source.step_table)

    items = reading.items
    # Two blocks per stage; backward takes twice as long; no waits.
    forward = items.kind == KIND_CODES[SpanKind.FORWARD]
    assert set(items.self_ns[forward].tolist()) == {20 * MS}
    assert set(items.self_ns[~forward].tolist()) == {40 * MS}
    assert len(items) == 8 * 4 * 2


def test_a_step_with_a_missing_member_of_a_communication_is_left_out_and_named() -> None:
    source = job({})
    spans = source.span_table
    lost = np.flatnonzero(
        (spans.kind == KIND_CODES[SpanKind.TP_COMM]) & (spans.step == 4) & (spans.rank == 6)
    )[0]
    kept = select_rows(spans, np.arange(len(spans)) != lost)

    report = analyze_run(replace(source, span_table=kept), "tiny")

    assert report.steps == (0, 1, 2, 3, 5, 6, 7)
    assert "step 4 left out: a member of a communication has no record" in (report.quality.warnings)
    assert report.quality.coverage_ratio == 7 / 8


def test_a_run_with_untraced_ranks_is_insufficient_evidence() -> None:
    source = job({})
    info = replace(source.info, world_size=16)

    report = analyze_run(replace(source, info=info), "tiny")

    assert causes(report) == [("insufficient-evidence", ())]
    assert report.step_time_s.replayed is None
    json.dumps(to_document(report), allow_nan=False)


def test_a_changed_setting_is_no_verdict_on_a_run_without_a_replay() -> None:
    # GIVEN a run of which no step can be replayed, and a setting that the previous run had not
    now, before = (
        tuple(
            RankManifest(epoch=0, rank=rank, settings={"environment.NCCL_ALGO": algorithm})
            for rank in range(8)
        )
        for algorithm in ("Ring", "Tree")
    )
    source = job({})
    source = replace(
        source,
        info=replace(source.info, world_size=16),
        around=RunContext(manifests=now, previous_manifests=before),
    )

    report = analyze_run(source, "tiny")

    assert [each.cause for each in report.findings] == ["insufficient-evidence", "misconfiguration"]
    assert verdict_sentence(report).startswith("Insufficient evidence: no step can be replayed")


def test_a_paced_run_that_overran_its_pace_is_insufficient_evidence() -> None:
    source = job({5: 1.8})
    info = replace(source.info, paced=True, pace_overrun_ratio=0.06)

    report = analyze_run(replace(source, info=info), "tiny")

    assert causes(report) == [("insufficient-evidence", ())]
    assert "6.0 % of a rank's paced compute overran" in report.top_finding.evidence


def test_steps_without_spans_are_an_error_that_names_the_list_of_runs() -> None:
    with pytest.raises(EmptyRunError, match="rankscope runs"):
        analyze_run(job({}), "tiny", first=100)


def test_steps_without_spans_of_a_run_that_died_are_an_error_with_the_reason() -> None:
    around = context_of(failed(5, 10.0, "ValueError", "bad token", step=None))

    with pytest.raises(EmptyRunError, match=r"it died: rank 5 failed first.*bad token"):
        analyze_run(replace(job({}), around=around), "tiny", first=100)


def test_a_run_that_died_before_its_first_span_is_reported() -> None:
    # GIVEN a run without records, whose rank 5 failed
    source = job({})
    nothing = replace(
        source,
        span_table=select_rows(source.span_table, slice(0, 0)),
        step_table=select_rows(source.step_table, slice(0, 0)),
        around=context_of(failed(5, 10.0, "ValueError", "bad token", step=None)),
    )

    # WHEN it is analysed
    report = analyze_run(nothing, "tiny")

    # THEN the report names the failure, and everything that was not recorded is unknown
    assert causes(report) == [("crash", (5,))]
    assert "bad token" in report.top_finding.evidence
    assert report.num_spans == 0
    assert report.steps == ()
    assert report.step_time_s.actual is None
    assert report.quality.coverage_ratio is None
    json.dumps(to_document(report), allow_nan=False)
    assert "Rank 5" in verdict_sentence(report)


def test_a_run_that_recorded_nothing_and_did_not_die_has_no_report() -> None:
    source = job({})
    nothing = replace(
        source,
        span_table=select_rows(source.span_table, slice(0, 0)),
        step_table=select_rows(source.step_table, slice(0, 0)),
    )

    with pytest.raises(EmptyRunError, match="rankscope runs"):
        analyze_run(nothing, "tiny")


def test_only_the_requested_steps_are_analysed() -> None:
    report = analyze_run(job({5: 1.8}, since=4), "tiny", first=0, last=3)

    assert report.steps == (0, 1, 2, 3)
    assert causes(report) == [("healthy", ())]


def test_shifting_every_clock_changes_nothing() -> None:
    source = job({5: 1.8}, since=3)
    shift = 1_800_000_000_000_000_000
    moved = replace(
        source,
        span_table=replace(source.span_table, start_ns=source.span_table.start_ns + shift),
        step_table=replace(
            source.step_table,
            start_ns=source.step_table.start_ns + shift,
            end_ns=source.step_table.end_ns + shift,
        ),
    )

    assert to_document(analyze_run(moved, "tiny")) == to_document(analyze_run(source, "tiny"))


def test_the_order_of_rows_changes_nothing() -> None:
    source = job({5: 1.8}, since=3)
    order = np.random.default_rng(1).permutation(len(source.span_table))
    shuffled = select_rows(source.span_table, order)

    report = analyze_run(replace(source, span_table=shuffled), "tiny")

    assert to_document(report) == to_document(analyze_run(source, "tiny"))


def test_a_run_of_one_stage_has_no_share_of_its_last_stage() -> None:
    report = analyze_run(job({2: 1.5}, layout=Layout(dp=4)), "tiny")

    assert report.m_w == pytest.approx(1.0, abs=0.1)
    assert report.m_s is None


def on_hosts(source: Source, ranks_per_host: int, readings: SampleTable) -> Source:
    """Return a job on hosts a, b, ... of so many ranks."""
    (epoch,) = source.info.epochs
    ranks = tuple(replace(each, host="abcd"[each.rank // ranks_per_host]) for each in epoch.ranks)
    info = replace(source.info, epochs=(replace(epoch, ranks=ranks),))
    return replace(source, info=info, around=RunContext(samples=readings))


def test_a_group_between_hosts_without_an_alike_one_is_named_as_not_compared() -> None:
    adapters = samples(
        "nic-speed-bytes-per-s:eth0", {("a", -1): [12.5e9, 12.5e9], ("b", -1): [1.25e9, 1.25e9]}
    )

    def warnings(layout: Layout, ranks_per_host: int) -> list[str]:
        source = on_hosts(job({}, layout=layout), ranks_per_host, adapters)
        found = analyze_run(source, "tiny").quality.warnings
        return [each for each in found if "about links" in each]

    (warning,) = warnings(Layout(dp=4), 2)

    assert warning.startswith("insufficient evidence about links: ")
    assert warning.endswith("adapter of b runs at 1.25 GB/s, others at up to 12.5 GB/s")
    assert warnings(Layout(dp=4), 4) == []
    assert warnings(Layout(dp=4, pp=2), 4) == []


def test_the_document_has_the_keys_that_checks_rely_on() -> None:
    document = to_document(analyze_run(job({5: 1.8}), "tiny"))

    assert set(document) >= {
        *("schema", "run", "epochs", "world_size", "layout", "steps", "num_spans"),
        *("step_time_s", "launch_slowdown", "replay_error_ratio", "slowdown", "waste_ratio"),
        *("slowdown_by_kind", "slowdown_by_dp", "slowdown_by_stage", "slowdown_by_worker"),
        *("slowdown_by_step", "m_w", "m_s", "findings", "starved", "mfu", "quality"),
        *("links", "direct_waits"),
    }
    assert set(document["step_time_s"]) == {"actual", "replayed", "ideal"}
    assert set(document["slowdown_by_worker"]) == {"0,0", "1,0", "0,1", "1,1"}
    culprits = document["culprits"]
    assert (culprits["num_steps"], culprits["num_different"]) == (8, 0)
    assert culprits["by_exact"] == (0, 1)
    assert set(document["findings"][0]) == {
        *("cause", "ranks", "steps", "slowdown", "recoverable_ratio", "confidence", "evidence"),
        *("severity", "saved_s", "shown_saved_s", "noise_s", "proof", "hosts"),
        *("end_class", "epoch", "host_notes"),
    }
    assert set(document["quality"]) == {
        *("produced_spans", "stored_spans", "dropped_spans", "buffered_spans"),
        *("dropped_by_reason", "by_rank", "clock_error_ns", "coverage_ratio", "warnings"),
    }
    assert json.loads(json.dumps(document, allow_nan=False)) is not None


@pytest.mark.parametrize(
    ("dp", "pp", "culprit", "factor"),
    [(4, 2, (3, 1), 1.3), (2, 4, (0, 2), 1.8), (16, 2, (9, 0), 1.12), (4, 8, (1, 0), 3.0)],
)
def test_a_slow_worker_of_the_bytedance_format_is_named_alone(
    dp: int, pp: int, culprit: tuple[int, int], factor: float
) -> None:
    rng = np.random.default_rng(dp * 100 + pp)

    def compute_ns(at_dp: int, stage: int, step: int, mb: int, forward: bool) -> float:  # noqa: FBT001
        slow = factor if (at_dp, stage) == culprit else 1.0
        return MS * (10 if forward else 20) * slow * float(rng.normal(1.0, 0.01))

    cluster = ByteDanceCluster(dp, pp, 8, compute_ns, tp=4).run(list(range(5)))

    report = analyze_run(cluster.source(), "tiny")

    assert causes(report) == [("slow-compute", (cluster.rank(*culprit),))]
