from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.trace.errors import UnknownRunError
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.writer import StoreWriter
from rankscope.sources.store_source import StoreSource
from rankscope.tracer.span import KIND_CODES, KINDS, SpanFlag, SpanKind
from rankscope.tracer.topology import Coords, Layout
from tests.support.collector.spool_builder import OFFSET_NS, SpoolBuilder

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.analysis.trace.tables import SpanSource, SpanTable
    from rankscope.collector.store.store import Store

INT32, INT64 = np.int32, np.int64
EXPECTED_TYPES = {
    "epoch": INT32, "step": INT32, "rank": INT32, "kind": np.int8, "name": INT32, "track": INT32,
    "start_ns": INT64, "duration_ns": INT64, "launch_ns": INT64, "group_id": np.uint64,
    "seq": INT64, "src_rank": INT32, "dst_rank": INT32, "microbatch": INT32, "chunk": INT32,
    "num_bytes": INT64, "interval_id": INT64, "flags": np.uint16, "depth": np.int16,
}  # fmt: skip


@pytest.fixture(scope="module")
def source(store: Store, tmp_path_factory: pytest.TempPathFactory) -> SpanSource:
    """Run ``r``: two ranks, two steps and a span outside any; rank 1 restarts as epoch 1."""
    spool_dir = tmp_path_factory.mktemp("spool")
    for rank in (1, 0):
        spool = SpoolBuilder(spool_dir, run_id="r", rank=rank)
        spool.span("setup", step=-1, kind=SpanKind.HOST)
        for step in (1, 0):  # written out of order
            begin_ns = 100 * step
            spool.span("backward", step=step, start_ns=begin_ns + 20, kind=SpanKind.BACKWARD)
            spool.span("forward", step=step, start_ns=begin_ns)
            spool.step(step, start_ns=begin_ns, duration_ns=60, num_tokens=8, loss=4.0 - step)
        spool.group(7, kind="dp-comm", name="dp", members=[1, 0])
        spool.end(at_ns=9)
    again = SpoolBuilder(spool_dir, run_id="r", rank=1, epoch=1)
    again.span("forward", step=0, start_ns=1_000, flags=SpanFlag.HOST_CLOCK | SpanFlag.ERROR)
    again.fail("RuntimeError", "boom")
    tail = SpoolTail(spool_dir, StoreWriter(store), grace_ns=0)
    tail.poll()
    tail.poll()
    return StoreSource(store)


def names_of(spans: SpanTable) -> list[str]:
    return [spans.names[code] for code in spans.name]


@pytest.mark.slow
def test_spans_are_sorted_by_epoch_step_rank_and_start(source: SpanSource) -> None:
    spans = source.spans("r")

    places = np.stack([spans.epoch, spans.step, spans.rank], axis=1).tolist()
    assert [(*place, name) for place, name in zip(places, names_of(spans), strict=True)] == [
        (0, 0, 0, "forward"),
        (0, 0, 0, "backward"),
        (0, 0, 1, "forward"),
        (0, 0, 1, "backward"),
        (0, 1, 0, "forward"),
        (0, 1, 0, "backward"),
        (0, 1, 1, "forward"),
        (0, 1, 1, "backward"),
        (1, 0, 1, "forward"),
    ]  # fmt: skip
    assert (spans.start_ns - OFFSET_NS).tolist() == [0, 20, 0, 20, 100, 120, 100, 120, 1_000]


def test_columns_have_the_types_of_the_contract(source: SpanSource) -> None:
    spans = source.spans("r")

    found = {name: getattr(spans, name).dtype for name in EXPECTED_TYPES}
    assert found == {name: np.dtype(expected) for name, expected in EXPECTED_TYPES.items()}
    assert {len(getattr(spans, name)) for name in EXPECTED_TYPES} == {9}


def test_kinds_are_codes_of_the_contract_and_names_are_those_used(source: SpanSource) -> None:
    spans = source.spans("r")

    assert [KINDS[code].value for code in spans.kind] == names_of(spans)
    assert sorted(spans.names) == ["backward", "forward"]
    assert spans.tracks == ("main",)
    assert spans.flags.tolist() == [16] * 8 + [16 | 64]


def test_a_range_of_steps_is_inclusive_and_unlimited_by_default(source: SpanSource) -> None:
    assert set(source.spans("r", first=1).step.tolist()) == {1}
    assert set(source.spans("r", last=0).step.tolist()) == {0}
    assert set(source.spans("r", first=0, last=1).step.tolist()) == {0, 1}
    assert source.steps("r", first=1, last=1).loss.tolist() == [3.0, 3.0]


def test_a_range_without_spans_is_empty_with_the_same_types(source: SpanSource) -> None:
    spans, steps = source.spans("r", first=50, last=60), source.steps("r", first=50)

    assert (len(spans), len(steps), spans.names) == (0, 0, ())
    assert [spans.kind.dtype.name, spans.start_ns.dtype.name] == ["int8", "int64"]


def test_steps_are_sorted_and_have_tokens_and_loss(source: SpanSource) -> None:
    steps = source.steps("r")

    assert (steps.step.tolist(), steps.rank.tolist()) == ([0, 0, 1, 1], [0, 1, 0, 1])
    assert (steps.num_tokens.tolist(), steps.loss.tolist()) == ([8] * 4, [4.0, 4.0, 3.0, 3.0])
    assert (steps.end_ns - steps.start_ns).tolist() == [60] * 4


