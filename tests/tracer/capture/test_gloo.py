"""Four gloo processes: TP + PP, FSDP2 + TP + plain calls, DDP; see `gloo_job`."""

from __future__ import annotations

import functools
import json
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.tracer.span import SpanFlag
from tests.support.tracer.ranks import run_ranks
from tests.support.tracer.reading import Row, dropped, process_folders, read_spans
from tests.support.tracer.torch_here import TORCH, of_this_torch

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

WORLD = 4
RECIPES = tuple(of_this_torch(dict.fromkeys(("pipeline", "sharded", "replicated"))))

CALLED = {
    "c10d.allreduce_": "all_reduce",
    "_c10d_functional.all_reduce": "all_reduce",
    "c10d._allgather_base_": "all_gather_into_tensor",
    "c10d._reduce_scatter_base_": "reduce_scatter_tensor",
    "c10d.allgather_": "all_gather",
    "c10d.broadcast_": "broadcast",
    "c10d.reduce_": "reduce",
    "c10d.barrier": "barrier",
    "c10d.scatter_": "scatter",
    "c10d.gather_": "gather",
    "c10d.alltoall_base_": "all_to_all_single",
    "c10d.send": "send",
    "c10d.recv_": "recv",
}
"""Name of the span of each operator of torch."""

LAUNCHES_NOTHING = {"_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd"}

ROOTED = {"broadcast", "reduce", "scatter", "gather", "send"}
"""Operations whose members may leave before the last one has entered."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the job once and return its folder."""
    folder: Path = tmp_path_factory.mktemp("gloo")
    run_ranks("tests.tracer.jobs.gloo_job", WORLD, folder)
    return folder


def read_document(job: Path, recipe: str, rank: int) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((job / f"{recipe}-{rank}.json").read_text())
    return document


@functools.cache
def spans_of(job: Path, recipe: str) -> dict[int, list[Row]]:
    folders = process_folders(job / "spool" / recipe)
    return {rank: read_spans(folder) for rank, folder in folders.items()}


def groups_of(job: Path, recipe: str) -> dict[int, dict[str, Any]]:
    groups = {}
    for folder in process_folders(job / "spool" / recipe).values():
        for line in (folder / "groups.jsonl").read_text().splitlines():
            group = json.loads(line)
            groups[int(group["group_id"], 16)] = group
    return groups


def communications(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.group_id and row.kind != "wait"]


def waits(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.kind == "wait"]


