from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.store import open_store
from rankscope.collector.store.writer import StoreWriter
from rankscope.errors import BadInputError
from rankscope.server.topology import (
    HostPlace,
    Place,
    PlacedSink,
    Topology,
    place_ranks,
    read_topology,
)
from rankscope.sources.store_source import StoreSource
from tests.support.collector.spool_builder import ELSEWHERE, SpoolBuilder

if TYPE_CHECKING:
    from pathlib import Path

TEXT = """
[hosts.node-01]
switch = "leaf-9"
rack = "A01"
rails = ["own-0", "own-1"]

[hosts."node-0*"]
switch = "leaf-1"
rack = "A01"

[rails]
0 = "rail-0"
1 = "rail-1"
2 = "rail-2"
"""


def write_file(tmp_path: Path, text: str, name: str = "cluster.toml") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_exact_names_are_preferred_to_patterns_and_rails_of_a_host_to_those_of_all(
    tmp_path: Path,
) -> None:
    topology = read_topology(write_file(tmp_path, TEXT))

    assert topology.find_place("node-01", 1) == Place(switch="leaf-9", rack="A01", rail="own-1")
    assert topology.find_place("node-01", 2) == Place(switch="leaf-9", rack="A01", rail="rail-2")
    assert topology.find_place("node-02", 1) == Place(switch="leaf-1", rack="A01", rail="rail-1")
    assert topology.find_place("other", 0) == Place(rail="rail-0")
    assert topology.find_place("other", -1) == Place()


def test_a_json_file_has_the_same_keys(tmp_path: Path) -> None:
    document = {
        "hosts": {"node-*": {"switch": "leaf-1", "rack": "B", "rails": {"3": "r"}}},
        "rails": [],
    }

    found = read_topology(write_file(tmp_path, json.dumps(document), "cluster.json"))

    assert found == Topology(hosts={"node-*": HostPlace(switch="leaf-1", rack="B", rails={3: "r"})})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hosts = 3", ": hosts: Input should be a valid dictionary"),
        ("[host.a]", ": host: unknown key; expected hosts, rails"),
        ("[hosts]\na = 1", ": hosts.a: Input should be a dictionary"),
        ("[hosts.a]\nswich = 'x'", ": hosts.a.swich: unknown key; expected switch, rack, rails"),
        ("[hosts.a]\nrack = 7", ": hosts.a.rack: Input should be a valid string"),
        ("[rails]\nfirst = 'x'", ": rails.first: Input should be a valid integer"),
        ("[rails]\n-1 = 'x'", ": rails.-1: Input should be greater than or equal to 0"),
        (f"[rails]\n{'9' * 5_000} = 'x'", f": rails.{'9' * 40}: Unable to parse input"),
        ("rails = 'x'", ": rails: Input should be a valid dictionary"),
        ("[hosts", " cannot be parsed"),
    ],
)
def test_an_invalid_file_is_refused_with_its_name_and_the_key(
    tmp_path: Path, text: str, message: str
) -> None:
    path = write_file(tmp_path, text)

    with pytest.raises(BadInputError) as caught:
        read_topology(path)

    assert str(caught.value).startswith(f"--topology {path}{message}")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"cannot be read .*: check the path"):
        read_topology(tmp_path / "none.toml")


@pytest.mark.slow
def test_stored_ranks_and_new_ranks_get_their_topology(tmp_path: Path) -> None:
    topology = Topology(
        hosts={ELSEWHERE: HostPlace(switch="leaf-1", rack="A")},
        rails={0: "rail-0", 1: "rail-1"},
    )
    spool = tmp_path / "spool"
    spool.mkdir()
    with open_store(f"chdb://{tmp_path / 'store'}") as store:
        SpoolBuilder(spool, run_id="before", rank=0).end()
        SpoolTail(spool, StoreWriter(store)).poll()
        assert place_ranks(store, topology) == 1
        assert place_ranks(store, topology) == 0

        for rank in (0, 1):
            SpoolBuilder(spool, run_id="after", rank=rank).end()
        SpoolTail(spool, PlacedSink(StoreWriter(store), topology)).poll()

        source = StoreSource(store)
        (before,) = source.run_info("before").epochs[0].ranks
        after = source.run_info("after").epochs[0].ranks
    assert (before.switch, before.rack, before.rail) == ("leaf-1", "A", "rail-0")
    assert [(rank.local_rank, rank.switch, rank.rail) for rank in after] == [
        (0, "leaf-1", "rail-0"),
        (1, "leaf-1", "rail-1"),
    ]
