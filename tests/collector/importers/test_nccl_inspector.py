"""Logs of NCCL's Inspector, built after its format 4.2: what becomes of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.collector.errors import TraceError
from rankscope.collector.importers.nccl_inspector import read_logs
from rankscope.collector.store.store import open_store
from rankscope.commands.import_trace import import_files
from rankscope.sources.store_source import StoreSource

if TYPE_CHECKING:
    from pathlib import Path

BEGIN_US = 1_752_867_229_000_000
NUM = 4
NUM_ROUNDS = 20
MIB = 1 << 20

Line = dict[str, Any]


def line(communicator: str, place: tuple[int, int], process: int, perf: Line) -> Line:
    rank, size = place
    return {
        "header": {
            "id": communicator, "comm_name": "unknown", "rank": rank, "n_ranks": size, "nnodes": 1,
        },
        "metadata": {
            "inspector_output_format_version": "v4.2", "git_rev": "",
            "rec_mechanism": "nccl_profiler_interface", "dump_timestamp_us": BEGIN_US,
            "hostname": "node0", "pid": 100 + process,
        },
        **perf,
    }  # fmt: skip


def collective(name: str, seq: int, num_bytes: int, times_us: tuple[int, int]) -> Line:
    begin_us, end_us = times_us
    channels = [
        {"channel_id": channel, "kernel_start_ts": begin_us + channel,
         "kernel_stop_ts": end_us - channel, "kernel_record_ts": end_us}
        for channel in range(2)
    ]  # fmt: skip
    return {
        "coll_perf": {
            "coll": name, "coll_algo": "RING", "coll_proto": "SIMPLE", "coll_sn": seq,
            "coll_msg_size_bytes": num_bytes, "coll_exec_time_us": end_us - begin_us,
            "coll_timing_source": "kernel_gpu", "coll_algobw_gbs": 1.0, "coll_busbw_gbs": 1.5,
            "event_trace_ts": {
                "coll_start_ts": begin_us - 40, "coll_stop_ts": begin_us - 35,
                "kernel_events": channels,
            },
        }
    }  # fmt: skip


def job() -> list[list[Line]]:
    """Return the lines of ranks whose pairs (0, 1) and (2, 3) reduce, and which then all gather.

    The transfers of the second pair take three times as long.
    """
    lines: list[list[Line]] = [[] for _ in range(NUM)]
    now_us = [BEGIN_US] * NUM
    for seq in range(NUM_ROUNDS):
        now_us = [now + 1000 for now in now_us]
        for pair in ((0, 1), (2, 3)):
            end_us = now_us[pair[0]] + (3000 if pair[0] else 1000)
            for place, rank in enumerate(pair):
                perf = collective("AllReduce", seq, 64 * MIB, (now_us[rank], end_us))
                lines[rank].append(line(f"0xb{pair[0]}", (place, 2), rank, perf))
                now_us[rank] = end_us
        end_us = max(now_us) + 500
        for rank in range(NUM):
            perf = collective("AllGather", seq, MIB, (now_us[rank], end_us))
            lines[rank].append(line("0xaa", (rank, NUM), rank, perf))
        now_us = [end_us] * NUM
    return lines


def write(folder: Path, lines: list[list[Line]]) -> list[Path]:
    folder.mkdir(exist_ok=True)
    paths = []
    for rank, own in enumerate(lines):
        paths.append(folder / f"node0-pid{100 + rank}.log")
        paths[-1].write_text("".join(f"{json.dumps(each)}\n" for each in own), encoding="utf-8")
    return paths


def test_the_wait_of_all_ranks_leads_to_the_slow_transfers(tmp_path: Path) -> None:
    url = f"chdb://{tmp_path / 'store'}"
    write(tmp_path / "logs", job())

    said = import_files(
        [tmp_path / "logs"], file_format="nccl-inspector", run_id="run", store_url=url
    )
    with open_store(url) as store:
        report = analyze_run(StoreSource(store), "run")

    assert said.startswith(f"imported run run: {2 * NUM * NUM_ROUNDS} spans.")
    # Ranks 0 and 1 wait in the gather for the transfers between ranks 2 and 3, a third of the time.
    waiting = {one.rank: one for one in report.starved}
    assert {*waiting} == {0, 1}
    (link,) = {one.waits_on[0].link for one in waiting.values()}
    assert link is not None
    assert report.waited_links[link].members == (2, 3)
    assert waiting[0].wait_ratio == pytest.approx(2000 / 4500, rel=0.05)
    # Without compute there is no verdict about ranks.
    assert report.top_finding.cause == "insufficient-evidence"


def test_a_span_has_the_bytes_that_move_and_the_time_of_all_channels(tmp_path: Path) -> None:
    processes = [*read_logs(write(tmp_path / "logs", job()), "run")]

    assert [process.rank for process in processes] == [0, 1, 2, 3]
    reduce, gather = processes[3].records[:2]
    assert reduce.comm is not None
    assert gather.comm is not None
    assert (reduce.name, reduce.comm.num_bytes) == ("all_reduce", 64 * MIB)
    assert (gather.name, gather.comm.num_bytes) == ("all_gather", NUM * MIB)
    assert reduce.start_ns == (BEGIN_US + 1000) * 1000
    assert reduce.end_ns - reduce.start_ns == 3_000_000
    members = {group[1]: group[2] for group in processes[3].groups.values()}
    assert members == {"0xb2 all_reduce": (2, 3), "0xaa all_gather": (0, 1, 2, 3)}


def test_sends_lines_about_the_inspector_and_unseen_kernels_are_left_out(tmp_path: Path) -> None:
    lines = job()
    lines[0] += [
        line("0xaa", (0, NUM), 0, {"p2p_perf": {"p2p": "Send", "p2p_sn": 1, "p2p_peer": 1}}),
        line("0xaa", (0, NUM), 0, {"dump_stats": {"coll_records": 1}}),
    ]

    unseen = collective("AllGather", NUM_ROUNDS, MIB, (0, 0))
    unseen["coll_perf"]["event_trace_ts"]["kernel_events"] = []
    lines[0].append(line("0xaa", (0, NUM), 0, unseen))

    first, *_ = read_logs(write(tmp_path / "logs", lines), "run")

    assert first.notes == ["1 sends and receives are left out: their sides can't be matched"]
    assert len(first.records) == 2 * NUM_ROUNDS + 1


def test_a_log_without_times_is_refused_with_what_to_set(tmp_path: Path) -> None:
    lines = job()
    del lines[2][0]["coll_perf"]["event_trace_ts"]

    with pytest.raises(TraceError, match="NCCL_INSPECTOR_DUMP_VERBOSE=1"):
        list(read_logs(write(tmp_path / "logs", lines), "run"))


def test_without_a_communicator_of_all_processes_ranks_are_unknown(tmp_path: Path) -> None:
    lines = [[each for each in own if each["header"]["id"] != "0xaa"] for own in job()]

    with pytest.raises(TraceError, match="no communicator of all 4 processes"):
        list(read_logs(write(tmp_path / "logs", lines), "run"))


@pytest.mark.parametrize(
    "content",
    ['{"header": 1}', "no JSON", '{"header": {"rank": -1}, "metadata": {"hostname": ""}}', "[]"],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.log"
    path.write_text(content, encoding="utf-8")

    with pytest.raises(TraceError, match="is no log of NCCL's Inspector"):
        list(read_logs([path], "run"))
