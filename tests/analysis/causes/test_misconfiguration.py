from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.causes.misconfiguration import (
    belongs_to_one_process,
    find_misconfigurations,
)
from rankscope.analysis.trace.context import RankManifest, RunContext
from rankscope.analysis.trace.tables import EpochInfo, RankInfo
from rankscope.tracer.topology import Coords, Layout
from tests.support.analysis.exit_builders import run_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankscope.analysis.report.report import Finding

USUAL = {
    "environment.NCCL_ALGO": "Ring",
    "versions.nccl": "2.27.5",
    "config.lr": "0.0003",
    "layout.dp": "8",
}


def manifests(
    changed: Mapping[int, Mapping[str, str | None]], *, num_ranks: int = 8, epoch: int = 0
) -> tuple[RankManifest, ...]:
    """Return the manifests of ranks with usual settings.

    Args:
        changed: By rank, settings that differ; None removes one.
        num_ranks: Number of ranks.
        epoch: Their epoch.
    """
    found = []
    for rank in range(num_ranks):
        merged = {**USUAL, **changed.get(rank, {})}
        settings = {name: value for name, value in merged.items() if value is not None}
        found.append(RankManifest(epoch=epoch, rank=rank, settings=settings))
    return tuple(found)


def findings(
    changed: Mapping[int, Mapping[str, str | None]], *, num_ranks: int = 8
) -> tuple[Finding, ...]:
    context = RunContext(manifests=manifests(changed, num_ranks=num_ranks))
    return find_misconfigurations(run_of(num_ranks), context)


def test_ranks_that_agree_are_no_finding() -> None:
    assert findings({}) == ()
    assert find_misconfigurations(run_of(), RunContext()) == ()


def test_the_minority_is_named_with_both_values() -> None:
    (finding,) = findings({5: {"environment.NCCL_ALGO": "Tree"}})

    assert (finding.cause, finding.ranks, finding.steps) == ("misconfiguration", (5,), None)
    assert finding.confidence == pytest.approx(7 / 8)
    assert finding.evidence == (
        "rank 5 of 8 is configured differently from the others: environment.NCCL_ALGO is"
        ' "Tree" here and "Ring" on most others'
    )


def test_a_setting_that_is_unset_on_one_rank_or_on_all_others_is_a_difference() -> None:
    (without,) = findings({5: {"versions.nccl": None}})
    (one_more,) = findings({5: {"environment.NCCL_IB_DISABLE": "1"}})

    assert 'versions.nccl is unset here and "2.27.5" on most others' in without.evidence
    assert 'NCCL_IB_DISABLE is "1" here and unset on most others' in one_more.evidence


def test_each_set_of_ranks_is_one_finding_with_a_list_of_bounded_length() -> None:
    many: dict[str, str | None] = {f"environment.NCCL_{name}": "x" * 90 for name in "ABCDE"}
    one, two = findings({2: many, 5: {"config.lr": "1"}, 6: {"config.lr": "1"}})

    assert (one.ranks, two.ranks) == ((2,), (5, 6))
    assert one.evidence.count("NCCL_") == 3
    assert one.evidence.endswith(", 2 more settings")
    assert len(one.evidence) < 500


def test_without_a_majority_all_ranks_are_named() -> None:
    (finding,) = findings({rank: {"versions.nccl": "2.26.2"} for rank in (0, 1, 5, 6)})

    assert finding.ranks == tuple(range(8))
    assert finding.confidence == pytest.approx(0.5)
    assert finding.evidence.endswith("; no value has a majority, so all are named")


@pytest.mark.parametrize(
    ("differing", "name", "num_ranks", "named"),
    [
        ((1,), "versions.nccl", 2, (0, 1)),
        ((8, 9, 10, 11), "versions.nccl", 12, (8, 9, 10, 11)),
        # Ranks that hold the same part of the model have the same size.
        ((5,), "model.num_parameters", 8, (5,)),
    ],
)
def test_the_ranks_that_differ_are_named(
    differing: tuple[int, ...], name: str, num_ranks: int, named: tuple[int, ...]
) -> None:
    (finding,) = findings({rank: {name: "2.26.2"} for rank in differing}, num_ranks=num_ranks)

    assert finding.ranks == named


