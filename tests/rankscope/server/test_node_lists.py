"""Node lists without excluded hosts."""

from __future__ import annotations

import pytest

from rankscope.collector.read.hosts import is_same_host
from rankscope.server.node_lists import (
    filter_hostfile,
    slurm_drain,
    slurm_exclude,
    slurm_resume,
)


@pytest.mark.parametrize(
    ("line", "host"),
    [
        ("node1 slots=8", "node1"),  # Open MPI, DeepSpeed
        ("node1:8", "node1"),  # MPICH, Horovod
        ("node1", "node1"),
        ("  me@node1.cluster.local  max_slots=2", "node1.cluster.local"),
    ],
)
def test_the_host_of_a_line_is_found_in_each_form(line: str, host: str) -> None:
    assert filter_hostfile([line], excluded=()).hosts == (host,)
    assert filter_hostfile([line, "other"], excluded=["node1"]).removed == (host,)


def test_excluded_hosts_are_left_out_and_comments_stay() -> None:
    lines = ["# rack 3", "node1 slots=8", "", "node2 slots=8  # slow", "node3 slots=8"]

    nodes = filter_hostfile(lines, excluded=["node2.cluster.local", "node9"])

    assert nodes.lines == ("# rack 3", "node1 slots=8", "", "node3 slots=8")
    assert (nodes.hosts, nodes.removed, nodes.added) == (("node1", "node3"), ("node2",), ())


def test_a_spare_host_takes_the_slots_of_the_removed_one() -> None:
    lines = ["node1 slots=8", "me@node2 slots=4", "node3 slots=8"]

    nodes = filter_hostfile(
        lines, excluded=["node2", "spare1"], spares=["node1", "spare1", "spare2", "spare3"]
    )

    assert nodes.lines == ("node1 slots=8", "node3 slots=8", "me@spare2 slots=4")
    assert nodes.added == ("spare2",)
    assert nodes.hosts == ("node1", "node3", "spare2")


def test_a_host_with_several_lines_is_one_host() -> None:
    nodes = filter_hostfile(["node1", "node1", "node2", "node2"], excluded=["node2"])

    assert (nodes.hosts, nodes.removed) == (("node1",), ("node2",))


@pytest.mark.parametrize(
    ("other", "same"),
    [("node1", ["node1", "node1.a"]), ("node1.a", ["node1", "node1.a"]), ("node2", [])],
)
def test_a_name_may_lack_its_domain(other: str, same: list[str]) -> None:
    names = ["node1", "node1.a", "node10"]
    assert [name for name in names if is_same_host(name, other)] == same


def test_slurm_gets_names_without_domain_and_a_quoted_reason() -> None:
    assert slurm_exclude(["node1.a", "node2", "node1"]) == "--exclude=node1,node2"
    assert slurm_exclude([]) == ""
    assert slurm_drain("node1.a", "it's slow") == (
        "scontrol update nodename=node1 state=drain reason='rankscope: it'\"'\"'s slow'"
    )
    assert slurm_resume("node1") == "scontrol update nodename=node1 state=resume"