def instance(row: Row) -> tuple[int, int, int, int]:
    return row.group_id, row.src_rank, row.dst_rank, row.seq


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_communication_that_torch_saw_is_a_span(job: Path, recipe: str) -> None:
    for rank, rows in spans_of(job, recipe).items():
        seen = read_document(job, recipe, rank)["traced"]["seen"]
        expected: Counter[str] = Counter()
        for op, count in seen.items():
            if op not in LAUNCHES_NOTHING:
                expected[CALLED[op]] += count

        assert Counter(row.name for row in communications(rows)) == expected
        assert expected.total() > 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_all_members_number_their_communications_alike(job: Path, recipe: str) -> None:
    numbers: dict[tuple[int, int, int], dict[int, list[tuple[int, str]]]] = defaultdict(dict)
    for rank, rows in spans_of(job, recipe).items():
        for row in sorted(communications(rows), key=lambda row: row.seq):
            key = (row.group_id, row.src_rank, row.dst_rank)
            name = "p2p" if row.name in ("send", "recv") else row.name
            numbers[key].setdefault(rank, []).append((row.seq, name))

    groups = groups_of(job, recipe)
    for (group_id, src_rank, dst_rank), by_rank in numbers.items():
        members = groups[group_id]["members"] if src_rank == -1 else [src_rank, dst_rank]
        assert sorted(by_rank) == sorted(members)
        first = by_rank[members[0]]
        assert all(by_rank[member] == first for member in members)
        assert [seq for seq, _ in first] == list(range(len(first)))


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_are_bit_identical_with_and_without_the_tracer(job: Path, recipe: str) -> None:
    for rank in range(WORLD):
        document = read_document(job, recipe, rank)
        assert document["traced"]["losses"] == document["plain"]["losses"]
        assert document["traced"]["seen"] == document["plain"]["seen"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_communication_is_waited_for_once_and_never_ends_after_its_wait(
    job: Path, recipe: str
) -> None:
    for rows in spans_of(job, recipe).values():
        # DDP broadcasts the layout of its first buckets in C++ and waits there, outside of any
        # step.
        by_instance = {
            instance(row): row for row in communications(rows) if row.name != "broadcast"
        }
        blocked = [row for row in waits(rows) if row.name != "wait broadcast"]

        assert sorted(map(instance, blocked)) == sorted(by_instance)
        for wait in blocked:
            communication = by_instance[instance(wait)]
            assert wait.name == f"wait {communication.name}"
            assert communication.start_ns <= wait.end_ns
            assert communication.end_ns <= wait.end_ns


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_member_leaves_before_the_last_has_entered(job: Path, recipe: str) -> None:
    entered: dict[tuple[int, int, int, int], int] = defaultdict(int)
    rows = [row for rows in spans_of(job, recipe).values() for row in communications(rows)]
    for row in rows:
        entered[instance(row)] = max(entered[instance(row)], row.start_ns)

    assert [
        row for row in rows if row.end_ns < entered[instance(row)] and row.name not in ROOTED
    ] == []


def test_kinds_follow_the_mesh_axes(job: Path) -> None:
    kinds = {
        recipe: {
            row.kind for rows in spans_of(job, recipe).values() for row in communications(rows)
        }
        for recipe in RECIPES
    }

    expected = {
        "pipeline": {"tp-comm", "pp-send", "pp-recv", "other"},
        "sharded": {"tp-comm", "dp-comm", "pp-send", "pp-recv", "other"},
        "replicated": {"dp-comm"},
    }
    assert kinds == of_this_torch(expected)


def test_pipeline_stages_run_each_microbatch_once_a_step(job: Path) -> None:
    for rows in spans_of(job, "pipeline").values():
        for kind in ("forward", "backward"):
            found = sorted(
                (row.step, row.microbatch, row.chunk) for row in rows if row.kind == kind
            )
            assert found == [(step, index, 0) for step in range(3) for index in range(2)]
        assert [row.step for row in rows if row.kind == "optimizer"] == [0, 1, 2]


def test_without_a_pipeline_forwards_and_backwards_count_as_microbatches(job: Path) -> None:
    for rows in spans_of(job, "sharded").values():
        for kind in ("forward", "backward"):
            found = sorted((row.step, row.microbatch) for row in rows if row.kind == kind)
            assert found == [(step, index) for step in range(3) for index in range(2)]


def test_spans_inside_a_forward_belong_to_its_microbatch(job: Path) -> None:
    for rows in spans_of(job, "sharded").values():
        forwards = [row for row in rows if row.kind == "forward"]
        inside = 0
        for row in rows:
            for forward in forwards:
                if row.group_id and forward.start_ns <= row.start_ns < forward.end_ns:
                    assert (row.step, row.microbatch) == (forward.step, forward.microbatch)
                    inside += 1
        assert inside > 0


def test_operations_of_one_batch_call_share_an_interval(job: Path) -> None:
    # A send with a receive is batched; later versions of torch issue single ones separately.
    for rows in spans_of(job, "pipeline").values():
        p2p = [row for row in rows if row.kind in ("pp-send", "pp-recv")]
        kinds = defaultdict(list)
        for row in p2p:
            assert (SpanFlag.COALESCED in row.flags) == bool(row.interval_id)
            kinds[row.interval_id].append(row.kind)
        assert (0 in kinds) == (TORCH >= "2.13")
        batches = [kinds[interval] for interval in kinds if interval]
        pairs = [batch for batch in batches if len(batch) > 1 or TORCH >= "2.13"]
        assert pairs
        assert all(sorted(pair) == ["pp-recv", "pp-send"] for pair in pairs)


def test_ddp_waits_inside_the_backward_and_communicates_on_a_track_of_its_own(job: Path) -> None:
    for rows in spans_of(job, "replicated").values():
        backwards = [row for row in rows if row.kind == "backward"]
        for wait in (row for row in waits(rows) if row.name == "wait all_reduce"):
            assert wait.track == "main"
            assert any(b.start_ns <= wait.start_ns and wait.end_ns <= b.end_ns for b in backwards)
        assert {row.track for row in communications(rows)} == {"comm dp"}


def test_nothing_was_dropped(job: Path) -> None:
    for recipe in RECIPES:
        for folder in process_folders(job / "spool" / recipe).values():
            assert dropped(folder) == {}
