"""Slow hosts that are really there: paced processes, and namespaces whose links are limited."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import pytest

from rankscope.doctor.active.trials import group_outcomes
from rankscope.doctor.result import State
from tests.support.paths import ROOT
from tests.support.rankscope.network_hosts import NetworkHosts, may_make_namespaces
from tests.support.rankscope.paced_hosts import PacedHosts

if TYPE_CHECKING:
    from pathlib import Path


def examine_paced(num_hosts: int, slow: set[int]) -> tuple[set[int], set[int]]:
    """Return the hosts that are accused, and those of which at least one of several is slow."""
    world = PacedHosts(num_hosts, slow)
    try:
        found = [*group_outcomes(world)]
    finally:
        world.close()
    of_state = {
        state: {world.hosts.index(host) for host, _, outcome in found if outcome.state is state}
        for state in (State.ERROR, State.WARNING)
    }
    return of_state[State.ERROR], of_state[State.WARNING]


@pytest.mark.multiproc
@pytest.mark.alone
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("slow", "accused", "unclear"),
    [
        (set(), set(), set()),
        ({17}, {17}, set()),
        ({8, 11}, {8, 11}, set()),  # one row
        ({0, 9}, set(), {0, 1, 8, 9}),  # two rows and two columns
    ],
    ids=["none", "one", "two", "two-not-unique"],
)
def test_paced_hosts_of_forty_eight_are_named(
    slow: set[int], accused: set[int], unclear: set[int]
) -> None:
    assert examine_paced(48, slow) == (accused, unclear)


@pytest.mark.multiproc
@pytest.mark.alone
@pytest.mark.nightly
@pytest.mark.skipif(not may_make_namespaces(), reason="this user may make no network namespaces")
def test_a_limited_adapter_and_a_limited_loopback_are_named(tmp_path: Path) -> None:
    hosts = NetworkHosts(4, 2)
    with hosts.up():
        hosts.limit(1, "n1", "40mbit")
        hosts.limit(2, "lo", "200mbit")
        found = run_active(hosts, tmp_path)

    named = {
        (check["check"], check["part"])
        for check in found
        if check["state"] == State.ERROR and check["check"] in {"nic-pairs", "loopback", "groups"}
    }
    # gloo spreads the collectives of groups over both adapters.
    assert named == {("nic-pairs", "h1 n1"), ("groups", "h1"), ("loopback", "h2")}


@pytest.mark.multiproc
@pytest.mark.alone
@pytest.mark.nightly
@pytest.mark.skipif(not may_make_namespaces(), reason="this user may make no network namespaces")
@pytest.mark.parametrize("bad", [set(), {3}, {1, 4}], ids=["none", "one", "two"])
def test_hosts_with_a_limited_network_are_named(bad: set[int], tmp_path: Path) -> None:
    hosts = NetworkHosts(6, 1)
    with hosts.up():
        for number in bad:
            hosts.limit(number, "n0", "50mbit")
        found = run_active(hosts, tmp_path)

    for test in ("groups", "nic-pairs"):
        named = {
            check["part"].partition(" ")[0]
            for check in found
            if check["state"] == State.ERROR and check["check"] == test
        }
        assert named == {f"h{number}" for number in bad}


def run_active(hosts: NetworkHosts, folder: Path) -> list[dict[str, str]]:
    """Run the active tests with one rank on each host, and return the results."""
    shared = {
        **os.environ, "PYTHONPATH": str(ROOT / "src"), "MASTER_ADDR": "10.79.0.1",
        "MASTER_PORT": "29777", "WORLD_SIZE": str(len(hosts.names)), "LOCAL_RANK": "0",
        "OMP_NUM_THREADS": "1", "HOME": str(folder), "GLOO_SOCKET_IFNAME": ",".join(hosts.adapters),
    }  # fmt: skip
    shared.pop("RANKSCOPE_STORE", None)
    processes = [
        hosts.start(
            rank,
            [sys.executable, "-m", "rankscope", "doctor", "--active", "--json",
             "--host-name", f"h{rank}"],
            shared | {"RANK": str(rank)},
        )
        for rank in range(len(hosts.names))
    ]  # fmt: skip
    outputs = [process.communicate(timeout=280) for process in processes]
    checks = json.loads(outputs[0][0])["checks"]
    return [check for check in checks if check["section"] == "active tests"]
