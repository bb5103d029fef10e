"""Open spans of a hanging or killed process, read from another process."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from rankscope.tracer.job.running import Running, format_running, read_running
from rankscope.tracer.span import NONE, SpanKind, hash_group
from tests.support.paths import ROOT
from tests.support.tracer.recording import recorder_in
from tests.support.waiting import wait_until
from tests.tracer.programs import run_python

if TYPE_CHECKING:
    from pathlib import Path

HANG = """
import sys
import torch, torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from rankscope import tracer
rank, path = int(sys.argv[1]), sys.argv[2]
store = FileStore(path, 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
tracer.install(spool=sys.argv[3], run="hang")
tracer.begin_steps(7)
dist.all_reduce(torch.ones(1))
if rank == 0:
    dist.all_reduce(torch.ones(1))
else:
    with tracer.span("lost in thought"):
        input()
    dist.all_reduce(torch.ones(1))
dist.destroy_process_group()  # else torch itself aborts some exits
"""


@pytest.mark.multiproc
def test_a_hang_shows_operation_group_and_number_and_the_rank_elsewhere(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", HANG, str(rank), str(tmp_path / "store"), str(spool)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        wait_until(
            lambda: {(entry.rank, entry.seq) for entry in read_running(spool)} == {(0, 1), (1, -1)}
        )
        waiting, busy = read_running(spool)
        shown = run_python("-m", "rankscope.tracer", "--running", spool).stdout
    finally:
        for rank in reversed(ranks):  # rank 0 waits for rank 1
            rank.communicate(b"go on\n", timeout=180)
        codes = [rank.returncode for rank in ranks]

    assert codes == [0, 0]
    assert (waiting.name, waiting.kind, waiting.step) == ("all_reduce", SpanKind.OTHER, 7)
    assert waiting.group_id == hash_group("0", [0, 1])
    assert waiting.group_name == "world:0"
    assert waiting.since_ns is not None
    assert waiting.since_ns > 0
    assert (busy.name, busy.pid) == ("lost in thought", ranks[1].pid)
    first, second = shown.splitlines()
    assert first.startswith(
        f"rank 0  pid {ranks[0].pid}  other 'all_reduce'  world:0 seq 1  step 7"
    )
    assert second.startswith(
        f"rank 1  pid {ranks[1].pid}  host 'lost in thought'  step 7  open for "
    )
    assert read_running(spool) == []  # both have an exit record


@pytest.mark.multiproc
def test_the_open_spans_of_a_killed_process_are_shown(tmp_path: Path) -> None:
    script = """
import sys
from rankscope import tracer
tracer.install(spool=sys.argv[1], run="killed")
with tracer.span("last words"):
    input()
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE) as process:
        wait_until(lambda: bool(read_running(tmp_path)))
        process.kill()

    assert process.returncode == -9
    assert [entry.name for entry in read_running(tmp_path / "killed")] == ["last words"]


def test_the_duration_is_shown_on_the_same_boot_only(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    with recorder.span("work"):
        wait_until(lambda: bool(read_running(tmp_path)))
        (entry,) = read_running(tmp_path)
        (later,) = read_running(tmp_path, now_monotonic_ns=entry.start_monotonic_ns + 5)
        segment = next(path for path in tmp_path.glob("seg-*") if any(path.read_bytes()[1024:4096]))
        copy = tmp_path / "copy"
        copy.mkdir()
        header = bytearray(segment.read_bytes())
        header[64:80] = bytes(range(16))  # another boot's id
        (copy / segment.name).write_bytes(header)
        (copy / "process.rsp").write_bytes((tmp_path / "process.rsp").read_bytes())
        (elsewhere,) = read_running(copy)
    recorder.shutdown()

    assert later.since_ns == 5
    assert (elsewhere.name, elsewhere.since_ns) == ("work", None)


def test_a_name_cannot_send_control_codes_to_the_terminal() -> None:
    hostile = Running(
        rank=0, pid=1, kind=SpanKind.DP_COMM, name="\x1b[2Jx", step=NONE, group_id=7,
        group_name="\x1b]0;owned\x07", seq=NONE, start_monotonic_ns=0, since_ns=None,
    )  # fmt: skip

    assert format_running(hostile).isprintable()
