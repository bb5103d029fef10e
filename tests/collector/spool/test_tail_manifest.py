from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rankscope.collector.read.findings import read_places
from rankscope.collector.read.runs import read_run
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.writer import StoreWriter
from rankscope.sources.store_source import StoreSource
from rankscope.tracer.topology import Coords, Layout
from tests.support.collector.spool_builder import SpoolBuilder

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.collector.store.store import Store

pytestmark = pytest.mark.slow


def test_the_manifest_becomes_the_run(store: Store, run_id: str, tmp_path: Path) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id, rank=1)
    spool.span()
    spool.group(0xABCD, kind="dp-comm", name="dp", members=[1, 0])
    spool.end()

    SpoolTail(tmp_path, StoreWriter(store)).poll()

    info = StoreSource(store).run_info(run_id)
    assert (info.source_format, info.world_size, info.layout.dp) == ("rankscope", 2, 2)
    assert (info.model, info.flops_per_token, info.flops_convention) == ("tiny", 6e3, "6 N")
    (rank,) = info.epochs[0].ranks
    assert (rank.rank, rank.coords.dp, rank.device_name, rank.dtype) == (1, 1, "cpu", "float32")
    assert rank.peak_flops_per_s == 5e9
    (group,) = info.epochs[0].groups
    assert (group.group_id, group.kind, group.members) == (0xABCD, "dp-comm", (0, 1))


