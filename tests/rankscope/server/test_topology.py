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


def written(tmp_path: Path, text: str, name: str = "cluster.toml") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_an_exact_name_comes_before_a_pattern_and_its_rails_before_those_of_all(
    tmp_path: Path,
) -> None:
    topology = read_topology(written(tmp_path, TEXT))

    assert topology.place_of("node-01", 1) == Place(switch="leaf-9", rack="A01", rail="own-1")
    assert topology.place_of("node-01", 2) == Place(switch="leaf-9", rack="A01", rail="rail-2")
    assert topology.place_of("node-02", 1) == Place(switch="leaf-1", rack="A01", rail="rail-1")
    assert topology.place_of("other", 0) == Place(rail="rail-0")
    assert topology.place_of("other", -1) == Place()


def test_json_says_the_same(tmp_path: Path) -> None:
    document = {
        "hosts": {"node-*": {"switch": "leaf-1", "rack": "B", "rails": {"3": "r"}}},
        "rails": [],
    }

    found = read_topology(written(tmp_path, json.dumps(document), "cluster.json"))

    assert found == Topology(
        hosts=(HostPlace(pattern="node-*", switch="leaf-1", rack="B", rails={3: "r"}),)
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hosts = 3", "has 'hosts' that is no table of host names"),
        ("[host.a]", "has 'host', and only 'hosts' and 'rails' are known"),
        ("[hosts]\na = 1", "has hosts.a that is no table"),
        ("[hosts.a]\nswich = 'x'", "has hosts.a.swich, and only switch, rack, rails are known"),
        ("[hosts.a]\nrack = 7", "has hosts.a.rack = 7, which must be a text in quotes"),
        ("[rails]\nfirst = 'x'", "has rails.first, which is no local rank"),
        (f"[rails]\n{'9' * 5_000} = 'x'", f"has rails.{'9' * 40}, which is no local rank"),
        ("rails = 'x'", "has rails that is neither a list nor a table by local rank"),
        ("[hosts", "cannot be parsed"),
    ],
)
def test_what_is_wrong_is_told_in_one_line_with_the_file(
    tmp_path: Path, text: str, message: str
) -> None:
    path = written(tmp_path, text)

    with pytest.raises(BadInputError) as caught:
        read_topology(path)

    assert str(caught.value).startswith(f"--topology {path} {message}")


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"cannot be read .*: check the path"):
        read_topology(tmp_path / "none.toml")


def test_ranks_that_are_stored_and_ranks_that_come_get_their_place(tmp_path: Path) -> None:
    topology = Topology(
        hosts=(HostPlace(pattern=ELSEWHERE, switch="leaf-1", rack="A"),),
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