@pytest.mark.parametrize(
    "name",
    [
        "environment.CUDA_VISIBLE_DEVICES",
        "config.local_rank",
        "config.data.seed",
        "seeds.model",
        "host",
        "device.uuid",
        "environment.NCCL_DEBUG_FILE",
        "environment.NCCL_HOSTID",
        "environment.TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    ],
)
def test_settings_of_one_process_are_not_compared(name: str) -> None:
    assert belongs_to_one_process(name)
    assert findings({rank: {name: str(rank // 3)} for rank in range(8)}) == ()


def test_settings_of_each_rank_or_each_local_rank_are_not_compared() -> None:
    of_the_rank = {rank: {"environment.NCCL_HOSTID": str(rank)} for rank in range(8)}
    of_the_nic = {rank: {"environment.NCCL_IB_HCA": f"mlx5_{rank % 4}"} for rank in range(8)}

    assert findings(of_the_rank) == ()
    assert findings(of_the_nic) == ()
    wrong_nic = {**of_the_nic, 5: {"environment.NCCL_IB_HCA": "mlx5_3"}}
    assert findings(wrong_nic) != ()


def of_pipeline(*num_parameters: int, dp: int) -> tuple[Finding, ...]:
    """Return the findings if the stages of a pipeline have these sizes."""
    num = len(num_parameters) * dp
    ranks = tuple(
        RankInfo(rank=rank, coords=Coords(pp=rank // dp, dp=rank % dp), host="h", local_rank=rank)
        for rank in range(num)
    )
    run = replace(
        run_of(num),
        layout=Layout(pp=len(num_parameters), dp=dp),
        epochs=(EpochInfo(epoch=0, ranks=ranks),),
    )
    sizes = {rank: {"model.num_parameters": str(num_parameters[rank // dp])} for rank in range(num)}
    return find_misconfigurations(run, RunContext(manifests=manifests(sizes, num_ranks=num)))


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("stages", [(49_344, 49_280), (90, 60, 60, 70), (90, 60, 60, 90)])
def test_stages_hold_parts_of_the_model_of_their_own_size(stages: tuple[int, ...], dp: int) -> None:
    assert of_pipeline(*stages, dp=dp) == ()


def test_sizes_of_models_are_not_compared_without_a_layout() -> None:
    sizes = {rank: {"model.num_parameters": str(60 + rank // 4)} for rank in range(8)}
    run = replace(run_of(), layout=Layout())

    assert find_misconfigurations(run, RunContext(manifests=manifests(sizes))) == ()
    assert find_misconfigurations(run_of(), RunContext(manifests=manifests(sizes))) != ()


def test_a_change_since_the_previous_run_has_low_confidence() -> None:
    before = manifests({rank: {"environment.NCCL_ALGO": "Tree"} for rank in range(8)})
    context = RunContext(manifests=manifests({}), previous_manifests=before)

    (finding,) = find_misconfigurations(run_of(), context)

    assert finding.confidence == pytest.approx(0.3)
    assert finding.ranks == tuple(range(8))
    assert finding.evidence == (
        "1 setting changed since the previous run of this model and world size, on most of"
        ' 8 ranks: environment.NCCL_ALGO is "Ring" now and "Tree" before'
    )


def test_layout_and_configuration_may_change_from_run_to_run() -> None:
    other: dict[str, str | None] = {"config.lr": "1", "layout.dp": "4", "config.steps": "9"}
    before = manifests(dict.fromkeys(range(8), other))
    context = RunContext(manifests=manifests({}), previous_manifests=before)

    assert find_misconfigurations(run_of(), context) == ()


@given(relabelled=st.permutations(range(8)), bad=st.integers(0, 7))
def test_relabelling_ranks_changes_nothing_but_the_labels(relabelled: list[int], bad: int) -> None:
    original = manifests({bad: {"versions.nccl": "2.26.2"}})
    moved = tuple(
        RankManifest(epoch=0, rank=relabelled[one.rank], settings=one.settings) for one in original
    )

    (finding,) = find_misconfigurations(run_of(), RunContext(manifests=moved))

    assert finding.ranks == (relabelled[bad],)
