"""The layout that ranks derive in jobs that declare none; see `undeclared_layout_job`."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.tracer.spool import DropReason
from rankscope.tracer.topology import Coords, Layout
from tests.support.tracer.ranks import run_ranks
from tests.support.tracer.reading import dropped, process_folders, read_spans
from tests.support.tracer.recipes import each_recipe, selected_recipes
from tests.tracer.jobs import matrix_recipes
from tests.tracer.jobs.undeclared_layout_job import RECIPES, STEPS

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(600)]

NOT_DERIVED = {
    "expert_parallel",  # unknown whether the ranks of its experts have their own tokens
    "reduced_manually",
    "experts_distributed_manually",
    "ring_manually",
    "halves_manually",
    "part_of_the_job",
    "half_wrapped",
}

LAYOUTS = {
    **{name: layout for name, (_, layout) in matrix_recipes.RECIPES.items()},
    "tensor_parallel_over_all": Layout(tp=4),
    "pipeline_over_all": Layout(pp=4),
    "unreported_pipeline": Layout(pp=4),
}
"""Layouts that a job could declare; all others are data parallel only."""

QUICK = {"half_wrapped", "plain_loop", "unreported_pipeline"}


@pytest.fixture(scope="module")
def spool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run each recipe with its number of ranks; return the folder of the records."""
    folder: Path = tmp_path_factory.mktemp("placement")
    recipes = QUICK | selected_recipes(request)
    run_ranks("tests.tracer.jobs.undeclared_layout_job", 4, folder, *recipes - {"three_axes"})
    if "three_axes" in recipes:
        run_ranks("tests.tracer.jobs.undeclared_layout_job", 8, folder, "three_axes")
    return folder / "spool"


def derived(folder: Path) -> list[dict[str, Any]]:
    """Return what each rank derived, by rank."""
    folders = sorted(process_folders(folder).items())
    manifests = [json.loads((each / "manifest.json").read_text()) for _, each in folders]
    assert all(rank["layout"] is None and rank["coords"] is None for rank in manifests)
    return [rank["derived"] or {} for rank in manifests]


def coords_in(layout: Layout, rank: int) -> Coords:
    """Return the coordinates of a rank in a mesh of axes (pp, dp, cp, tp)."""
    rest, tp = divmod(rank, layout.tp)
    rest, cp = divmod(rest, layout.cp)
    pp, dp = divmod(rest, layout.dp)
    return Coords(pp=pp, dp=dp, cp=cp, tp=tp)


@pytest.mark.parametrize("recipe", each_recipe(sorted(RECIPES.keys() - NOT_DERIVED), QUICK))
def test_the_derived_layout_is_the_one_that_the_job_could_declare(spool: Path, recipe: str) -> None:
    layout = LAYOUTS.get(recipe, Layout(dp=4))

    for rank, found in enumerate(derived(spool / recipe)):
        assert found["layout"] == layout.to_dict()
        assert found["coords"] == coords_in(layout, rank).to_dict()


@pytest.mark.parametrize("recipe", each_recipe(sorted(NOT_DERIVED), QUICK))
def test_in_doubt_no_layout_is_derived(spool: Path, recipe: str) -> None:
    for found in derived(spool / recipe):
        assert found.keys().isdisjoint({"layout", "coords"})


@pytest.mark.parametrize(
    "recipe",
    each_recipe(
        ["plain_loop", "sharded_over_all", "hybrid_of_other_names", "tensor_parallel_over_all"],
        QUICK,
    ),
)
def test_groups_without_a_name_get_the_kind_of_their_axis_once_it_is_known(
    spool: Path, recipe: str
) -> None:
    kind = "tp-comm" if recipe == "tensor_parallel_over_all" else "dp-comm"
    for folder in process_folders(spool / recipe).values():
        found = [row for row in read_spans(folder) if row.group_id and row.kind != "wait"]
        assert {row.kind for row in found if row.step == 0} == {"other"}
        assert {row.kind for row in found if row.step >= 1} == {kind}
        written = [json.loads(line) for line in (folder / "groups.jsonl").read_text().splitlines()]
        last = {line["group_id"]: line["kind"] for line in written}
        assert last == dict.fromkeys((f"{row.group_id:016x}" for row in found), kind)


def test_a_counted_step_of_a_pipeline_has_all_its_receives_and_forwards(spool: Path) -> None:
    for rank, folder in process_folders(spool / "unreported_pipeline").items():
        rows = read_spans(folder)
        for step in range(1, STEPS):  # in step 0 the stages send their shapes, too
            mine = Counter(row.kind for row in rows if row.step == step)
            assert mine["forward"] == mine["backward"] > 1
            received, sent = mine["pp-recv"], mine["pp-send"]
            assert received == sent == mine["forward"] * (1 if rank in (0, 3) else 2)


@pytest.mark.parametrize("recipe", each_recipe(sorted(RECIPES), QUICK))
def test_the_derivation_never_fails(spool: Path, recipe: str) -> None:
    for folder in process_folders(spool / recipe).values():
        # On a busy machine the next segment may be late; an error of the derivation is another one.
        assert dropped(folder).keys() <= {DropReason.NO_SEGMENT}
        events = folder / "events.jsonl"
        assert not events.exists() or "placement" not in events.read_text()
