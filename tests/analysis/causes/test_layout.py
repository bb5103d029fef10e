from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.analysis.analyze import read_operations
from rankscope.analysis.causes import layout
from rankscope.analysis.causes.detector import Record
from rankscope.analysis.causes.layout import (
    DeviceLimits,
    Layer,
    reachable_ratio,
    read_device,
    read_layer,
)
from rankscope.analysis.trace.context import MicrobatchTable, RankManifest, RunContext
from rankscope.analysis.trace.tables import RankInfo
from rankscope.tracer.topology import Coords
from rankscope.trainer.simulator.scenario import Scenario, TpDetail
from tests.support.analysis.tables import table_of
from tests.support.rankscope.simulated_source import SimulatedSource

if TYPE_CHECKING:
    from rankscope.analysis.report.report import Finding
    from rankscope.analysis.trace.tables import RunInfo

RUN = "simulated"


@pytest.fixture(scope="module")
def source() -> SimulatedSource:
    return SimulatedSource(Scenario(dp=2, pp=2, tp=4, num_steps=2, num_microbatches=4))


def findings(source: SimulatedSource, *, hidden: int, num_tokens: int) -> tuple[Finding, ...]:
    """Return the layout findings of an A100 cluster.

    Args:
        source: The run.
        hidden: Width of the model.
        num_tokens: Tokens of a micro-batch.
    """
    run = source.run_info(RUN)
    (epoch,) = run.epochs
    ranks = tuple(
        replace(info, device_name="NVIDIA A100-SXM4-80GB", dtype="bfloat16") for info in epoch.ranks
    )
    settings = {"config.hidden_size": str(hidden)}
    manifests = tuple(RankManifest(epoch=0, rank=info.rank, settings=settings) for info in ranks)
    context = RunContext(manifests=manifests, microbatches=microbatches(num_tokens))
    run = replace(run, epochs=(replace(epoch, ranks=ranks),))
    return layout.detect(record_of(source, run, context))


def record_of(source: SimulatedSource, run: RunInfo, context: RunContext) -> Record:
    """Return the record of a run with its operations."""
    spans, steps = source.spans(RUN), source.steps(RUN)
    reading = read_operations(run, spans, steps)
    return Record(run=run, spans=spans, steps=steps, context=context, reading=reading)


def test_large_products_are_no_finding(source: SimulatedSource) -> None:
    assert findings(source, hidden=8192, num_tokens=8192) == ()


def test_micro_batches_with_too_few_tokens_are_a_finding_with_its_gain(
    source: SimulatedSource,
) -> None:
    # GIVEN 64 x 8192 x 2048: 62.1 FLOPs per byte, of the 153 that the device needs
    (finding,) = findings(source, hidden=8192, num_tokens=64)

    # THEN twice the rows reach 119.1 / 153, in 48 % less time
    assert finding.cause == "layout"
    assert finding.evidence == (
        "matrix products of 64 x 8192 x 2048 are bound by memory: they reach at most 40 % of the"
        " peak of NVIDIA A100-SXM4-80GB; with micro-batches of twice the size, half as many, they"
        " could reach 78 % and take 48 % less time"
    )


def test_too_much_tensor_parallelism_is_a_finding(source: SimulatedSource) -> None:
    (finding,) = findings(source, hidden=256, num_tokens=8192)

    assert "tensor parallelism of 2 instead of 4" in finding.evidence


def test_a_model_of_unknown_width_is_not_judged(source: SimulatedSource) -> None:
    assert layout.detect(record_of(source, source.run_info(RUN), RunContext())) == ()


MIB = 1 << 20
STAGES_ON_TWO_HOSTS = Scenario(
    dp=1,
    pp=2,
    tp=4,
    num_steps=3,
    num_microbatches=4,
    ranks_per_host=4,
    tp_detail=TpDetail.FULL,
    activation_bytes=16 * MIB,
    tp_bytes=16 * MIB,
)


