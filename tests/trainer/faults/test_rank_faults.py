"""Effects of faults in the traces of jobs of a few ranks."""

from __future__ import annotations

import gc
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.collector.read.runs import read_manifests
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.store import open_store
from rankscope.collector.store.writer import StoreWriter
from rankscope.tracer.span import SpanKind
from rankscope.tracer.topology import Layout
from rankscope.trainer.config import TrainerConfig
from rankscope.trainer.errors import CrashFaultError
from rankscope.trainer.faults.rank_faults import GarbageHeap, RankFaults, die, is_slow
from rankscope.trainer.faults.spec import CrashKind, parse_faults
from rankscope.trainer.model import Stage
from rankscope.trainer.pace import MonotonicPaceClock, StretchedSegments
from tests.support.trainer.job import run_trainer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rankscope.collector.identity import Row

pytestmark = pytest.mark.multiproc

RUN = "faulty"
MS = 1_000_000
STALL_MS, INPUT_MS, PAUSE_MS, SAVE_MS = 60, 250, 40, 50
"""Far above the delays of a busy machine."""


SELECT_SPANS = """
SELECT rank, kind, step, start_ns, duration_ns FROM spans FINAL WHERE step >= 0 ORDER BY start_ns
"""

SELECT_SQUARES = """
SELECT rank, sum_squared_lengths FROM microbatches FINAL WHERE step >= 0
ORDER BY step, microbatch
"""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A span of one rank."""

    kind: SpanKind
    step: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Job:
    """A finished job, read from the store."""

    status: int
    stdout: str
    rows: list[Row]
    microbatches: list[Row]
    manifests: dict[int, Mapping[str, str]]
    """Settings by rank."""

    def spans(self, rank: int, kind: SpanKind) -> list[Recorded]:
        """Return the spans of a kind, in order."""
        return [
            Recorded(kind, row["step"], row["start_ns"], row["start_ns"] + row["duration_ns"])
            for row in self.rows
            if (row["rank"], row["kind"]) == (rank, kind)
        ]

    def squares(self, rank: int) -> list[int]:
        return [row["sum_squared_lengths"] for row in self.microbatches if row["rank"] == rank]


def run_two_ranks(folder: Path, *flags: str) -> Job:
    """Train two ranks for four paced steps."""
    spool = folder / "spool"
    spool.mkdir()
    done = run_trainer(
        *("--layers", "2", "--steps", "4", "--paced", "--pace-ms", "10"),
        *("--trace", str(spool), "--run-name", RUN, *flags),
        num_ranks=2,
    )
    with (
        open_store(f"chdb://{folder / 'store'}") as store,
        closing(SpoolTail(spool, StoreWriter(store))) as tail,
    ):
        progress = tail.poll()
        while progress.num_cuts or progress.num_running:
            progress = tail.poll()
        return Job(
            done.returncode,
            done.stdout,
            rows=store.rows(SELECT_SPANS),
            microbatches=store.rows(SELECT_SQUARES),
            manifests={rank: settings for _, rank, settings in read_manifests(store, RUN)},
        )


@pytest.fixture(scope="module")
def stalled(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Return a job of two stages with every host fault, from step 2 on if a fault has steps."""
    job = run_two_ranks(
        tmp_path_factory.mktemp("job"),
        *("--pp", "2"),
        *("--fault", f"host-stall:rank=1,ms={STALL_MS},steps=2-3"),
        *("--fault", f"data-stall:rank=0,ms={INPUT_MS},steps=2-3"),
        *("--fault", f"gc-pause:ms={PAUSE_MS},probability=1,steps=3-3"),
        *("--fault", f"checkpoint:every=2,ms={SAVE_MS}"),
        *("--fault", "sequence-imbalance:spread=0.3,steps=2-3"),
        *("--fault", "misconfiguration:rank=1,variable=NCCL_ALGO,value=Tree"),
    )
    assert job.status == 0
    return job


def test_a_host_stall_is_between_launches(stalled: Job) -> None:
    assert min(gaps_before_forward(stalled, step=2)) >= STALL_MS * MS
    assert min(gaps_before_forward(stalled, step=1)) < STALL_MS * MS


def gaps_before_forward(job: Job, *, step: int) -> list[int]:
    """Return the time of rank 1 between the arrival of an activation and its forward."""
    waits = [span.end_ns for span in job.spans(1, SpanKind.WAIT)]
    begins = [span.start_ns for span in job.spans(1, SpanKind.FORWARD) if span.step == step]
    assert len(begins) == 4
    return [begin - max(end for end in waits if end <= begin) for begin in begins]


