"""Snapshots of NCCL's RAS, built after the format of NCCL 2.30: what they prove."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.collector.errors import TraceError
from rankscope.collector.importers.flight_recorder import to_events
from rankscope.collector.importers.nccl_ras import read_snapshots
from rankscope.collector.store.store import open_store
from rankscope.commands.import_trace import import_files
from rankscope.sources.store_source import StoreSource

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rankscope.analysis.report.report import Finding
    from rankscope.analysis.trace.tables import RunInfo

SECOND = 1_000_000_000
ENTERED = {"AllReduce": 41}
BEHIND = {"AllReduce": 40}


def place(rank: int, of: int) -> dict[str, Any]:
    host = f"10.0.0.{of // 2}"
    devices = {"cuda_dev": of % 2, "nvml_dev": of % 2}
    return {"rank": rank, "host": host, "pid": 4000 + of, **devices}


def communicator(name: str, counts: Mapping[int, Mapping[str, int] | None]) -> dict[str, Any]:
    """Return a communicator of global ranks with their counts; None: it does not answer."""
    zero = dict.fromkeys(("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce"), 0)
    answered, missing = [], []
    for rank, (of, launched) in enumerate(counts.items()):
        if launched is None:
            status = {"unresponsive": True, "considered_dead": False}
            missing.append(place(rank, of) | {"status": status})
            continue
        state: dict[str, Any] = {
            "init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False,
            "abort_flag": False,
        }  # fmt: skip
        answered.append(
            place(rank, of) | {"status": state, "collective_counts": {**zero, **launched}}
        )
    return {
        "hash": name, "secondary_hash": "0x1:0x2", "size": len(counts),
        "ranks_count": len(answered), "missing_ranks_count": len(missing),
        "ranks": answered, "missing_ranks": missing,
    }  # fmt: skip


def write(path: Path, second: int, *communicators: dict[str, Any]) -> Path:
    document = {
        "nccl_version": "2.30.7", "cuda_runtime_version": 13000, "cuda_driver_version": 13000,
        "timestamp": f"2026-06-04 15:28:{second:02d}",
        "communicators_count": len(communicators), "communicators": [*communicators],
        "ras": {"collection_time_sec": 0.012, "timeouts_count": 0},
    }  # fmt: skip
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def diagnose(tmp_path: Path, files: Sequence[Path]) -> tuple[Finding, RunInfo]:
    url = f"chdb://{tmp_path / 'store'}"
    import_files(files, file_format="nccl-ras", run_id="run", store_url=url)
    with open_store(url) as store:
        source = StoreSource(store)
        return analyze_run(source, "run").top_finding, source.run_info("run")


def test_the_rank_that_launched_fewer_collectives_than_the_others_is_named(tmp_path: Path) -> None:
    # GIVEN two snapshots within ten seconds, in which rank 2 is one behind
    world = communicator("0xaa", {0: ENTERED, 1: ENTERED, 2: BEHIND, 3: ENTERED})
    files = [write(tmp_path / f"{at}.json", at, world) for at in (5, 15)]

    # WHEN they are imported
    top, run = diagnose(tmp_path, files)

    # THEN it is the one that the others wait for, in the operation that they have launched
    assert (top.cause, top.ranks) == ("hang", (2,))
    assert run.ranks[2].host == "10.0.0.1"
    assert "all_reduce 41" in top.evidence


def test_one_snapshot_or_counts_that_grow_do_not_show_a_hang(tmp_path: Path) -> None:
    early = communicator("0xaa", {0: {"AllReduce": 30}, 1: {"AllReduce": 29}})
    late = communicator("0xaa", {0: ENTERED, 1: BEHIND})
    files = [write(tmp_path / "1.json", 5, early), write(tmp_path / "2.json", 15, late)]

    top, _ = diagnose(tmp_path, files)

    assert top.cause == "insufficient-evidence"
    assert "snapshots of NCCL's RAS" in top.evidence
    assert read_snapshots(files[:1]).silent_ns == 0


def test_equal_counts_say_nothing(tmp_path: Path) -> None:
    world = communicator("0xaa", dict.fromkeys(range(4), ENTERED))
    files = [write(tmp_path / f"{at}.json", at, world) for at in (5, 15)]

    events = to_events(read_snapshots(files))

    assert all(event["data"]["open"] == [] for event in events.values())
    assert {event["data"]["silent_ns"] for event in events.values()} == {10 * SECOND}


def test_ranks_of_another_communicator_are_found_by_their_processes(tmp_path: Path) -> None:
    # GIVEN a communicator of ranks 3 and 1, in this order, beside that of all
    world = communicator("0xaa", dict.fromkeys(range(4), ENTERED))
    pair = communicator("0xbb", {3: {"AllGather": 7}, 1: {"AllGather": 6}})
    files = [write(tmp_path / f"{at}.json", at, world, pair) for at in (5, 15)]

    recorded = read_snapshots(files)

    assert {group.members for group in recorded.groups.values()} == {(0, 1, 2, 3), (3, 1)}
    opened = {rank: event["data"]["open"] for rank, event in to_events(recorded).items()}
    assert [
        (rank, [call["name"] for call in calls]) for rank, calls in opened.items() if calls
    ] == [(3, ["all_gather"])]


def test_a_process_that_does_not_answer_is_the_silent_one(tmp_path: Path) -> None:
    world = communicator("0xaa", {0: ENTERED, 1: ENTERED, 2: None, 3: ENTERED})
    files = [write(tmp_path / f"{at}.json", at, world) for at in (5, 15)]

    recorded = read_snapshots(files)

    assert recorded.missing == (2,)
    assert not to_events(recorded)[2]["data"]["has_dump"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"timestamp": "now"}, "is no output of"),
        ({"communicators": [{"hash": "0x1", "size": 1}]}, "is no output of"),
        ({"communicators": []}, "no communicator of all 0 processes"),
        (
            {"communicators": [communicator("0x1", {0: ENTERED}) | {"size": 9}]},
            "ranks that lists 1",
        ),
        ({"communicators": [communicator("0x1", {0: ENTERED}) | {"size": 1.0}]}, "is no output of"),
    ],
)
def test_a_file_that_is_no_snapshot_is_refused_with_the_reason(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    path = write(tmp_path / "ras.json", 5, communicator("0xaa", {0: ENTERED, 1: BEHIND}))
    path.write_text(json.dumps(json.loads(path.read_text()) | change), encoding="utf-8")

    with pytest.raises(TraceError, match=reason):
        read_snapshots([path])


def test_communicators_that_share_no_world_are_refused(tmp_path: Path) -> None:
    halves = [
        communicator(f"0x{half}", dict.fromkeys((half, half + 1), ENTERED)) for half in (0, 2)
    ]

    with pytest.raises(TraceError, match="no communicator of all 4 processes"):
        read_snapshots([write(tmp_path / "ras.json", 5, *halves)])
