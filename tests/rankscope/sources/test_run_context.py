from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.collector.read.reports import read_comparable_mfu
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.writer import StoreWriter
from rankscope.sources.store_source import StoreSource
from tests.support.collector.spool_builder import OFFSET_NS, SpoolBuilder

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.analysis.trace.context import RunContext
    from rankscope.collector.store.store import Store

ENDED_AT = OFFSET_NS + 9_000


def manifest(rank: int, *, nccl_algo: str = "Ring", started_ns: int = 1) -> dict[str, Any]:
    return {
        "world_size": 2,
        "local_rank": rank,
        "started_ns": started_ns,
        "layout": {"dp": 2},
        "model": {"name": "tiny"},
        "environment": {"NCCL_ALGO": nccl_algo},
        "versions": {"torch": "2.13.0", "nccl": None, "packages": {"numpy": "2.4"}},
        "device": {"name": "cpu", "uuid": f"uuid-{rank}"},
        "seeds": {"data": rank},
    }


def write_run(spool_dir: Path, run_id: str, *, nccl_algo: str) -> list[SpoolBuilder]:
    """Two ranks, steps 0 and 1 of 1000 ns each; rank 1 is set to ``nccl_algo``."""
    ranks = []
    for rank, algorithm in ((0, "Ring"), (1, nccl_algo)):
        built = SpoolBuilder(
            spool_dir,
            run_id=run_id,
            rank=rank,
            manifest=manifest(rank, nccl_algo=algorithm),
            anchor_unix_ns=OFFSET_NS + (1_000 if run_id == "earlier" else 2_000),
            anchor_monotonic_ns=1_000 if run_id == "earlier" else 2_000,
        )
        for step in (0, 1):
            built.span("forward", step=step, start_ns=1_000 * step)
            built.microbatch(0, step=step, num_tokens=8 + step, sum_squared_lengths=64)
            built.step(step, start_ns=1_000 * step, duration_ns=1_000)
        ranks.append(built)
    return ranks


@pytest.fixture(scope="module")
def source(store: Store, tmp_path_factory: pytest.TempPathFactory) -> StoreSource:
    """Run ``earlier``, then run ``r``, in which rank 1 fails in step 2 and rank 0 ends after."""
    spool_dir = tmp_path_factory.mktemp("spool")
    for built in write_run(spool_dir, "earlier", nccl_algo="Ring"):
        built.end(at_ns=OFFSET_NS)
    first, second = write_run(spool_dir, "r", nccl_algo="Tree")
    second.span("forward", step=2, start_ns=2_000)
    second.fail("ValueError", "no such token", at_ns=OFFSET_NS + 5_000)
    first.event("pause", "hello", at_ns=OFFSET_NS + 3, data={"ms": 4})
    first.end(at_ns=ENDED_AT)
    tail = SpoolTail(spool_dir, StoreWriter(store), grace_ns=0)
    tail.poll()
    tail.poll()
    device = {"run_id": "faster", "epoch": 0, "rank": 0, "device_name": "H100", "process": "p"}
    store.insert_rows("ranks", [device])
    store.insert_rows("runs", [{"run_id": "faster", "epoch": 0}])
    reports = [
        {"run_id": run_id, "mfu": mfu} for run_id, mfu in (("earlier", 0.5), ("faster", 0.6))
    ]
    store.insert_rows("reports", reports)
    return StoreSource(store)


@pytest.fixture(scope="module")
def context(source: StoreSource) -> RunContext:
    return source.context("r")


@pytest.mark.slow
def test_the_usual_mfu_is_that_of_the_previous_run_on_the_same_devices(
    context: RunContext, store: Store
) -> None:
    assert context.previous_mfu == 0.5
    assert read_comparable_mfu(store, "r", "faster") is None


@pytest.mark.slow
def test_microbatches_are_those_of_the_requested_steps(source: StoreSource) -> None:
    found = source.context("r", first=1, last=1).microbatches

    assert (found.step.tolist(), found.rank.tolist()) == ([1, 1], [0, 1])
    assert (found.num_tokens.tolist(), found.sum_squared_lengths.tolist()) == ([9, 9], [64, 64])


def test_manifests_have_flat_settings_without_those_of_a_single_rank(
    context: RunContext,
) -> None:
    first, second = context.manifests

    assert [(one.epoch, one.rank) for one in context.manifests] == [(0, 0), (0, 1)]
    assert dict(first.settings) == {
        "device.name": "cpu",
        "environment.NCCL_ALGO": "Ring",
        "layout.dp": "2",
        "model.name": "tiny",
        "versions.packages.numpy": "2.4",
        "versions.torch": "2.13.0",
    }
    assert second.settings["environment.NCCL_ALGO"] == "Tree"


def test_ranks_of_equal_settings_share_one_stored_manifest(
    store: Store, source: StoreSource
) -> None:
    stored = store.rows("SELECT run_id, count() AS num FROM manifests FINAL GROUP BY run_id")

    assert {row["run_id"]: row["num"] for row in stored} == {"earlier": 1, "r": 2}
    earlier = source.context("earlier")
    assert [one.rank for one in earlier.manifests] == [0, 1]
    assert earlier.manifests[0].settings is earlier.manifests[1].settings