def test_a_data_stall_is_inside_the_data_span(stalled: Job) -> None:
    lasted = [span.end_ns - span.start_ns for span in stalled.spans(0, SpanKind.DATA)]

    others = [span.end_ns - span.start_ns for span in stalled.spans(1, SpanKind.DATA)]
    assert (len(lasted), len(others)) == (4, 4)
    assert min(lasted[2:]) >= INPUT_MS * MS
    # A stall of the machine may hit one of the others, but not all.
    assert min(lasted[:2]) < INPUT_MS * MS
    assert min(others[2:]) < INPUT_MS * MS


def test_a_gc_pause_is_before_each_forward_of_its_step(stalled: Job) -> None:
    forwards = [span for span in stalled.spans(0, SpanKind.FORWARD) if span.step == 3]
    pauses = [span for span in stalled.spans(0, SpanKind.GC) if span.step == 3]

    assert len(forwards) == 4
    for forward, before in zip(forwards, [0, *(one.end_ns for one in forwards)], strict=False):
        inside = [one for one in pauses if before <= one.start_ns < forward.start_ns]
        lost = sum(one.end_ns - one.start_ns for one in inside)
        assert lost >= PAUSE_MS * MS * 8 // 10


def test_a_checkpoint_is_saved_every_two_steps_on_all_ranks(stalled: Job) -> None:
    for rank in (0, 1):
        saves = stalled.spans(rank, SpanKind.CHECKPOINT)
        assert [save.step for save in saves] == [1, 3]
        assert all(save.end_ns - save.start_ns >= SAVE_MS * MS for save in saves)


def test_lengths_vary_in_the_steps_of_the_fault_and_are_recorded(stalled: Job) -> None:
    squares = stalled.squares(0)

    # 4 micro-batches a step, of 2 sequences with 16 + 16 tokens without the fault.
    assert squares == stalled.squares(1)
    assert squares[:8] == [2 * (256 + 256)] * 8
    assert len(set(squares[8:])) > 2


def test_paced_compute_follows_the_squared_lengths(stalled: Job) -> None:
    forwards = [span for span in stalled.spans(1, SpanKind.FORWARD) if span.step == 3]
    squares = stalled.squares(1)[12:]

    for forward, squared in zip(forwards, squares, strict=True):
        # Two segments of 10 ms for a micro-batch of 1024.
        assert forward.end_ns - forward.start_ns >= 2 * 10 * MS * (0.5 + 0.5 * squared / 1024)


def test_a_misconfiguration_shows_only_in_the_environment_of_its_rank(stalled: Job) -> None:
    healthy, wrong = stalled.manifests[0], stalled.manifests[1]

    differing = {
        name
        for name in healthy.keys() | wrong.keys()
        if name.startswith(("environment.", "config.")) and healthy.get(name) != wrong.get(name)
    }
    assert differing == {"environment.NCCL_ALGO"}
    assert not [name for name in wrong if "fault" in name]


@pytest.mark.nightly
def test_a_slow_link_lengthens_the_transfer(tmp_path: Path) -> None:
    """256 KiB of activations at 100 MB/s take 2.6 ms, at a fiftieth of it 131 ms."""
    job = run_two_ranks(
        tmp_path,
        *("--tp", "2", "--microbatches", "2", "--seq", "256", "--microbatch-size", "4"),
        *("--fault", "slow-link:src=0,dst=1,factor=50,steps=2-3"),
    )

    assert job.status == 0
    for rank in (0, 1):
        transfers = job.spans(rank, SpanKind.TP_COMM)
        slow = [lasted_ns(transfers, step=step) for step in (2, 3)]
        # The shorter ones of the healthy step, because others may have waited for a core.
        healthy = lasted_ns(transfers, step=1, at_ratio=0.25)
        assert min(slow) > 50 * MS
        assert min(slow) > 5 * healthy


def lasted_ns(spans: list[Recorded], *, step: int, at_ratio: float = 0.5) -> int:
    """Return the quantile of the durations of the spans of a step."""
    lasted = sorted(one.end_ns - one.start_ns for one in spans if one.step == step)
    return lasted[int(at_ratio * len(lasted))]