def test_an_unknown_loss_is_nan(store: Store, tmp_path: Path) -> None:
    spool = SpoolBuilder(tmp_path, run_id="lossless")
    spool.step(0, start_ns=0, duration_ns=1)
    spool.end()
    SpoolTail(tmp_path, StoreWriter(store)).poll()

    steps = StoreSource(store).steps("lossless")
    assert np.isnan(steps.loss).tolist() == [True]
    assert steps.num_tokens.tolist() == [-1]


def test_run_info_has_layout_ranks_groups_and_exit_states(source: SpanSource) -> None:
    info = source.run_info("r")

    assert (info.run_id, info.source_format, info.world_size) == ("r", "rankscope", 2)
    assert info.layout == Layout(dp=2)
    assert [epoch.epoch for epoch in info.epochs] == [0, 1]
    assert [(rank.rank, rank.coords) for rank in info.epochs[0].ranks] == [
        (0, Coords(dp=0)),
        (1, Coords(dp=1)),
    ]
    assert [rank.exit_state for rank in info.epochs[0].ranks] == ["ended", "ended"]
    assert [rank.exit_state for rank in info.epochs[1].ranks] == ["failed"]
    assert [(group.group_id, group.members) for group in info.epochs[0].groups] == [(7, (0, 1))]
    assert (info.account.dropped, info.clock_error_ns) == ({}, 0)


def test_runs_are_listed_with_their_sizes(source: SpanSource) -> None:
    (run,) = [run for run in source.runs() if run.run_id == "r"]

    assert (run.state, run.world_size, run.num_steps) == ("failed", 2, 2)
    assert run.num_spans == 11  # two of them outside any step
    assert run.started_ns is not None


def test_the_error_for_an_unknown_run_names_the_known_runs(source: SpanSource) -> None:
    for ask in (source.run_info, source.spans, source.steps):
        with pytest.raises(UnknownRunError) as caught:
            ask("unknown")
        assert "r" in caught.value.known


def test_an_unknown_kind_is_other(store: Store) -> None:
    store.insert_rows("runs", [{"run_id": "future", "world_size": 1}])
    store.insert_rows("spans", [{"run_id": "future", "kind": "quantum-comm"}])

    spans = StoreSource(store).spans("future")

    assert spans.kind.tolist() == [KIND_CODES[SpanKind.OTHER]]


@pytest.mark.slow
def test_rows_that_an_older_version_stored_out_of_bounds_are_left_out_and_reported(
    store: Store,
) -> None:
    run_id = "old"
    about = {"run_id": run_id, "epoch": 0}
    store.insert_rows(
        "runs",
        [{**about, "world_size": -3, "layout": {"pp": -5}, "model": "null", "revision": 1}],
    )
    ranks = [0, 3, -5]
    store.insert_rows("ranks", [{**about, "rank": rank, "process": str(rank)} for rank in ranks])
    members = enumerate(([0, 3], [-1, -2], [0, 9]))
    store.insert_rows(
        "groups", [{**about, "group_id": number, "members": found} for number, found in members]
    )
    source = StoreSource(store)

    info = source.run_info(run_id)
    (listed,) = [run for run in source.runs() if run.run_id == run_id]

    assert (info.world_size, listed.world_size) == (4, 4)
    assert info.layout == listed.layout == Layout()
    assert [rank.rank for rank in info.epochs[0].ranks] == [0, 3]
    assert (0, 3) in [group.members for group in info.epochs[0].groups]
    for reason in ("-3 is not", "pp is -5", "null is not", "-5 is not", "-1 is not"):
        assert any(reason in warning for warning in info.warnings), reason


@pytest.mark.slow
def test_memory_and_windows_come_from_the_spool_and_from_what_the_tracer_derived(
    store: Store, tmp_path: Path
) -> None:
    memory = {"device_bytes": 80, "other_bytes": 2, "parameter_bytes": 3, "gradient_bytes": "?"}
    derived = {
        "flops_per_token": 6.0,
        "flops_per_windowed_length": 12.0,
        "recomputed_flops_per_token": 0.0,
        "shape": {"num_layers": 4, "drops": False, "hidden": -1},
        "memory": memory,
    }
    spool = SpoolBuilder(tmp_path, run_id="full", manifest={"version": 1, "derived": derived})
    spool.step(
        0,
        start_ns=0,
        duration_ns=9,
        peak_memory_bytes=70,
        peak_reserved_bytes=78,
        num_alloc_retries=0,
    )
    spool.microbatch(0, step=0, num_tokens=8, sum_squared_lengths=64, sum_windowed_lengths=32)
    spool.step(1, start_ns=10, duration_ns=9)
    spool.end(at_ns=20)
    tail = SpoolTail(tmp_path, StoreWriter(store), grace_ns=0)
    tail.poll()
    tail.poll()
    source = StoreSource(store)

    info, steps = source.run_info("full"), source.steps("full")

    assert steps.peak_memory_bytes.tolist() == [70, -1]
    assert steps.peak_reserved_bytes.tolist() == [78, -1]
    assert steps.num_alloc_retries.tolist() == [0, -1]
    assert source.context("full").microbatches.sum_windowed_lengths.tolist() == [32]
    assert (info.flops_per_token, info.flops_per_windowed_length) == (6.0, 12.0)
    assert info.recomputed_flops_per_token == 0.0
    assert info.shape == {"num_layers": 4, "drops": False}
    rank_memory = info.ranks[0].memory
    assert (rank_memory.capacity_bytes, rank_memory.parameter_bytes) == (78, 3)
    assert rank_memory.gradient_bytes is None
