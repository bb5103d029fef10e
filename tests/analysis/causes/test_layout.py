from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.analyze import read_operations
from rankscope.analysis.causes.layout import find_layout_costs
from rankscope.analysis.trace.context import RankManifest, RunContext
from rankscope.sources.simulated_source import SimulatedSource
from rankscope.trainer.simulator.scenario import Scenario
from tests.analysis.causes.test_matmul import microbatches

if TYPE_CHECKING:
    from rankscope.analysis.report.report import Finding

RUN = "simulated"


@pytest.fixture(scope="module")
def source() -> SimulatedSource:
    return SimulatedSource(Scenario(dp=2, pp=2, tp=4, num_steps=2, num_microbatches=4))


def findings(source: SimulatedSource, *, hidden: int, num_tokens: int) -> tuple[Finding, ...]:
    """Layout findings of an A100 cluster whose model has this width."""
    run, spans, steps = source.run_info(RUN), source.spans(RUN), source.steps(RUN)
    ranks = {
        info.rank: replace(info, device_name="NVIDIA A100-SXM4-80GB", dtype="bfloat16")
        for info in run.epochs[-1].ranks
    }
    settings = {"config.hidden_size": str(hidden)}
    manifests = tuple(RankManifest(epoch=0, rank=rank, settings=settings) for rank in ranks)
    context = RunContext(manifests=manifests, microbatches=microbatches(num_tokens))
    return find_layout_costs(run, read_operations(run, spans, steps), ranks, context)


def test_large_products_are_not_told(source: SimulatedSource) -> None:
    assert findings(source, hidden=8192, num_tokens=8192) == ()


def test_too_few_tokens_a_micro_batch_are_told_with_what_twice_as_many_win(
    source: SimulatedSource,
) -> None:
    # GIVEN 64 rows by 8192 by 2048: 62.1 FLOPs a byte of the 153 that the device needs
    (finding,) = findings(source, hidden=8192, num_tokens=64)

    # THEN twice the rows reach 119.1 / 153, 48 % less time
    assert finding.cause == "layout"
    assert "64 x 8192 x 2048" in finding.evidence
    assert "reach 40 % of the peak" in finding.evidence
    assert "twice the size" in finding.evidence
    assert "could reach 78 %, 48 % less time" in finding.evidence


def test_tensor_parallelism_that_cuts_too_finely_is_told(source: SimulatedSource) -> None:
    (finding,) = findings(source, hidden=256, num_tokens=8192)

    assert "tensor parallelism of 2 in place of 4" in finding.evidence


def test_a_model_of_unknown_width_is_not_judged(source: SimulatedSource) -> None:
    run, spans, steps = source.run_info(RUN), source.spans(RUN), source.steps(RUN)
    ranks = {info.rank: info for info in run.epochs[-1].ranks}

    assert find_layout_costs(run, read_operations(run, spans, steps), ranks, RunContext()) == ()
