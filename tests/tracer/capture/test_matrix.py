"""All kinds of parallel training and all communication calls, on gloo ranks; see `matrix_job`."""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.tracer.span import SpanFlag
from tests.support.tracer.ranks import run_ranks
from tests.support.tracer.reading import Row, dropped, process_folders, read_spans
from tests.support.tracer.recipes import each_recipe, selected_recipes
from tests.support.tracer.torch_here import FIRST, TORCH, of_this_torch, since
from tests.tracer.jobs.matrix_recipes import COMPILED, NUM_RANKS, RECIPES

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 2
PIPELINES = {"pipeline", "gpipe", "interleaved", "three_axes", "zero_bubble", "zero_bubble_v"}
QUICK = {"calls", "pipeline", "replicated", "sharded"}

KINDS = {
    "pipeline": {"tp-comm", "pp-send", "pp-recv", "other"},
    "sharded": {"tp-comm", "dp-comm", "pp-send", "pp-recv", "other"},
    "replicated": {"dp-comm"},
    "calls": {"other", "pp-send", "pp-recv"},
    "hybrid_sharded": {"dp-comm"},
    "static_graph": {"dp-comm"},
    "hooked": {"dp-comm"},
    "compiled": {"dp-comm"},
    "expert_parallel": {"dp-comm", "ep-comm"},
    "context_parallel": {"dp-comm", "cp-comm"},
    "gpipe": {"tp-comm", "pp-send", "pp-recv", "other"},
    "interleaved": {"dp-comm", "pp-send", "pp-recv", "other"},
    "zero_bubble": {"dp-comm", "pp-send", "pp-recv", "other"},
    "zero_bubble_v": {"pp-send", "pp-recv", "other"},
    "three_axes": {"tp-comm", "dp-comm", "pp-send", "pp-recv", "other"},
}

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
    "c10d.allreduce_coalesced_": "all_reduce_coalesced",
    "c10d.alltoall_": "all_to_all",
    "c10d.monitored_barrier_": "monitored_barrier",
    "c10d.recv_any_source_": "recv_any_source",
    "c10d.reduce_scatter_": "reduce_scatter",
    "_c10d_functional.all_gather_into_tensor": "all_gather_into_tensor_coalesced",
    "_c10d_functional.all_reduce_coalesced": "all_reduce_coalesced",
    "_c10d_functional.all_to_all_single": "all_to_all_single",
}
"""Name of the span of each operator of torch."""

LAUNCHES_NOTHING = {"_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd"}

ROOTED = {"broadcast", "reduce", "scatter", "gather", "send"}
"""Operations whose members may leave before the last one has entered."""

P2P = {"send", "recv", "recv_any_source"}

OUT_OF_SIGHT = {"calls": Counter({"all_reduce": 1})}
"""Communications per step of other threads, which the counting mode does not see."""

OBJECTS_BY = "all_gather_into_tensor" if TORCH >= "2.15" else "all_gather"
"""Operation with which torch gathers the lengths of pickled objects."""