def sends_of(changed: dict[str, Any]) -> tuple[Finding, ...]:
    source = SimulatedSource(replace(STAGES_ON_TWO_HOSTS, **changed))
    return layout.detect(record_of(source, source.run_info(RUN), RunContext()))


def test_equal_activations_that_each_tp_rank_sends_to_another_host_are_a_finding() -> None:
    (finding,) = sends_of({})

    # THEN 4 micro-batches, 4 ranks, 2 directions, of 16 MiB
    assert finding.ranks == tuple(range(8))
    assert "512 MiB a step, of which 128 MiB" in finding.evidence


@pytest.mark.parametrize(
    "changed",
    [
        {"tp_detail": TpDetail.SEQUENCE},  # each rank has other tokens
        {"activation_bytes": 4 * MIB},  # divided already
        {"activation_bytes": 8 * MIB},  # of another size than what is equal
        {"ranks_per_host": 8},
        {"tp_detail": TpDetail.COLLAPSED},  # one rank of four is traced
    ],
)
def test_sends_that_are_not_known_to_be_equal_or_stay_on_a_host_are_no_finding(
    changed: dict[str, Any],
) -> None:
    assert sends_of(changed) == ()


A100 = DeviceLimits(
    name="NVIDIA A100-SXM4-80GB", flops_per_s=312e12, bytes_per_s=2039e9, element_bytes=2
)
LAYER = Layer(num_tokens=4096, hidden=4096, inner=None, tp=1)


def microbatches(*num_tokens: int) -> MicrobatchTable:
    return table_of(MicrobatchTable, microbatch=range(len(num_tokens)), num_tokens=num_tokens)


def manifest(**settings: str) -> RankManifest:
    return RankManifest(epoch=0, rank=0, settings={f"config.{k}": v for k, v in settings.items()})


def rank_on(name: str, dtype: str = "bfloat16") -> RankInfo:
    return RankInfo(rank=0, host="a", coords=Coords(), device_name=name, dtype=dtype)


def test_a_large_square_product_can_reach_the_peak() -> None:
    assert reachable_ratio(LAYER, A100) == 1.0


def test_a_small_product_is_bound_by_memory() -> None:
    # GIVEN 64 tokens: 2 * 64 * 4096^2 FLOPs, and 2 * (64 * 4096 * 2 + 4096^2) bytes
    small = replace(LAYER, num_tokens=64)

    # THEN the intensity is 62.06 FLOPs per byte, and the device needs 153.0
    assert reachable_ratio(small, A100) == pytest.approx(62.06 / 153.0, rel=1e-3)


def test_tensor_parallelism_divides_the_columns_of_a_product() -> None:
    layer = Layer(num_tokens=512, hidden=4096, inner=16384, tp=8)

    assert layer.products == ((512, 4096, 512), (512, 4096, 2048))


def test_sizes_come_from_the_manifest_and_the_micro_batches() -> None:
    manifests = [manifest(hidden_size="4096", intermediate_size="11008")]

    found = read_layer(manifests, microbatches(4096, 2048, 2048), tp=2)

    assert found == Layer(num_tokens=2048, hidden=4096, inner=11008, tp=2)


@pytest.mark.parametrize(
    "settings",
    [{}, {"hidden_size": "many"}, {"hidden_size": "64", "d_model": "128"}, {"hidden_size": "-4"}],
)
def test_a_width_that_is_missing_or_ambiguous_is_unknown(settings: dict[str, str]) -> None:
    assert read_layer([manifest(**settings)], microbatches(2048), tp=1) is None


def test_without_token_counts_the_sizes_are_unknown() -> None:
    assert read_layer([manifest(hidden_size="64")], microbatches(-1, -1), tp=1) is None


def test_a_device_is_known_if_all_ranks_have_it_and_it_is_listed() -> None:
    listed = rank_on("NVIDIA A100-SXM4-80GB")

    assert read_device([listed, listed]) == A100
    assert read_device([listed, rank_on("NVIDIA H200")]) is None
    assert read_device([rank_on("something else")]) is None
    assert read_device([rank_on("NVIDIA A100-SXM4-80GB", "float32")]) is None
