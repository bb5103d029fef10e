"""Dumps of flight recorders: what is read from one, and what a job's dumps say together."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.causes.hang import find_hangs
from rankscope.analysis.trace.context import RunContext
from rankscope.analysis.trace.tables import GroupInfo
from rankscope.collector.errors import TraceError
from rankscope.collector.importers.flight_recorder import (
    Recorded,
    read_dumps,
    to_events,
    to_processes,
)
from rankscope.collector.importers.flight_recorder_dump import find_rank, read_dump
from rankscope.collector.store.store import open_store
from rankscope.commands.import_trace import import_files
from rankscope.errors import BadInputError
from rankscope.sources.store_source import StoreSource
from rankscope.tracer.span import FLIGHT_RECORDER
from tests.support.analysis.exit_builders import NO_STEPS, event, run_of
from tests.support.collector.flight_builder import BASE_NS, SECOND, WHOLE_JOB, DumpBuilder
from tests.support.dashboard.builders import span_table
from tests.support.paths import ROOT
from tests.support.trainer.job import trainer_environment

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from rankscope.analysis.report.report import Finding, RunReport

NUM = 4
DOUBTED: Any = pytest.approx(0.95 * 0.8)


def dumps(*, last: Sequence[int] = (41, 41, 41, 41)) -> list[DumpBuilder]:
    """Return the dumps of ranks that ended all collectives up to 40 and called up to ``last``."""
    builders = [DumpBuilder(rank, NUM) for rank in range(NUM)]
    for builder, own in zip(builders, last, strict=True):
        builder.call("all_reduce", 39, state="completed")
        builder.call("all_reduce", 40, state="completed")
        for seq in range(41, own + 1):
            builder.call("all_reduce", seq)
    return builders


def recorded(folder: Path, builders: Iterable[DumpBuilder]) -> Recorded:
    return read_dumps([builder.write(folder) for builder in builders])


def hang(read: Recorded) -> Finding:
    """Return what the analysis says of dumps alone."""
    groups = (
        GroupInfo(
            group_id=group.group_id, kind=str(group.kind), name=group.name,
            members=tuple(sorted(group.members)),
        )
        for group in read.groups.values()
    )  # fmt: skip
    events = to_events(read)
    run = run_of(read.world_size, groups=groups)
    epoch = run.epochs[0]
    ranks = tuple(info for info in epoch.ranks if info.rank in events)
    records = tuple(
        replace(event(rank, FLIGHT_RECORDER, **one["data"]), at_ns=one["at_ns"])
        for rank, one in events.items()
    )
    run = replace(run, epochs=(replace(epoch, ranks=ranks),))
    (finding,) = find_hangs(run, span_table([]), NO_STEPS, RunContext(events=records))
    return finding


def test_the_rank_that_did_not_call_what_the_others_are_in_is_named(tmp_path: Path) -> None:
    builders = dumps(last=(41, 41, 40, 41))

    finding = hang(recorded(tmp_path, builders))

    assert (finding.cause, finding.ranks, finding.confidence) == ("hang", (2,), 0.95)
    assert "rank 2 never entered all_reduce 41 (dp-comm) of group default_pg 0" in finding.evidence
    assert "rank 2 stopped at 40 of group default_pg 0, the others at 41" in finding.evidence
    assert "rank 2 last called all_reduce 40" in finding.evidence


def test_json_says_the_same_as_a_pickle(tmp_path: Path) -> None:
    builders = dumps(last=(41, 41, 40, 41))
    as_pickle = [builder.write(tmp_path) for builder in builders]
    as_json = [builder.write_json(tmp_path) for builder in builders]

    for pickled, path in zip(as_pickle, as_json, strict=True):
        one, other = read_dump(pickled, 0), read_dump(path, 0)
        assert (one.calls, one.members, one.newest_ns) == (
            other.calls,
            other.members,
            other.newest_ns,
        )
    assert hang(read_dumps(as_json)) == hang(read_dumps(as_pickle))


def test_a_dump_without_communication_in_flight_is_of_the_silent_rank(tmp_path: Path) -> None:
    # GIVEN dumps of what has not ended only (TORCH_INCLUDE_ONLY_ACTIVE)
    builders = dumps()
    for builder in builders:
        del builder.entries[:2]
    builders[1].entries.clear()

    finding = hang(recorded(tmp_path, builders))

    assert (finding.ranks, finding.confidence) == ((1,), 0.95)
    assert "no communication is in flight in the dump of rank 1" in finding.evidence


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_rank_without_a_dump_is_named_with_doubt(tmp_path: Path, is_empty: bool) -> None:  # noqa: FBT001
    builders = dumps()
    files = [builder.write(tmp_path) for builder in builders]
    files[3].write_bytes(b"") if is_empty else files.remove(files[3])

    read = read_dumps(files)
    finding = hang(read)

    assert read.missing == (() if is_empty else (3,))
    assert (finding.ranks, finding.confidence) == ((3,), DOUBTED)
    assert "rank 3 wrote no dump" in finding.evidence


def test_half_of_the_dumps_are_insufficient(tmp_path: Path) -> None:
    finding = hang(recorded(tmp_path, dumps()[:2]))

    assert finding.cause == "insufficient-evidence"
    assert "only 2 of 4 ranks have a dump" in finding.evidence


def test_a_file_that_is_cut_off_is_left_out_and_named(tmp_path: Path) -> None:
    files = [builder.write(tmp_path) for builder in dumps()]
    files[2].write_bytes(files[2].read_bytes()[:-20])
    (tmp_path / "launcher.log").write_text("")

    read = read_dumps([*files, tmp_path / "launcher.log"])
    finding = hang(read)

    assert sorted(read.dumps) == [0, 1, 3]
    assert [str(files[2]) in line for line in read.left_out].count(True) == 1
    assert any("launcher.log" in line for line in read.left_out)
    # WHAT rank 2 was doing is unknown, and not taken for silence.
    assert finding.cause == "insufficient-evidence"


def test_no_dump_at_all_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "rank_0").write_text("no dump")

    with pytest.raises(TraceError, match="there is no dump"):
        read_dumps([tmp_path / "rank_0"])
    with pytest.raises(BadInputError, match="neither a dump nor a folder"):
        import_files(
            [tmp_path / "none"], file_format="flight-recorder", run_id="run", store_url=None
        )


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "evidence"),
    [
        ("barrier", (), "Float", "rank 1 is in barrier 41"),
        ("all_reduce", (32,), "Float", "rank 1 is in all_reduce 41 of 128 bytes"),
        ("all_reduce", (128,), "BFloat16", "rank 1 is in all_reduce 41 of type BFloat16"),
    ],
)
def test_a_rank_that_calls_another_operation_size_or_type_is_named(
    tmp_path: Path, name: str, shape: tuple[int, ...], dtype: str, evidence: str
) -> None:
    builders = dumps(last=(41, 40, 41, 41))
    builders[1].call(name, 41, shape=shape, dtype=dtype)

    finding = hang(recorded(tmp_path, builders))

    assert finding.ranks == (1,)
    assert evidence in finding.evidence


def skipping() -> list[DumpBuilder]:
    """Return dumps of ranks of which 1 leaves out the first call of 64 floats, 256 bytes.

    All that it calls afterwards has the number of what the others called before.
    """
    calls = [("all_reduce", (64,)), ("all_reduce", (1,)), ("all_gather", (32,)), ("barrier", ())]
    builders = [DumpBuilder(rank, NUM) for rank in range(NUM)]
    for builder in builders:
        builder.call("all_reduce", 40, state="completed")
        own = calls[1:] if builder.rank == 1 else calls
        for seq, (name, shape) in enumerate(own, 41):
            state = "scheduled" if seq == 44 else "completed"
            builder.call(name, seq, shape=shape, state=state)
    return builders


def test_the_first_call_that_did_not_match_is_named_though_it_has_ended(tmp_path: Path) -> None:
    # GIVEN all in barrier 44 but rank 1, whose last call, 43, was a barrier
    finding = hang(recorded(tmp_path, skipping()))

    assert (finding.ranks, finding.confidence) == ((1,), 0.95)
    assert (
        "rank 1 called all_reduce 41 of 4 bytes and ranks 0, 2 and 3 called all_reduce 41 of 256"
        " bytes of group default_pg 0" in finding.evidence
    )
    assert "it has ended all the same" in finding.evidence


def test_unlike_calls_are_said_of_a_job_that_did_not_hang(tmp_path: Path) -> None:
    builders = skipping()
    for builder in builders:
        for entry in builder.entries:
            entry["state"] = "completed"

    finding = hang(recorded(tmp_path, builders))

    assert finding.cause == "insufficient-evidence"
    assert "do not show a hang; rank 1 called all_reduce 41 of 4 bytes" in finding.evidence


def test_of_unlike_calls_in_several_groups_the_first_is_named(tmp_path: Path) -> None:
    groups = {
        "0": (WHOLE_JOB, (0, 1, 2, 3)), "1": ("a", (0, 1, 2)), "2": ("b", (1, 2, 3)),
    }  # fmt: skip
    builders = [DumpBuilder(rank, NUM, groups=groups) for rank in range(NUM)]
    for builder in builders:
        for group, odd in (("2", 3), ("1", 0)):
            if builder.rank in groups[group][1]:
                dtype = "Half" if builder.rank == odd else "Float"
                builder.call("all_reduce", 7, group=group, dtype=dtype, state="completed")
        if builder.rank:
            builder.call("barrier", 9, shape=())

    finding = hang(recorded(tmp_path, builders))

    assert finding.ranks == (3,)
    assert "all_reduce 7 of 128 bytes of type Half" in finding.evidence
    assert "so are calls of 1 other group" in finding.evidence


def test_a_rank_that_is_missing_beside_unlike_calls_is_named_too(tmp_path: Path) -> None:
    groups = {"1": ("a", (0, 1, 2)), "2": ("b", (3, 4, 5))}
    builders = [DumpBuilder(rank, 6, groups=groups) for rank in range(6)]
    for builder in builders:
        group = "1" if builder.rank < 3 else "2"
        builder.call("all_reduce", 7, group=group, state="completed")
        if builder.rank != 1:
            name = "barrier" if builder.rank == 4 else "all_reduce"
            builder.call(name, 8, group=group)

    finding = hang(recorded(tmp_path, builders))

    assert finding.ranks == (1, 4)
    assert "rank 4 is in barrier 8 and ranks 3 and 5 are in all_reduce 8" in finding.evidence
    assert "rank 1 never entered what members of another group are in" in finding.evidence


def test_messages_that_ended_with_unlike_sizes_are_named(tmp_path: Path) -> None:
    first, middle, last = pipeline()
    for builder in (first, middle, last):
        builder.first_record = 0
    first.call("send 0->1", 1, group="5", shape=(64,), state="completed")
    first.call("send 0->1", 2, group="5", shape=(8,), state="completed")
    first.call("recv 0<-1", 3, group="5")
    middle.call("recv 1<-0", 1, group="5", shape=(64,), state="completed")
    middle.call("recv 1<-0", 2, group="5", shape=(64,), state="completed")

    finding = hang(recorded(tmp_path, (first, middle, last)))

    assert finding.ranks == ()
    assert "rank 1 called recv 1 of 256 bytes and rank 0 called send 1 of 32" in finding.evidence


def test_a_batch_that_a_ring_has_cut_is_of_unknown_size(tmp_path: Path) -> None:
    builders = [DumpBuilder(rank, NUM) for rank in range(NUM)]
    for builder in builders:
        for _ in range(1 if builder.rank == 2 else 3):
            builder.call("reduce_scatter", 40, shape=(16,))
        builder.call("reduce_scatter_tensor_coalesced", 40, shape=(), state="completed")
        builder.call("all_reduce", 41)

    finding = hang(recorded(tmp_path, builders))

    assert (finding.cause, finding.ranks) == ("hang", ())
    assert "all 4 members have entered all_reduce 41" in finding.evidence


def test_tokens_of_experts_may_have_another_size_on_each_rank(tmp_path: Path) -> None:
    builders = dumps(last=(40, 40, 40, 40))
    for builder in builders[:3]:
        shape = (100 + builder.rank, 8)
        builder.call("all_to_all", 41, shape=shape, state="completed")
        builder.call("all_to_all", 42, shape=shape)
    builders[3].call("all_to_all", 41, shape=(90, 8), state="completed")

    finding = hang(recorded(tmp_path, builders))

    assert finding.ranks == (3,)
    assert "rank 3 never entered all_to_all 42" in finding.evidence


def test_a_device_that_has_not_begun_what_the_others_are_in_is_named(tmp_path: Path) -> None:
    builders = [DumpBuilder(rank, NUM) for rank in range(NUM)]
    for builder in builders:
        builder.has_begins = True
        builder.call("all_reduce", 40, state="completed")
        builder.call("all_reduce", 41, state="scheduled" if builder.rank == 2 else "started")

    finding = hang(recorded(tmp_path, builders))

    assert finding.ranks == (2,)
    assert "rank 2 had launched it, but the device has not begun it" in finding.evidence


def test_of_all_ranks_in_one_collective_none_is_named(tmp_path: Path) -> None:
    finding = hang(recorded(tmp_path, dumps()))

    assert (finding.cause, finding.ranks) == ("hang", ())
    assert "all 4 members have entered all_reduce 41" in finding.evidence


def test_a_rank_that_does_not_see_the_end_of_what_all_others_left_is_named(tmp_path: Path) -> None:
    # GIVEN rank 1, which has launched as much as the others, of which nothing ended since 38
    builders = dumps(last=(41, 41, 41, 41))
    for entry in builders[1].entries:
        entry |= {"state": "scheduled", "time_discovered_completed_ns": None, "retired": False}

    finding = hang(recorded(tmp_path, builders))

    assert (finding.ranks, finding.confidence) == ((1,), DOUBTED)
    assert "rank 1 is still in all_reduce 39" in finding.evidence


def pipeline() -> list[DumpBuilder]:
    return [DumpBuilder(rank, 3, groups={"5": ("mesh_pp", (0, 1, 2))}) for rank in range(3)]


def test_the_wait_for_a_stage_is_followed_over_sends_and_receives(tmp_path: Path) -> None:
    # GIVEN stages that count their operations differently: 0 waits for 1, and that for 2
    first, middle, last = pipeline()
    first.call("send 0->1", 70, group="5", state="completed")
    first.call("recv 0<-1", 71, group="5")
    middle.call("recv 1<-0", 140, group="5", state="completed")
    middle.call("send 1->2", 141, group="5")
    last.call("recv 2<-1", 69, group="5", state="completed")

    finding = hang(recorded(tmp_path, (first, middle, last)))

    assert finding.ranks == (2,)
    assert "send 141 (pp-send) from rank 1 to rank 2" in finding.evidence


def test_from_all_calls_a_message_that_was_buffered_is_known(tmp_path: Path) -> None:
    # GIVEN rank 0, whose second send was buffered: rank 1 has still to receive it, and not rank 0
    first, middle, last = pipeline()
    for builder in (first, middle, last):
        builder.first_record = 0
    for seq in (1, 2):
        first.call("send 0->1", seq, group="5", state="completed")
    middle.call("recv 1<-0", 1, group="5", state="completed")
    middle.call("recv 1<-0", 2, group="5")
    middle.call("recv 1<-2", 3, group="5")
    last.call("send 2->1", 1, group="5", state="completed")

    read = recorded(tmp_path, (first, middle, last))
    events = to_events(read)

    assert [(call["name"], call["seq"]) for call in events[0]["data"]["ended"]] == [("send", 1)]
    assert [(call["name"], call["seq"]) for call in events[1]["data"]["open"]] == [
        ("recv", 1),
        ("recv", 0),
    ]


def test_the_parts_of_a_batch_have_the_state_of_the_whole(tmp_path: Path) -> None:
    first, middle, last = pipeline()
    middle.call("recv 1<-0", 7, group="5")
    middle.call("send 1->0", 7, group="5")
    middle.call("coalesced", 0, group="5", state="completed", is_p2p=True, p2p_seq_id=7)
    middle.call("send 1->2", 8, group="5")
    middle.call("coalesced", 0, group="5", is_p2p=True, p2p_seq_id=8)
    # GIVEN parts of a batch that has ended, whose record is left out
    first.call("send 0->1", 3, group="5")
    first.call("recv 0<-1", 3, group="5")
    last.call("recv 2<-1", 5, group="5", state="completed")

    calls = read_dump(middle.write(tmp_path), 1).calls
    events = to_events(recorded(tmp_path, (first, middle, last)))

    assert [(call.name, call.state.name) for call in calls] == [
        ("recv", "ENDED"),
        ("send", "ENDED"),
        ("send", "LAUNCHED"),
    ]
    assert not events[0]["data"]["open"]
    assert len(events[1]["data"]["open"]) == 1


def test_a_closed_record_of_gloo_is_no_end_if_a_member_never_called_it(tmp_path: Path) -> None:
    # GIVEN gloo, which closes what timed out, has no state of ends, and names no members
    builders = dumps(last=(41, 41, 40, 41))
    for builder in builders:
        for entry in builder.entries:
            name = entry["profiling_name"].replace("nccl", "gloo")
            entry |= {"profiling_name": name, "state": "scheduled", "retired": True}
        builder.groups = {"0": (WHOLE_JOB, ())}

    finding = hang(recorded(tmp_path, builders))

    assert finding.ranks == (2,)


@pytest.mark.parametrize("version", ["1.0", "1.4"])
def test_dumps_of_torch_before_2_4_are_read(tmp_path: Path, version: str) -> None:
    builders = dumps(last=(41, 41, 40, 41))

    finding = hang(read_dumps([builder.write_old(tmp_path, version) for builder in builders]))

    assert (finding.ranks, finding.confidence) == ((2,), 0.95)
    assert "rank 2 never entered all_reduce 41 (dp-comm) of group default_pg 0" in finding.evidence


def test_groups_of_torch_2_3_are_joined_by_their_members(tmp_path: Path) -> None:
    # GIVEN ranks to which a group has another number, and two groups of the same members
    builders = [
        DumpBuilder(rank, 3, groups={"0": (WHOLE_JOB, (0, 1, 2)), **groups})
        for rank, groups in enumerate(
            (
                {"a": ("", (0, 1)), "b": ("", (0, 1))},
                {"x": ("", (1, 2)), "a": ("", (0, 1)), "b": ("", (0, 1))},
                {"x": ("", (1, 2))},
            )
        )
    ]
    for builder in builders[:2]:
        builder.call("all_reduce", 5, group="a", state="completed")
    builders[0].call("all_reduce", 8, group="b")
    builders[1].call("all_gather", 3, group="x")
    builders[2].call("all_reduce", 2, state="completed")

    finding = hang(read_dumps([builder.write_old(tmp_path, "1.4") for builder in builders]))

    assert finding.ranks == (2,)
    assert "rank 2 never entered all_gather 3 (other) of group [1, 2] with 2" in finding.evidence


def test_without_members_the_groups_of_torch_2_2_are_of_one_rank(tmp_path: Path) -> None:
    groups = {"0": (WHOLE_JOB, (0, 1)), "a": ("", (0, 1))}
    builders = [DumpBuilder(rank, 2, groups=groups) for rank in range(2)]
    builders[0].call("all_reduce", 5, group="a")
    builders[1].call("all_reduce", 4, group="a", state="completed")

    finding = hang(read_dumps([builder.write_old(tmp_path, "1.0") for builder in builders]))

    assert (finding.cause, finding.ranks) == ("insufficient-evidence", ())
    assert "rank 0 is in all_reduce 5, and who else is in its group" in finding.evidence


def test_messages_of_torch_2_3_belong_to_their_batch(tmp_path: Path) -> None:
    first, middle, last = pipeline()
    for builder in (first, middle, last):
        builder.first_record = 0
        builder.groups = {"0": (WHOLE_JOB, (0, 1, 2)), "5": ("", (0, 1, 2))}
    middle.call("send 1->2", 7, group="5")
    middle.call("recv 1<-2", 7, group="5")
    middle.call("coalesced", 7, group="5", state="completed")
    middle.call("send 1->2", 8, group="5")
    last.call("recv 2<-1", 6, group="5", state="completed")
    last.call("send 2->1", 7, group="5", state="completed")

    calls = read_dump(middle.write_old(tmp_path, "1.4"), 1).calls
    finding = hang(
        read_dumps([builder.write_old(tmp_path, "1.4") for builder in (first, middle, last)])
    )

    assert [call.state.name for call in calls] == ["ENDED", "ENDED", "LAUNCHED"]
    assert finding.ranks == (2,)
    assert "rank 2 never entered send 1 (pp-send) from rank 1 to rank 2" in finding.evidence


@pytest.mark.parametrize("is_longer", [True, False])
def test_a_dump_of_an_earlier_start_is_left_out(tmp_path: Path, is_longer: bool) -> None:  # noqa: FBT001
    # GIVEN a hang of rank 2, and a file of rank 3 that was written an hour before the others began
    builders = dumps(last=(41, 41, 40, 41))
    builders[3] = stale = DumpBuilder(3, NUM)
    for seq in (98, 99) if is_longer else (7, 8):
        stale.call("all_reduce", seq, state="completed")
        stale.entries[-1]["time_created_ns"] -= 3_600 * SECOND
        stale.entries[-1]["time_discovered_completed_ns"] -= 3_600 * SECOND

    read = recorded(tmp_path, builders)

    assert sorted(read.dumps) == [0, 1, 2]
    assert any("nccl_trace_rank_3 is left out" in line for line in read.left_out)
    assert hang(read).ranks == (2,)


def test_torchcomms_calls_are_numbered_in_their_group(tmp_path: Path) -> None:
    # GIVEN torchcomms, which numbers the calls of all groups together, and has no state of groups
    groups = {"world": ("ncclx", (0, 1, 2)), "pair": ("ncclx", (0, 1))}
    builders = [DumpBuilder(rank, 3, groups=groups) for rank in range(3)]
    for builder in builders:
        builder.first_record = 0
        number = 0
        for name, group in (("all_reduce", "pair"), ("all_reduce", "world"), ("barrier", "world")):
            if builder.rank in groups[group][1] and (builder.rank, name) != (2, "barrier"):
                closed = name == "all_reduce"
                builder.call(name, number, group=group, retired=closed, pg_id=0)
                builder.entries[-1]["profiling_name"] = f"ncclx:{name}"
                number += 1
        builder.status = {}

    finding = hang(recorded(tmp_path, builders))

    assert finding.ranks == (2,)
    assert "never entered barrier 2" in finding.evidence


def test_dumps_of_a_job_that_was_working_just_before_are_insufficient(tmp_path: Path) -> None:
    builders = dumps(last=(41, 41, 40, 41))
    shift_ns = time.time_ns() - BASE_NS - 3_000_000_000
    for builder in builders:
        for entry in builder.entries:
            entry["time_created_ns"] += shift_ns
            entry["time_discovered_completed_ns"] = None

    finding = hang(recorded(tmp_path, builders))

    assert finding.cause == "insufficient-evidence"
    assert "may not have hung" in finding.evidence


def test_the_layout_comes_from_the_descriptions_of_the_groups(tmp_path: Path) -> None:
    builders = []
    for rank in range(8):
        tp, dp, pp = (rank // 2 * 2,), (rank % 2, rank % 2 + 2), rank % 4
        groups = {
            "0": (WHOLE_JOB, tuple(range(8))),
            "1": ("TENSOR_MODEL_PARALLEL_GROUP", (tp[0], tp[0] + 1)),
            "2": ("DATA_PARALLEL_GROUP", tuple(member + rank // 4 * 4 for member in dp)),
            "3": ("PIPELINE_MODEL_PARALLEL_GROUP", (pp, pp + 4)),
            "4": ("EXPERT_MODEL_PARALLEL_GROUP", tuple(range(rank // 4 * 4, rank // 4 * 4 + 4))),
        }
        builders.append(DumpBuilder(rank, 8, groups=groups))
        builders[-1].call("all_reduce", 1, group="1")

    processes = {each.rank: each for each in to_processes(recorded(tmp_path, builders), "run")}

    layout, coords = (processes[6].manifest[key] for key in ("layout", "coords"))
    assert {axis: layout[axis] for axis in ("dp", "tp", "pp")} == {"dp": 2, "tp": 2, "pp": 2}
    assert coords == {"dp": 1, "tp": 0, "pp": 1, "cp": 0}


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("nccl_trace_rank_12", 12),
        ("comm_lib_trace_rank_0", 0),
        ("nccl_trace_rank_container-node07_40", 40),
        ("_dump_9", 9),
        ("rank3.json", 3),
        ("trace.log", -1),
    ],
)
def test_the_rank_is_at_the_end_of_the_name(tmp_path: Path, name: str, rank: int) -> None:
    assert find_rank(tmp_path / name) == rank


def imported(folder: Path, store_url: str) -> RunReport:
    import_files([folder], file_format="flight-recorder", run_id="run", store_url=store_url)
    with open_store(store_url) as store:
        return analyze_run(StoreSource(store), "run")


def test_imported_dumps_are_a_run_with_a_verdict_and_more_of_them_are_added(tmp_path: Path) -> None:
    folder, store_url = tmp_path / "dumps", f"chdb://{tmp_path / 'store'}"
    folder.mkdir()
    files = [builder.write(folder) for builder in dumps(last=(41, 41, 40, 41))]
    kept = files[2].read_bytes()
    files[2].unlink()

    doubted = imported(folder, store_url)
    files[2].write_bytes(kept)
    certain = imported(folder, store_url)

    for report, confidence in ((doubted, DOUBTED), (certain, 0.95)):
        top = report.top_finding
        assert (top.cause, top.ranks, top.confidence) == ("hang", (2,), confidence)
        assert (report.world_size, report.steps, report.num_spans) == (4, (), 0)
    with open_store(store_url) as store:
        (run,) = StoreSource(store).runs()
    assert run.state == "ended"


JOB = """
import datetime, os, sys, threading, time, torch, torch.distributed as dist
from torch._C import _distributed_c10d as c10d
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
rank, folder, case = dist.get_rank(), *sys.argv[1:]
def dump():
    time.sleep(4)
    with open(f"{folder}/trace_rank_{rank}.json", "wb") as file:
        content = c10d._dump_fr_trace_json()
        file.write(content if isinstance(content, bytes) else content.encode())
    time.sleep(2)
    os._exit(0)
threading.Thread(target=dump).start()
for step in range(6):
    if step == 5 and rank == 2 and case == "sleep":
        time.sleep(60)
    values = torch.ones(64)
    try:
        if step == 5 and rank == 2:
            dist.all_gather([torch.ones(64) for _ in range(4)], values)
        else:
            dist.all_reduce(values)
    except RuntimeError:  # gloo notices some unlike calls
        time.sleep(60)
time.sleep(60)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("case", ["sleep", "unlike"])
def test_dumps_of_a_job_of_four_processes_name_the_rank(tmp_path: Path, case: str) -> None:
    folder, program = tmp_path / "dumps", tmp_path / "job.py"
    folder.mkdir()
    program.write_text(JOB)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    subprocess.run(
        [*launcher, "--nproc-per-node", "4", str(program), str(folder), case],
        check=True,
        capture_output=True,
        cwd=ROOT,
        env=trainer_environment(),
        timeout=240,
    )

    top = imported(folder, f"chdb://{tmp_path / 'store'}").top_finding

    assert (top.cause, top.ranks) == ("hang", (2,))
    assert ("all_gather" in top.evidence) == (case == "unlike")