def test_a_rank_without_coordinates_in_a_known_layout_has_an_unknown_position(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    layout = {"dp": 2, "tp": 1, "pp": 2, "cp": 1, "ep": 1, "dsp": 1, "vpp": 1}
    for rank, coords in enumerate(({"dp": 0, "pp": 1}, None)):
        spool = SpoolBuilder(
            tmp_path, run_id=run_id, rank=rank, manifest={"layout": layout, "coords": coords}
        )
        spool.span()
        spool.end()

    SpoolTail(tmp_path, StoreWriter(store)).poll()

    rows = read_run(store, run_id).ranks
    places = [[row[axis] for axis in ("dp", "pp", "tp", "cp", "ep")] for row in rows]
    assert places == [[0, 1, 0, 0, 0], [-1, -1, 0, 0, 0]]
    info = StoreSource(store).run_info(run_id)
    assert (info.layout, info.world_size) == (Layout(), 2)
    assert [rank.coords for rank in info.epochs[0].ranks] == [Coords(), Coords(dp=1)]
    (warning,) = info.warnings
    assert "declared no coordinates of its ranks" in warning
    assert [place.rank for place in read_places(store, run_id, 0)] == [0]


def test_the_pace_of_a_run_is_that_of_its_worst_rank(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    for rank, num_overruns in enumerate((1, 8)):
        spool = SpoolBuilder(tmp_path, run_id=run_id, rank=rank)
        spool.write_json("manifest.json", {"paced": {"pace_ms": 10}})
        for at_ns, num_segments in ((5, 50), (9, 100)):
            data = {"num_segments": num_segments, "num_overruns": num_overruns, "pace_ms": 10}
            spool.event("pace", "", at_ns=at_ns, data=data)
        spool.end()

    SpoolTail(tmp_path, StoreWriter(store)).poll()

    info = StoreSource(store).run_info(run_id)
    assert info.paced
    assert info.pace_overrun_ratio == pytest.approx(8 / 100)


def test_values_derived_later_fill_in_what_the_job_did_not_declare(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    manifest: dict[str, Any] = {"model": {"name": "tiny"}, "device": {"name": "", "dtype": "fp32"}}
    spool = SpoolBuilder(tmp_path, run_id=run_id, manifest=manifest)
    tail = SpoolTail(tmp_path, StoreWriter(store))
    tail.poll()
    before = StoreSource(store).run_info(run_id)
    derived = {"flops_per_token": 7.0, "flops_convention": "6 N", "device_name": "H", "dtype": "b"}
    spool.write_json("manifest.json", {**manifest, "derived": derived})
    tail.poll()
    after = StoreSource(store).run_info(run_id)

    assert (before.flops_per_token, before.epochs[0].ranks[0].device_name) == (None, "")
    assert (after.flops_per_token, after.flops_convention) == (7.0, "6 N")
    (rank,) = after.epochs[0].ranks
    assert (rank.device_name, rank.dtype) == ("H", "fp32")


UNDECLARED: dict[str, Any] = {"layout": None, "coords": None}
DERIVED = {"layout": {"dp": 2, "tp": 2}, "coords": {"dp": 1, "tp": 0}}


def derived_manifest(rank: int) -> dict[str, Any]:
    """Return the manifest of a rank of 2 x 2 with a derived layout."""
    coords = {"dp": rank // 2, "tp": rank % 2, "pp": 0, "cp": 0, "ep": 0}
    return {**UNDECLARED, "derived": {"layout": {"dp": 2, "tp": 2}, "coords": coords}}


def undeclared_ranks(spool: Path, run_id: str, *, epoch: int = 0) -> list[SpoolBuilder]:
    return [
        SpoolBuilder(
            spool, run_id=run_id, rank=rank, world_size=4, epoch=epoch, manifest=dict(UNDECLARED)
        )
        for rank in range(4)
    ]


def test_a_derived_layout_counts_once_all_ranks_have_it(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    ranks, tail = undeclared_ranks(tmp_path, run_id), SpoolTail(tmp_path, StoreWriter(store))
    for number, rank in enumerate(ranks):
        tail.poll()
        info = StoreSource(store).run_info(run_id)
        assert (info.layout, info.has_layout) == (Layout(), False)
        assert [known.coords for known in info.epochs[0].ranks] == [
            Coords(dp=at) for at in range(4)
        ]
        assert layout_warnings(info.warnings) == [
            "no parallel layout" if number == 0 else "no coordinates"
        ]
        rank.write_json("manifest.json", derived_manifest(number))
    tail.poll()

    info = StoreSource(store).run_info(run_id)
    assert (info.layout, info.has_layout, info.warnings) == (Layout(dp=2, tp=2), True, ())
    assert [known.coords for known in info.epochs[0].ranks] == [
        Coords(dp=dp, tp=tp) for dp in range(2) for tp in range(2)
    ]


def layout_warnings(warnings: tuple[str, ...]) -> list[str]:
    return [
        words
        for warning in warnings
        for words in ("no parallel layout", "no coordinates")
        if words in warning
    ]


def test_declared_values_take_precedence_over_derived_ones(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    manifest = {"layout": {"dp": 4}, "coords": {"dp": 3}, "derived": DERIVED}
    SpoolBuilder(tmp_path, run_id=run_id, rank=3, world_size=4, manifest=manifest)

    SpoolTail(tmp_path, StoreWriter(store)).poll()

    info = StoreSource(store).run_info(run_id)
    assert (info.layout, info.epochs[0].ranks[0].coords) == (Layout(dp=4), Coords(dp=3))


def test_an_epoch_without_a_derived_layout_takes_that_of_the_next(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    undeclared_ranks(tmp_path, run_id)
    for number, rank in enumerate(undeclared_ranks(tmp_path, run_id, epoch=1)):
        rank.write_json("manifest.json", derived_manifest(number))
    SpoolTail(tmp_path, StoreWriter(store)).poll()

    info = StoreSource(store).run_info(run_id)

    assert info.layout == Layout(dp=2, tp=2)
    first, second = ([known.coords for known in epoch.ranks] for epoch in info.epochs)
    assert first == second == [Coords(dp=dp, tp=tp) for dp in range(2) for tp in range(2)]


def test_an_epoch_of_another_size_does_not(store: Store, run_id: str, tmp_path: Path) -> None:
    SpoolBuilder(tmp_path, run_id=run_id, rank=0, world_size=6, manifest=dict(UNDECLARED))
    for number, rank in enumerate(undeclared_ranks(tmp_path, run_id, epoch=1)):
        rank.write_json("manifest.json", derived_manifest(number))
    SpoolTail(tmp_path, StoreWriter(store)).poll()

    assert not StoreSource(store).run_info(run_id).has_layout


DEEP = b'{"model": ' + b"[" * 101 + b"]" * 101 + b"}"
"""JSON that can be parsed and is nested too deeply to be serialized everywhere."""
TOO_LONG = b'{"config": "' + b"x" * (1 << 20) + b'"}'


@pytest.mark.parametrize("content", [b"not json", b"[1, 2]", b"{" * 100_000, DEEP, TOO_LONG])
def test_a_broken_manifest_is_reported_and_left_unchanged(
    store: Store, run_id: str, tmp_path: Path, content: bytes
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id)
    spool.span()
    (spool.folder / "manifest.json").write_bytes(content)

    (problem,) = SpoolTail(tmp_path, StoreWriter(store)).poll().problems

    assert "manifest.json" in problem


def test_a_manifest_with_wrong_types_is_unknown_and_no_error(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    wrong = {"layout": 5, "model": "big", "device": [], "coords": {"dp": "x"}, "paced": 1}
    spool = SpoolBuilder(tmp_path, run_id=run_id, manifest=wrong)
    spool.span()
    spool.end()

    SpoolTail(tmp_path, StoreWriter(store)).poll()

    info = StoreSource(store).run_info(run_id)
    assert (info.model, info.flops_per_token, info.paced) == ("", None, False)
    invalid, warning = info.warnings
    assert "layout: 5 is not an object; model is not an object; paced is not an object" in invalid
    assert warning.startswith("the job declared no parallel layout: each rank is treated as")


def test_numbers_that_fit_no_column_do_not_stop_the_tail(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    huge = {"local_rank": 2**40, "layout": {"dp": 2**40}, "started_ns": 2**70, "pid": -(2**80)}
    rates = {"model": {"flops_per_token": 10**400}, "device": {"peak_flops_per_s": 10**400}}
    spool = SpoolBuilder(tmp_path, run_id=run_id, manifest=huge | rates)
    spool.group(2**64 - 1, kind="dp-comm", name="g", members=[2**40])
    spool.event("note", "x", at_ns=2**70, data={})
    spool.span()
    spool.end()
    absurd = SpoolBuilder(tmp_path, run_id=run_id, rank=2**31)

    progress = SpoolTail(tmp_path, StoreWriter(store)).poll()

    assert (progress.num_spans, len(progress.problems)) == (1, 2)
    assert str(absurd.folder) in progress.problems[0]
    info = StoreSource(store).run_info(run_id)
    assert info.epochs[0].groups == ()
    assert info.flops_per_token is None
    assert info.epochs[0].ranks[0].peak_flops_per_s is None


@pytest.mark.parametrize(
    "line",
    [
        '{"group_id": 5, "members": [0]}',
        '{"group_id": "5", "members": "01"}',
        '{"group_id": "5", "members": {"0": 1}}',
        '{"group_id": "5", "members": [1e999]}',
        '{"group_id": "5", "members": [0.5]}',
        '{"group_id": "5", "members": [true]}',
        '{"group_id": "5", "members": [-1]}',
        '{"group_id": "-5", "members": [0]}',
        '{"group_id": "0x5", "members": [0]}',
        '{"group_id": "11112222333344445", "members": [0]}',
        '{"members": [0]}',
    ],
)
def test_a_line_that_is_no_group_is_skipped_and_its_neighbours_are_read(
    store: Store, run_id: str, tmp_path: Path, line: str
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id)
    spool.group(1, kind="dp-comm", name="before", members=[0, 1])
    spool.append_line("groups.jsonl", line)
    spool.group(2, kind="dp-comm", name="after", members=[1, 0])
    spool.span()
    spool.end()

    progress = SpoolTail(tmp_path, StoreWriter(store)).poll()

    assert progress.num_spans == 1
    groups = StoreSource(store).run_info(run_id).epochs[0].groups
    assert [(group.group_id, group.members) for group in groups] == [(1, (0, 1)), (2, (0, 1))]


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        ({"layout": {"pp": -5}}, "pp is -5"),
        ({"layout": {"dp": 200_000_000}}, "dp is 200000000"),
        ({"layout": {"dp": 1 << 20, "tp": 1 << 20}}, "the product of the axes"),
        ({"layout": {"dp": 2}, "coords": {"dp": 2}}, "coords: dp"),
        ({"model": None, "paced": [1]}, "paced is not an object"),
    ],
)
def test_a_description_out_of_bounds_is_left_out_and_reported(
    store: Store, run_id: str, tmp_path: Path, manifest: dict[str, Any], reason: str
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id, rank=1, manifest=manifest)
    spool.span()
    spool.group(0xAB, kind="dp-comm", name="dp", members=[0, 7])
    spool.group(0xAC, kind="dp-comm", name="dp", members=[0, 1])
    spool.event("alert-silence", "forged", at_ns=1, data={"name": "x", "until_ns": 2, "at_ns": 1})
    spool.end()

    tail = SpoolTail(tmp_path, StoreWriter(store))
    problems = [*tail.poll().problems, *tail.poll().problems]

    (problem,) = [text for text in problems if reason in text]
    assert problem.startswith(str(spool.folder))
    info = StoreSource(store).run_info(run_id)
    assert any(reason in text and "left out" in text for text in info.warnings)
    assert info.layout == Layout()
    assert [group.members for group in info.epochs[0].groups] == [(0, 1)]
    assert store.rows("SELECT count() AS n FROM events WHERE kind LIKE 'alert%'") == [{"n": 0}]


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1 << 25), (1 << 24, 1 << 24)])
def test_a_process_out_of_bounds_is_left_unread(
    store: Store, run_id: str, tmp_path: Path, rank: int, world_size: int
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id, rank=rank, world_size=world_size)
    spool.span()
    spool.end()

    progress = SpoolTail(tmp_path, StoreWriter(store)).poll()

    assert (progress.num_spans, progress.num_unreadable) == (0, 1)
    assert "is left unchanged" in progress.problems[0]
    assert spool.folder.exists()