def test_the_previous_run_is_the_last_one_of_the_same_model_and_size(
    context: RunContext, source: StoreSource
) -> None:
    previous = context.previous_manifests

    assert [(known.rank, known.settings["environment.NCCL_ALGO"]) for known in previous] == [
        (0, "Ring"),
        (1, "Ring"),
    ]
    assert source.context("earlier").previous_manifests == ()


def test_exits_are_sorted_by_time_and_have_exception_and_step(context: RunContext) -> None:
    failed, ended = context.exits

    assert (failed.rank, failed.state, failed.at_ns) == (1, "failed", OFFSET_NS + 5_000)
    assert (failed.exception, failed.message, failed.step) == ("ValueError", "no such token", 2)
    assert (ended.rank, ended.state, ended.at_ns, ended.step) == (0, "ended", ENDED_AT, None)


def test_events_keep_their_document(context: RunContext) -> None:
    (pause,) = [event for event in context.events if event.kind == "pause"]

    assert (pause.rank, pause.at_ns) == (0, OFFSET_NS + 3)
    assert (pause.text, pause.data) == ("hello", {"ms": 4})


def test_samples_are_those_of_the_run_and_its_hosts_during_the_steps_and_until_it_failed(
    store: Store, source: StoreSource
) -> None:
    at_ns = [OFFSET_NS + after_ns for after_ns in (0, 1_500, 2_000, 2_001)]
    clock = {"run_id": "r", "host": "another-host", "device": 1, "name": "gpu-clock-hz"}
    mine = [
        clock | {"at_ns": at, "value": value}
        for at, value in zip(at_ns, (1.9e9, 1.8e9, 1.7e9, 1.6e9), strict=True)
    ]
    load = {"run_id": "", "device": -1, "name": "cpu-load-ratio"}
    of_hosts = [
        load | {"host": "another-host", "at_ns": at_ns[0], "value": 0.5},
        load | {"host": "unrelated-host", "at_ns": at_ns[1], "value": 0.9},
    ]
    for rows in (mine, of_hosts, mine):  # stored again: replaced
        store.insert_rows("samples", rows)

    found = source.context("r").samples
    names = [found.names[code] for code in found.name]
    assert list(zip(names, found.value.tolist(), strict=True)) == [
        ("cpu-load-ratio", 0.5),
        ("gpu-clock-hz", 1.9e9),
        ("gpu-clock-hz", 1.8e9),
        ("gpu-clock-hz", 1.7e9),
        ("gpu-clock-hz", 1.6e9),
    ]
    assert (found.device.tolist(), found.hosts) == ([-1, 1, 1, 1, 1], ("another-host",))
    assert source.context("r", first=0, last=0).samples.value.tolist() == [0.5, 1.9e9]
    assert len(source.context("r", first=50).samples) == 0


def test_the_context_of_an_unknown_run_is_empty(source: StoreSource) -> None:
    found = source.context("unknown")

    assert (len(found.microbatches), len(found.samples)) == (0, 0)
    assert not found.events + found.manifests + found.exits + found.previous_manifests


def test_the_step_of_a_lost_rank_is_that_of_its_open_span(store: Store) -> None:
    rank = {"run_id": "lost", "rank": 0, "process": "p"}
    store.insert_rows("ranks", [{**rank, "exit_state": "lost", "exit_ns": 7}])
    data = '{"step": 4, "open": []}'
    store.insert_rows("events", [{**rank, "at_ns": 7, "kind": "lost", "data": data}])

    (found,) = StoreSource(store).context("lost").exits

    assert (found.state, found.at_ns, found.step, found.exception) == ("lost", 7, 4, "")


def test_a_line_of_a_log_that_comes_after_the_end_counts_as_new_data(
    store: Store, source: StoreSource
) -> None:
    before = {run.run_id: run.num_rows for run in source.runs()}
    line = {
        "run_id": "earlier", "epoch": 0, "rank": -1, "at_ns": OFFSET_NS, "kind": "kernel",
        "text": "Xid 79", "data": "{}", "process": "", "line": -1_000,
    }  # fmt: skip
    store.insert_rows("events", [line])

    after = {run.run_id: run.num_rows for run in source.runs()}
    assert after == before | {"earlier": before["earlier"] + 1}


def test_the_version_of_a_run_changes_with_its_ranks_and_events_alone(store: Store) -> None:
    source, rank = StoreSource(store), {"run_id": "versions", "epoch": 0, "rank": 0, "process": "p"}
    versions = [source.version("versions")]
    for table, row in (
        ("ranks", rank | {"host": "a", "revision": 1}),
        ("ranks", rank | {"host": "a", "revision": 2, "produced": 5, "dropped": {"full": 1}}),
        ("ranks", rank | {"host": "a", "revision": 3, "exit_state": "failed", "exit_ns": 7}),
        ("runs", {"run_id": "versions", "epoch": 0}),
        ("runs", {"run_id": "versions", "epoch": 1}),
        ("events", {"run_id": "versions", "epoch": 1, "rank": 0, "at_ns": 1, "kind": "pause"}),
    ):
        store.insert_rows(table, [row])
        versions.append(source.version("versions"))
    are_new = [after != before for before, after in itertools.pairwise(versions)]
    assert are_new == [True, False, True, True, True, True]
