"""Files of a job: which are traces, and of which rank."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.errors import NotATraceError, TraceError
from rankscope.collector.importers.kineto_files import find_job

if TYPE_CHECKING:
    from pathlib import Path

TRACE = {"schemaVersion": 1, "traceEvents": []}


def write(folder: Path, name: str, document: object = TRACE) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps(document).encode()
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


@pytest.mark.parametrize(
    "name",
    [
        "rank{}.json",
        "trace_rank_{}.json.gz",
        "job-RANK{}.pt.trace.json",
        "trace_{}.json",
        "trace-{}.pt.trace.json.gz",
        "{}.json",
        "worker{}.1764000000000.pt.trace.json",
        "profile_gpu{}_step_100.json",
        "dp0_pp0_tp1_dcp0_ep0_rank{}.1764000000000000000.pt.trace.json.gz",  # vLLM
        "1764000000.12-TP-{}.trace.json.gz",  # SGLang
        "1764000000.12-TP-{}-DP-0-PP-0-EP-0.trace.json.gz",
        "primus-megatron-exp[llama2-70b]-rank[{}].json",
        "rank_{}/host_71.1764000000000.pt.trace.json",
        "iteration_10/rank{}_trace.json",  # torchtitan
    ],
)
def test_the_rank_is_in_the_name(tmp_path: Path, name: str) -> None:
    for rank in (3, 10, 4):
        write(tmp_path, name.format(rank))

    job = find_job([tmp_path])

    assert [(file.rank, file.path.relative_to(tmp_path)) for file in job.traces] == [
        (rank, (tmp_path / name.format(rank)).relative_to(tmp_path)) for rank in (3, 4, 10)
    ]


@pytest.mark.parametrize(
    "name",
    [
        "trace_step_{}.json",
        "iter{}.json",
        "host{}_7.1764000000000.pt.trace.json",
        "1764000000.12-TP-0-PP-{}.trace.json.gz",
    ],
)
def test_other_numbers_are_no_ranks(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "traces"
    for number in (0, 1):
        write(folder, name.format(number))

    with pytest.raises(TraceError, match="names no rank"):
        find_job([folder])

    (alone,) = find_job([folder / name.format(1)]).traces
    assert alone.rank == 0


def test_the_windows_of_one_worker_are_of_rank_0(tmp_path: Path) -> None:
    names = [f"host_71.{time}.pt.trace.json" for time in (1764000000000, 1764000009000)]
    for name in names:
        write(tmp_path, name)

    assert [(file.rank, file.path.name) for file in find_job([tmp_path]).traces] == [
        (0, name) for name in names
    ]


def test_the_trace_itself_counts_more_than_its_name(tmp_path: Path) -> None:
    write(tmp_path, "rank0.json", {**TRACE, "distributedInfo": {"rank": 7}})

    (file,) = find_job([tmp_path]).traces

    assert file.rank == 7


def test_numbers_in_names_are_compared_as_numbers(tmp_path: Path) -> None:
    for window in (9, 100, 10):
        write(tmp_path, f"rank0.{window}.pt.trace.json")

    names = [file.path.name.split(".")[1] for file in find_job([tmp_path]).traces]
    assert names == ["9", "10", "100"]


def test_files_that_are_no_traces_are_left_out_or_refused(tmp_path: Path) -> None:
    others = [
        write(tmp_path, "config.json", {"hidden_size": 4096}),
        write(tmp_path, "list.json", [{"bs": 32}]),
        write(tmp_path, "et.json", {"schema": "1.1.1-chakra.0.0.4", "nodes": []}),
    ]
    with pytest.raises(NotATraceError, match="no trace"):
        find_job([tmp_path])
    with pytest.raises(NotATraceError, match="Chakra"):
        find_job([others[2].rename(tmp_path / "a.json").parent])

    write(tmp_path, "rank0.json")
    write(tmp_path, "deep/er/rank1.json")  # two levels down: not looked at

    job = find_job([tmp_path])
    assert job.ranks == (0,)
    assert len(job.left_out) == 3