NEVER_WAITED = {"calls": 1}
"""Communications per step without a wait."""


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run each recipe with its number of ranks; return the folder of the job."""
    folder: Path = tmp_path_factory.mktemp("matrix")
    recipes = RECIPES.keys() & (QUICK | selected_recipes(request))
    for num_ranks in {NUM_RANKS[recipe] for recipe in recipes}:
        alike = sorted(recipe for recipe in recipes if NUM_RANKS[recipe] == num_ranks)
        run_ranks(
            "tests.tracer.jobs.matrix_job", num_ranks, folder, *alike, TORCH_FR_BUFFER_SIZE="2000"
        )
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


def seen_by_torch(document: dict[str, Any], recipe: str) -> Counter[str]:
    if recipe in COMPILED:
        return Counter(name.removeprefix("gloo:") for name in document["flight"])
    expected: Counter[str] = Counter()
    for _ in range(STEPS):
        expected += OUT_OF_SIGHT.get(recipe, Counter())
    for op, count in document["seen"].items():
        if op not in LAUNCHES_NOTHING:
            expected[CALLED[op]] += count
    return expected


@pytest.mark.parametrize("recipe", each_recipe(RECIPES, QUICK))
def test_every_communication_that_torch_saw_is_a_span(matrix: Path, recipe: str) -> None:
    if recipe in COMPILED and TORCH < "2.8":
        pytest.skip("before torch 2.8 gloo has no flight recorder to count by")
    for rank, rows in spans_of(matrix, recipe).items():
        expected = seen_by_torch(read_document(matrix, recipe, rank)["traced"], recipe)

        assert Counter(row.name for row in communications(rows)) == expected
        assert expected.total() > 0


@pytest.mark.parametrize("recipe", each_recipe(RECIPES, QUICK))
def test_all_members_have_the_same_communications(matrix: Path, recipe: str) -> None:
    numbers: dict[tuple[int, int, int], dict[int, list[tuple[int, str, int]]]] = defaultdict(dict)
    for rank, rows in spans_of(matrix, recipe).items():
        for row in sorted(communications(rows), key=lambda row: row.seq):
            key = (row.group_id, row.src_rank, row.dst_rank)
            name = "p2p" if row.name in P2P else row.name
            # The splits of an all-to-all may be uneven: its bytes are each member's own.
            num_bytes = -1 if name == "all_to_all_single" else row.num_bytes
            numbers[key].setdefault(rank, []).append((row.seq, name, num_bytes))

    groups = groups_of(matrix, recipe)
    for (group_id, src_rank, dst_rank), by_rank in numbers.items():
        members = groups[group_id]["members"] if src_rank == -1 else [src_rank, dst_rank]
        assert sorted(by_rank) == sorted(members)
        first = by_rank[members[0]]
        assert all(by_rank[member] == first for member in members)
        assert [seq for seq, _, _ in first] == list(range(len(first)))


@pytest.mark.parametrize("recipe", each_recipe(RECIPES, QUICK))
def test_each_communication_is_waited_for_at_most_once(matrix: Path, recipe: str) -> None:
    for rows in spans_of(matrix, recipe).values():
        launched = Counter((row.name, instance(row)) for row in communications(rows))
        waited = Counter((row.name.removeprefix("wait "), instance(row)) for row in waits(rows))

        assert max(waited.values()) == 1
        assert (launched - waited).total() == STEPS * NEVER_WAITED.get(recipe, 0)
        assert (waited - launched).total() == 0


@pytest.mark.parametrize("recipe", each_recipe(RECIPES, QUICK))
def test_losses_and_graph_breaks_are_the_same_with_and_without_the_tracer(
    matrix: Path, recipe: str
) -> None:
    for rank in range(NUM_RANKS[recipe]):
        document = read_document(matrix, recipe, rank)
        for key in ("losses", "graph_breaks", "graphs", "seen"):
            assert document["traced"][key] == document["plain"][key]
        assert (document["plain"]["graphs"] > 0) == (recipe in COMPILED)


@pytest.mark.parametrize("recipe", each_recipe(RECIPES, QUICK))
def test_no_member_leaves_before_the_last_has_entered(matrix: Path, recipe: str) -> None:
    entered: dict[tuple[int, int, int, int], int] = defaultdict(int)
    rows = [row for rows in spans_of(matrix, recipe).values() for row in communications(rows)]
    for row in rows:
        entered[instance(row)] = max(entered[instance(row)], row.start_ns)

    early = [row for row in rows if row.end_ns < entered[instance(row)]]
    assert [row for row in early if row.name not in ROOTED] == []


@pytest.mark.parametrize("recipe", each_recipe(RECIPES, QUICK))
def test_kinds_follow_the_mesh_axes(matrix: Path, recipe: str) -> None:
    rows = [row for rows in spans_of(matrix, recipe).values() for row in communications(rows)]
    assert {row.kind for row in rows} == KINDS[recipe]


@since(FIRST["calls"], "gloo has no alltoall")
def test_bytes_are_those_of_the_larger_side(matrix: Path) -> None:
    rows = spans_of(matrix, "calls")
    first = [row for row in communications(rows[3]) if row.step == 0]

    assert [(row.name, row.num_bytes) for row in first[:15]] == [
        ("broadcast", 16),
        ("reduce", 16),
        ("gather", 4 * 16),
        ("scatter", 4 * 16),
        ("broadcast", 16),
        ("all_reduce", 16),
        ("all_gather", 4 * 12),
        ("reduce_scatter", 4 * 12),
        ("all_to_all", 4 * 8),
        ("all_gather_into_tensor", 4 * 20),
        ("reduce_scatter_tensor", 4 * 20),
        ("all_to_all_single", 4 * 16),  # rank 3 sends 16 numbers and receives 10
        ("all_reduce", 8),
        ("all_reduce", 16),  # the sparse one, as if it were dense
        (OBJECTS_BY, 4 * 8),  # lengths of pickles
    ]
    named = {row.name: row.num_bytes for row in first}
    assert named["barrier"] == named["monitored_barrier"] == 0
    assert named["all_reduce_coalesced"] == 24


@since(FIRST["calls"], "gloo has no alltoall")
def test_a_receive_from_any_source_has_its_source(matrix: Path) -> None:
    rows = spans_of(matrix, "calls")[0]
    found = [row for row in rows if row.name == "recv_any_source" and row.step == 0]

    assert sorted(row.src_rank for row in found) == [1, 2, 3]
    assert {row.dst_rank for row in found} == {0}


def test_a_second_thread_s_communication_is_waited_for_on_its_track(matrix: Path) -> None:
    for rows in spans_of(matrix, "calls").values():
        tracks = Counter(row.track for row in waits(rows))
        assert tracks["second"] == STEPS


def test_operations_of_one_batch_call_share_an_interval(matrix: Path) -> None:
    for rows in spans_of(matrix, "context_parallel").values():
        p2p = [row for row in communications(rows) if row.name in P2P]
        by_interval: dict[int, list[str]] = defaultdict(list)
        for row in p2p:
            assert SpanFlag.COALESCED in row.flags
            by_interval[row.interval_id].append(row.name)
        assert [sorted(names) for names in by_interval.values()] == [["recv", "send"]] * STEPS

    for rows in spans_of(matrix, "calls").values():
        alone = [row for row in communications(rows) if not row.interval_id]
        assert all(SpanFlag.COALESCED not in row.flags for row in alone)
        together = Counter(row.interval_id for row in communications(rows) if row.interval_id)
        assert list(together.values()) == [2] * STEPS  # the ring, and nothing after it


@pytest.mark.parametrize("recipe", each_recipe(sorted(RECIPES.keys() & PIPELINES), QUICK))
def test_each_chunk_runs_each_microbatch_once_a_step(matrix: Path, recipe: str) -> None:
    _, layout = RECIPES[recipe]
    every = list(itertools.product(range(STEPS), range(4), range(layout.vpp)))
    for rows in spans_of(matrix, recipe).values():
        parts: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for row in rows:
            parts[row.name].append((row.step, row.microbatch, row.chunk))

        assert sorted(parts["forward"]) == every
        assert sorted(parts["backward"] + parts["backward input"]) == every
        assert sorted(parts["backward weight"]) == sorted(parts["backward input"])
        assert bool(parts["backward input"]) == recipe.startswith("zero_bubble")
        assert [step for step, _, _ in parts["optimizer"]] == list(range(STEPS))


@pytest.mark.parametrize("recipe", each_recipe(RECIPES, QUICK))
def test_nothing_was_dropped_and_no_capture_turned_itself_off(matrix: Path, recipe: str) -> None:
    for folder in process_folders(matrix / "spool" / recipe).values():
        assert dropped(folder) == {}
        events = folder / "events.jsonl"
        lines = events.read_text().splitlines() if events.exists() else []
        assert [line for line in map(json.loads, lines) if line["kind"] == "tracer"] == []


@pytest.mark.parametrize(
    "recipe", of_this_torch(dict.fromkeys(("pipeline", "sharded", "replicated")))
)
def test_no_communication_ends_after_its_wait(matrix: Path, recipe: str) -> None:
    for rows in spans_of(matrix, recipe).values():
        # DDP broadcasts the layout of its first buckets in C++ and waits there, outside of any
        # step.
        launched = {instance(row): row for row in communications(rows) if row.name != "broadcast"}
        for wait in waits(rows):
            if wait.name != "wait broadcast":
                communication = launched[instance(wait)]
                assert wait.name == f"wait {communication.name}"
                assert communication.start_ns <= wait.end_ns
                assert communication.end_ns <= wait.end_ns


def test_without_a_pipeline_forwards_and_backwards_count_as_microbatches(matrix: Path) -> None:
    for rows in spans_of(matrix, "sharded").values():
        for kind in ("forward", "backward"):
            found = sorted((row.step, row.microbatch) for row in rows if row.kind == kind)
            assert found == [(step, index) for step in range(STEPS) for index in range(2)]


def test_spans_inside_a_forward_belong_to_its_microbatch(matrix: Path) -> None:
    for rows in spans_of(matrix, "sharded").values():
        forwards = [row for row in rows if row.kind == "forward"]
        inside = 0
        for row in rows:
            for forward in forwards:
                if row.group_id and forward.start_ns <= row.start_ns < forward.end_ns:
                    assert (row.step, row.microbatch) == (forward.step, forward.microbatch)
                    inside += 1
        assert inside > 0


def test_a_send_and_a_receive_of_a_pipeline_share_an_interval(matrix: Path) -> None:
    # A send with a receive is batched; later versions of torch issue single ones separately.
    for rows in spans_of(matrix, "pipeline").values():
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


def test_ddp_waits_inside_the_backward_and_communicates_on_a_track_of_its_own(matrix: Path) -> None:
    for rows in spans_of(matrix, "replicated").values():
        backwards = [row for row in rows if row.kind == "backward"]
        for wait in (row for row in waits(rows) if row.name == "wait all_reduce"):
            assert wait.track == "main"
            assert any(b.start_ns <= wait.start_ns and wait.end_ns <= b.end_ns for b in backwards)
        assert {row.track for row in communications(rows)} == {"comm dp"}
