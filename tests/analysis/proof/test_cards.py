"""The numbers of each card are those of the recorded spans, as the test sums them itself."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cache
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.causes.order import CAUSES
from rankscope.analysis.proof.samples import group_samples
from rankscope.analysis.report.document import to_document
from rankscope.analysis.report.proof_card import MAX_POINTS, MAX_VALUES, ProofCard
from rankscope.tracer.span import COMM_KINDS, KINDS
from rankscope.trainer.simulator.scenario import RankOrder
from tests.support.rankscope.simulated_source import SimulatedSource
from tests.support.trainer.recorded import preset_scenario

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankscope.analysis.report.proof_card import SampleStrip
    from rankscope.analysis.report.report import Finding, RunReport

NUM_STEPS = 12


class Span(NamedTuple):
    """One recorded span, as the tests below sum them."""

    step: int
    rank: int
    kind: str
    name: str
    start_ns: int
    duration_ns: int
    num_bytes: int
    instance: tuple[int, int]

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


@cache
def analyze(cause: str) -> tuple[RunReport, list[Span]]:
    source = SimulatedSource(preset_scenario(cause, num_steps=NUM_STEPS))
    table = source.spans("simulated")
    columns = (
        table.step.tolist(),
        table.rank.tolist(),
        [KINDS[code].value for code in table.kind.tolist()],
        [table.names[code] for code in table.name.tolist()],
        table.start_ns.tolist(),
        table.duration_ns.tolist(),
        table.num_bytes.tolist(),
        list(zip(table.group_id.tolist(), table.seq.tolist(), strict=True)),
    )
    return analyze_run(source, "simulated"), [Span(*row) for row in zip(*columns, strict=True)]


def finding_of(report: RunReport, cause: str) -> tuple[Finding, ProofCard]:
    finding = next(finding for finding in report.findings if finding.cause == cause)
    assert finding.card is not None
    return finding, finding.card


def own_compute_ns(spans: Iterable[Span], *kinds: str) -> dict[tuple[int, int], list[int]]:
    """Return, by (rank, step), the time of each span of compute without communication inside."""
    inside: dict[tuple[int, int], list[Span]] = defaultdict(list)
    computing = []
    for span in spans:
        if span.kind in {kind.value for kind in COMM_KINDS}:
            inside[span.rank, span.step].append(span)
        elif span.kind in kinds:
            computing.append(span)
    own: dict[tuple[int, int], list[int]] = defaultdict(list)
    for span in computing:
        nested = (
            each.duration_ns
            for each in inside[span.rank, span.step]
            if span.start_ns <= each.start_ns and each.end_ns <= span.end_ns
        )
        own[span.rank, span.step].append(span.duration_ns - sum(nested))
    return own


def values_of(strip: SampleStrip) -> tuple[list[float], list[float]]:
    """Return the values of culprits and peers: these strips are small enough to keep all."""
    culprits, peers = strip.groups
    assert (culprits.is_culprit, peers.is_culprit) == (True, False)
    for group in (culprits, peers):
        assert group.num == len(group.values)
        assert (group.low, group.high) == (group.values[0], group.values[-1])
        assert group.median == median(group.values)
    return list(culprits.values), list(peers.values)


@pytest.mark.parametrize("cause", ["slow-compute", "clock-throttle"])
def test_compute_of_a_slow_rank_is_beside_that_of_its_stage(cause: str) -> None:
    report, spans = analyze(cause)
    finding, card = finding_of(report, cause)
    assert finding.proof is not None
    stage = [rank for rank, at in report.coords.items() if at.pp == report.coords[9].pp]
    step = finding.proof.step

    culprits, peers = values_of(card.strips[0])
    own_ns = own_compute_ns(spans, "backward")
    of_step_ns = own_compute_ns(spans, "forward", "backward")
    sums_ns = {key: sum(each) for key, each in of_step_ns.items()}

    assert finding.ranks == (9,)
    assert card.strips[0].quantity.startswith("backward")
    assert culprits == sorted(own_ns[9, step])
    assert len(culprits) == 8
    assert peers == sorted(ns for rank in stage if rank != 9 for ns in own_ns[rank, step])
    assert card.series is not None
    assert card.series.steps == report.steps
    assert card.series.culprit == tuple(sums_ns[9, each] for each in report.steps)
    assert card.series.usual == tuple(
        median(sums_ns[rank, each] for rank in stage if rank != 9) for each in report.steps
    )
    assert card.series.culprit_median == median(sums_ns[9, each] for each in range(4, NUM_STEPS))
    assert card.onset == 4


def test_the_clock_of_a_throttled_device_is_beside_those_of_the_others() -> None:
    report, _ = analyze("clock-throttle")
    _, card = finding_of(report, "clock-throttle")

    _, clock, power = card.strips

    assert (clock.unit, power.unit) == ("Hz", "W")
    # The planted factor is 1.3.
    assert 1.25 < clock.groups[1].median / clock.groups[0].median < 1.35
    assert power.groups[0].high < power.groups[1].low


def test_the_rate_of_a_slow_link_is_beside_those_of_alike_links() -> None:
    report, spans = analyze("slow-link")
    finding, card = finding_of(report, "slow-link")
    assert finding.steps is not None

    # GIVEN each reduce-scatter: the transfer is the time of the member that enters last
    members: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind == "dp-comm" and span.name == "reduce_scatter_tensor":
            members[span.instance].append(span)
    slow: list[float] = []
    alike: list[float] = []
    for entered in members.values():
        last = max(entered, key=lambda span: span.start_ns)
        if last.step < finding.steps[0]:
            continue
        rate = last.num_bytes / last.duration_ns * 1e9
        ranks = tuple(sorted(span.rank for span in entered))
        (slow if ranks == finding.ranks else alike).append(rate)

    culprits, peers = values_of(card.strips[0])
    assert card.strips[0].unit == "bytes/s"
    assert culprits == pytest.approx(sorted(slow))
    assert peers == pytest.approx(sorted(alike))
    assert max(culprits) < 0.2 * min(peers)


def test_a_slow_network_is_beside_its_own_other_steps() -> None:
    report, spans = analyze("network-degradation")
    _, card = finding_of(report, "network-degradation")
    counted = {span.instance: span.step for span in spans if "reduce_scatter" in span.name}

    culprits, peers = values_of(card.strips[0])

    assert len(culprits) == sum(step >= 4 for step in counted.values())
    assert len(peers) == sum(step < 4 for step in counted.values())
    assert max(culprits) < min(peers)


def test_a_slow_stage_is_beside_the_other_stages() -> None:
    report, spans = analyze("stage-imbalance")
    finding, card = finding_of(report, "stage-imbalance")
    assert finding.proof is not None
    own_ns = own_compute_ns(spans, "forward", "backward")

    for number, group in zip((1, 0), card.strips[0].groups, strict=True):
        ranks = [rank for rank, at in report.coords.items() if at.pp == number]
        assert group.label == f"stage {number}"
        assert list(group.values) == sorted(sum(own_ns[rank, finding.proof.step]) for rank in ranks)


def test_unequal_lengths_show_as_time_against_length() -> None:
    report, _ = analyze("sequence-imbalance")
    _, card = finding_of(report, "sequence-imbalance")

    assert card.cloud is not None
    # One stage: 8 ranks x 12 steps x 8 micro-batches.
    assert card.cloud.num == 8 * NUM_STEPS * 8
    assert len(card.cloud.x) == len(card.cloud.y) == MAX_POINTS
    assert np.corrcoef(card.cloud.x, card.cloud.y)[0, 1] > 0.95


def test_a_late_batch_is_beside_those_of_the_other_ranks() -> None:
    report, spans = analyze("data-stall")
    _, card = finding_of(report, "data-stall")
    data = [span for span in spans if span.kind == "data" and span.step >= 4]

    culprits, peers = values_of(card.strips[0])

    assert culprits == sorted(span.duration_ns for span in data if span.rank == 9)
    assert peers == sorted(span.duration_ns for span in data if span.rank != 9)
    assert card.onset == 4


def test_pauses_in_turn_are_beside_all_other_steps_and_ranks() -> None:
    report, spans = analyze("gc-pause")
    _, card = finding_of(report, "gc-pause")
    paused_ns: dict[tuple[int, int], int] = defaultdict(int)
    for span in spans:
        if span.kind == "gc":
            paused_ns[span.rank, span.step] += span.duration_ns

    culprits, peers = values_of(card.strips[0])

    assert culprits == sorted(paused_ns.values())
    assert peers == [0.0] * (16 * NUM_STEPS - len(paused_ns))


@pytest.mark.parametrize(
    ("cause", "quantity", "least_ns"),
    [
        ("host-stall", "gaps before", 30e6),  # 5 ms before each of 8 launches
        ("launch-skew", "gaps before collectives", 30e6),
        ("checkpoint", "checkpoint", 1.9e9),
    ],
)
def test_time_that_no_span_has_is_beside_that_of_the_others(
    cause: str, quantity: str, least_ns: float
) -> None:
    report, _ = analyze(cause)
    _, card = finding_of(report, cause)

    assert card.strips[0].quantity.startswith(quantity)
    assert card.strips[0].groups[0].median > least_ns
    assert card.strips[0].groups[1].median < least_ns / 50


def test_a_hang_shows_where_each_rank_is() -> None:
    report, spans = analyze("hang")
    finding, card = finding_of(report, "hang")
    last = {}
    for span in sorted(spans, key=lambda span: span.start_ns):
        last[span.rank] = span.name

    culprit, *others = card.facts

    assert (culprit.label, culprit.is_culprit, finding.ranks) == ("rank 9", True, (9,))
    assert last[9] in culprit.text
    assert culprit.text.startswith("after")
    assert all(fact.text.startswith("inside") and not fact.is_culprit for fact in others)
    assert any("reduce_scatter_tensor" in fact.text for fact in others)


def test_a_crash_shows_the_reason_of_each_rank() -> None:
    report, _ = analyze("crash")
    _, card = finding_of(report, "crash")

    assert card.facts[0].label == "rank 9"
    assert card.facts[0].text.endswith("failed: torch.OutOfMemoryError, first of all")
    assert all(fact.text.endswith("s later") for fact in card.facts[1:])


def test_a_setting_that_differs_shows_both_values() -> None:
    report, _ = analyze("misconfiguration")
    _, card = finding_of(report, "misconfiguration")

    assert [(fact.label, fact.text) for fact in card.facts] == [
        ("rank 9", "environment.NCCL_IB_DISABLE = 1"),
        ("ranks 0 to 8 and 10 to 15", "environment.NCCL_IB_DISABLE = 0"),
    ]


@pytest.mark.parametrize("cause", ["slow-compute", "gc-pause", "hang", "healthy"])
def test_the_document_has_the_card_and_the_counterfactual_in_the_proof(cause: str) -> None:
    report, _ = analyze(cause)
    top = to_document(report)["findings"][0]

    if cause == "healthy":
        assert top["proof"] is None
        return
    proof = top["proof"]
    assert {"strips", "series", "cloud", "facts", "onset", "step", "rank"} <= set(proof)
    if cause == "hang":
        assert proof["facts"]
        assert (proof["step"], proof["counterfactual"]) == (None, None)
        return
    counterfactual = proof["counterfactual"]
    price = report.price(report.top_finding)
    assert price is not None
    saved_s = counterfactual["step_s"] - counterfactual["fixed_step_s"]
    assert saved_s == pytest.approx(price.seconds)


def test_a_card_of_many_values_keeps_a_bounded_part_with_both_ends() -> None:
    values = np.arange(100_000, dtype=np.float64)

    (group,) = group_samples("peers", values[::-1])

    assert (group.num, group.low, group.high) == (100_000, 0.0, 99_999.0)
    assert group.median == 49_999.5
    assert len(group.values) == MAX_VALUES
    assert (group.values[0], group.values[-1]) == (0.0, 99_999.0)
    assert list(group.values) == sorted(group.values)


def test_each_alarm_declares_its_picture() -> None:
    assert [name for name, cause in CAUSES.items() if cause.proof_form is None] == []


def test_tensor_parallel_groups_across_hosts_are_listed_with_them() -> None:
    scenario = replace(preset_scenario("healthy", num_steps=3), dp=4, pp=1, tp=4)
    report = analyze_run(
        SimulatedSource(replace(scenario, rank_order=RankOrder.DP_FIRST)), "simulated"
    )
    _, card = finding_of(report, "layout")

    host, first, *_ = card.facts

    assert (host.label, host.text, host.is_culprit) == ("sim-00000", "has ranks 0 to 3", False)
    assert first.label == "ranks 0, 4, 8 and 12"
    assert first.text == "on sim-00000, sim-00001, sim-00002, sim-00003"
