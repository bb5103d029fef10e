"""Which ranks a run should have records of."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tables import EpochInfo, GroupInfo, RunInfo


def is_collapsed(run: RunInfo, epoch: EpochInfo) -> bool:
    """Tell whether exactly one tensor-parallel rank of each worker was traced, and no other."""
    if run.layout.tp == 1 or len(epoch.ranks) * run.layout.tp != run.world_size:
        return False
    workers = {
        (rank.coords.dp, rank.coords.pp, rank.coords.cp, rank.coords.ep) for rank in epoch.ranks
    }
    return len(workers) == len(epoch.ranks)


def num_expected(run: RunInfo) -> int:
    """Return how many ranks each step should have a record of: the job's, or one a worker."""
    newest = run.epochs[-1]
    return len(newest.ranks) if is_collapsed(run, newest) else run.world_size


def groups_as_traced(run: RunInfo) -> list[GroupInfo]:
    """Return the groups of all epochs; where tensor parallelism is collapsed, as far as traced.

    A worker's partners do as it does, so a group without them waits for nobody else.
    """
    groups: list[GroupInfo] = []
    for epoch in run.epochs:
        traced = {rank.rank for rank in epoch.ranks}
        for group in epoch.groups:
            members = group.members
            if is_collapsed(run, epoch):
                members = tuple(rank for rank in members if rank in traced)
            groups.append(replace(group, members=members))
    return groups
