from __future__ import annotations

from typing import Any

import pytest

from rankscope.collector.bounds import find_problems, keep_valid

DEEP = "{" + '"a": {' * 40 + "}" * 41

RIGHT: list[tuple[str, dict[str, Any]]] = [
    ("runs", {"epoch": 0, "world_size": 1 << 24, "layout": {"dp": 1 << 20, "tp": 16}}),
    ("runs", {"layout": {"dp": 8, "ep": 1 << 20, "vpp": 4}}),
    ("runs", {"model": '{"name": "gpt"}', "paced": "", "flops_per_token": None}),
    ("ranks", {"rank": (1 << 24) - 1, "dp": -1, "pp": 0, "local_rank": -1, "started_ns": None}),
    ("groups", {"epoch": 0, "members": [3, 1]}),
    ("events", {"epoch": 0, "rank": -1, "kind": "checkpoint", "data": "{}"}),
    ("kernels", {"rank": 0, "step": -1, "num": 1, "total_ns": 0, "flops": None, "num_bytes": 7}),
    ("samples", {"device": -5}),
]

WRONG: list[tuple[str, str, Any]] = [
    ("runs", "epoch", -1),
    ("runs", "world_size", 0),
    ("runs", "world_size", (1 << 24) + 1),
    ("runs", "world_size", True),
    ("runs", "layout", {"pp": -5}),
    ("runs", "layout", {"dp": 200_000_000}),
    ("runs", "layout", {"dp": (1 << 20) + 1}),
    ("runs", "layout", {"dp": 1 << 20, "tp": 1 << 20}),
    ("runs", "layout", {"fsdp": 8}),
    ("runs", "layout", {"dp": "8"}),
    ("runs", "layout", [8]),
    ("runs", "model", "null"),
    ("runs", "model", "[1]"),
    ("runs", "model", "{"),
    ("runs", "model", DEEP),
    ("runs", "paced", "3"),
    ("runs", "manifest", '"text"'),
    ("runs", "flops_per_token", 1e308),
    ("runs", "flops_per_token", -1.0),
    ("runs", "ended_ns", -1),
    ("ranks", "rank", -5),
    ("ranks", "rank", 1 << 24),
    ("ranks", "dp", -2),
    ("ranks", "pp", 1 << 20),
    ("ranks", "peak_flops_per_s", float("inf")),
    ("groups", "members", [-1, -2]),
    ("groups", "members", []),
    ("groups", "members", [1 << 24]),
    ("events", "kind", "alert-silence"),
    ("events", "data", "null"),
    ("kernels", "num", 0),
    ("kernels", "total_ns", 1 << 63),
    ("kernels", "max_ns", None),
    ("kernels", "flops", -1),
    ("kernels", "num_bytes", 0.5),
    ("heartbeats", "rank", -1),
    ("processes", "world_size", -3),
]


@pytest.mark.parametrize(("table", "row"), RIGHT)
def test_descriptions_within_their_bounds_are_kept(table: str, row: dict[str, Any]) -> None:
    assert keep_valid(table, row) == (row, {})


@pytest.mark.parametrize(("table", "column", "value"), WRONG)
def test_a_value_out_of_bounds_is_named(table: str, column: str, value: object) -> None:
    problems = find_problems(table, {column: value})

    assert list(problems) == [column]
    assert len(problems[column]) < 200


def test_a_row_keeps_its_other_values_or_is_left_out() -> None:
    run = {"epoch": 0, "world_size": 0, "layout": {"pp": -5}, "model": "null", "state": "ended"}
    kept, problems = keep_valid("runs", run)
    assert kept == {"epoch": 0, "world_size": 0, "layout": {}, "model": "", "state": "ended"}
    assert problems.keys() == {"world_size", "layout", "model"}

    assert keep_valid("ranks", {"rank": -5, "host": "a"})[0] is None
    assert keep_valid("ranks", {"rank": 5, "dp": -7})[0] == {"rank": 5, "dp": -1}
