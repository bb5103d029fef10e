from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rankscope.analysis.causes.layout import Device, Layer, device_of, layer_of, reachable_ratio
from rankscope.analysis.trace.context import MicrobatchTable, RankManifest
from rankscope.analysis.trace.tables import RankInfo
from rankscope.tracer.topology import Coords

A100 = Device(name="NVIDIA A100-SXM4-80GB", flops_per_s=312e12, bytes_per_s=2039e9, element_bytes=2)
LAYER = Layer(num_tokens=4096, hidden=4096, inner=None, tp=1)


def microbatches(*num_tokens: int) -> MicrobatchTable:
    num = len(num_tokens)
    zeros = np.zeros(num, dtype=np.int32)
    return MicrobatchTable(
        epoch=zeros,
        step=zeros,
        rank=zeros,
        microbatch=np.arange(num, dtype=np.int32),
        num_tokens=np.array(num_tokens, dtype=np.int64),
        sum_squared_lengths=np.full(num, -1, dtype=np.int64),
    )


def manifest(**settings: str) -> RankManifest:
    return RankManifest(epoch=0, rank=0, settings={f"config.{k}": v for k, v in settings.items()})


def rank_on(name: str, dtype: str = "bfloat16") -> RankInfo:
    return RankInfo(rank=0, host="a", coords=Coords(), device_name=name, dtype=dtype)


def test_a_large_square_product_can_reach_the_peak() -> None:
    assert reachable_ratio(LAYER, A100) == 1.0


def test_a_small_one_is_bound_by_memory_as_the_roofline_says() -> None:
    # GIVEN 64 tokens: 2 * 64 * 4096^2 FLOPs, and 2 * (64 * 4096 * 2 + 4096^2) bytes
    small = replace(LAYER, num_tokens=64)

    # THEN the intensity is 62.06 FLOPs a byte, of the 153.0 that the device needs
    assert reachable_ratio(small, A100) == pytest.approx(62.06 / 153.0, rel=1e-3)


def test_tensor_parallelism_cuts_one_side_of_a_product() -> None:
    layer = Layer(num_tokens=512, hidden=4096, inner=16384, tp=8)

    assert layer.products == ((512, 4096, 512), (512, 4096, 2048))


def test_sizes_come_from_the_manifest_and_the_micro_batches() -> None:
    told = [manifest(hidden_size="4096", intermediate_size="11008")]

    found = layer_of(told, microbatches(4096, 2048, 2048), tp=2)

    assert found == Layer(num_tokens=2048, hidden=4096, inner=11008, tp=2)


@pytest.mark.parametrize(
    "settings",
    [{}, {"hidden_size": "many"}, {"hidden_size": "64", "d_model": "128"}, {"hidden_size": "-4"}],
)
def test_a_width_that_is_missing_or_told_in_two_ways_is_unknown(settings: dict[str, str]) -> None:
    assert layer_of([manifest(**settings)], microbatches(2048), tp=1) is None


def test_without_token_counts_nothing_is_known() -> None:
    assert layer_of([manifest(hidden_size="64")], microbatches(-1, -1), tp=1) is None


def test_a_device_is_known_where_all_ranks_have_it_and_it_is_listed() -> None:
    listed = rank_on("NVIDIA A100-SXM4-80GB")

    assert device_of([listed, listed]) == A100
    assert device_of([listed, rank_on("NVIDIA H200")]) is None
    assert device_of([rank_on("something else")]) is None
    assert device_of([rank_on("NVIDIA A100-SXM4-80GB", "float32")]) is None