@pytest.mark.nightly
def test_members_of_a_skewed_group_launch_late_in_turn(tmp_path: Path) -> None:
    job = run_two_ranks(tmp_path, "--dp", "2", "--fault", "launch-skew:ms=360")

    assert job.status == 0
    first, second = ([late_ns(job, rank, step) for step in (1, 2, 3)] for rank in (0, 1))
    # Lags of 360 ms x (step + 1) / 4 x (1 + sin(2 pi (step / 8 + dp / 2))) / 2: 154, 270 and
    # 307 ms for rank 0, and 26, 0 and 53 ms for rank 1.
    assert first[0] > 150 * MS
    assert first[1] > 265 * MS
    assert first[2] > 300 * MS
    # A stall of the machine makes one of these longer, but not all.
    assert min(second) < 100 * MS


def late_ns(job: Job, rank: int, step: int) -> int:
    """Return the time from a rank's last backward of a step to its first reduction."""
    last = max(one.end_ns for one in job.spans(rank, SpanKind.BACKWARD) if one.step == step)
    begins = [one.start_ns for one in job.spans(rank, SpanKind.DP_COMM) if one.start_ns >= last]
    return min(begins) - last


def rank_with(fault: str, *, rank: int) -> RankFaults:
    """Return the faults of one rank of two stages, without a job."""
    config = TrainerConfig(
        layout=Layout(pp=2), world_size=2, num_microbatches=4, faults=parse_faults([fault])
    )
    stage = Stage(config.model, stage=rank, num_stages=2)
    timer = StretchedSegments(MonotonicPaceClock())
    return RankFaults(config, rank=rank, stage=stage, timer=timer)


def test_a_crash_is_before_the_middle_forward_of_its_step() -> None:
    faults = rank_with("crash:rank=1,step=1", rank=1)

    faults.begin_step(0)
    faults.before_forward(2)
    faults.begin_step(1)
    faults.before_forward(1)
    with pytest.raises(CrashFaultError):
        faults.before_forward(2)


def test_a_crash_ends_no_other_rank() -> None:
    faults = rank_with("crash:rank=1,step=1", rank=0)

    faults.begin_step(1)
    faults.before_forward(2)


def test_faults_do_not_act_in_the_warm_up() -> None:
    faults = rank_with("crash:rank=1,step=0", rank=1)

    faults.before_forward(2)


@pytest.mark.parametrize(
    ("fault", "slow"),
    [
        ("slow-link:src=2,dst=3,factor=5", {(2, 3), (3, 2)}),
        ("slow-link:rank=1,factor=5", {(1, 0), (1, 2), (1, 3), (0, 1), (2, 1), (3, 1)}),
    ],
)
def test_a_link_is_slow_at_both_of_its_ends(fault: str, slow: set[tuple[int, int]]) -> None:
    (slow_link,) = parse_faults([fault])

    found = {
        (rank, peer)
        for rank in range(4)
        for peer in range(4)
        if rank != peer and is_slow(slow_link, rank, peer)
    }

    assert found == slow


def test_an_exception_names_rank_and_step() -> None:
    with pytest.raises(CrashFaultError, match="rank 3 fails in step 7"):
        die(CrashKind.EXCEPTION, rank=3, step=7)


def test_host_oom_raises_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        die(CrashKind.HOST_OOM, rank=3, step=7)


def test_exit_and_kill_print_nothing() -> None:
    program = """
import os
from rankscope.trainer.faults.rank_faults import die
from rankscope.trainer.faults.spec import CrashKind
for kind in (CrashKind.EXIT, CrashKind.KILL):
    pid = os.fork()
    if pid == 0:
        die(kind, rank=0, step=0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, b"1\n-9\n", b"")


PAUSE_NS = 20_000_000


def seen_by_callbacks(heap: GarbageHeap, *, is_traced: bool) -> list[str]:
    phases: list[str] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        if info["generation"] == 2:
            phases.append(phase)

    gc.callbacks.append(note)
    try:
        heap.collect(is_traced=is_traced)
        assert gc.callbacks[-1] is note
    finally:
        gc.callbacks.remove(note)
    return phases


def test_callbacks_run_in_a_traced_collection_only() -> None:
    heap = GarbageHeap(PAUSE_NS)

    assert seen_by_callbacks(heap, is_traced=True)[:2] == ["start", "stop"]
    assert seen_by_callbacks(heap, is_traced=False) == []


def test_a_collection_frees_garbage() -> None:
    heap = GarbageHeap(PAUSE_NS)
    circle: list[object] = []
    circle.append(circle)
    before = gc.get_stats()[2]["collected"]
    del circle

    heap.collect(is_traced=True)

    assert gc.get_stats()[2]["collected"] > before
