"""Logs of ranks in the forms of torchrun, srun and Slurm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.collector.host.followed_file import MAX_TURN_BYTES
from rankscope.collector.host.rank_logs import MAX_EVENTS_A_CLASS, RankLogSource
from rankscope.collector.host.sample import Sample

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.collector.host.host_events import HostEvent

TRACEBACK = (
    "[rank3]: Traceback (most recent call last):\n"
    '[rank3]:   File "train.py", line 70, in main\n'
    "[rank3]:     loss.backward()\n"
    "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
)
# hpcaitech/ColossalAI #3514
KILLED = (
    "WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 812914 closing signal"
    " SIGTERM\n"
    "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 3 (pid:"
    " 812917) of binary: /data/bin/python\n"
)


class Logs:
    """A folder of logs that is read once a second."""

    def __init__(self, folder: Path, pattern: str) -> None:
        self.folder = folder
        self.events: list[HostEvent] = []
        self.source = RankLogSource([str(folder / pattern)], self.events.extend)
        self.source.read(0)

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(text)

    def read(self) -> list[tuple[object, ...]]:
        """Return class, rank, local rank and process of new errors, after new files were found."""
        self.events.clear()
        for at_ns in range(6):
            self.source.read(at_ns)
        return [
            (event.data["class"], event.rank, event.local_rank, event.pid) for event in self.events
        ]


def test_the_layout_of_torchrun_names_the_local_rank(tmp_path: Path) -> None:
    logs = Logs(tmp_path, "*/attempt_*/*/stderr.log")
    logs.write("job_x/attempt_0/1/stderr.log", "step 1\nRuntimeError: bad\n")
    logs.write("job_x/attempt_0/1/stdout.log", "RuntimeError: not in the pattern\n")

    assert logs.read() == [("exception", None, 1, None)]
    assert logs.events[0].data["file"] == "job_x/attempt_0/1/stderr.log"


def test_one_file_of_slurm_has_the_ranks_in_its_lines(tmp_path: Path) -> None:
    logs = Logs(tmp_path, "slurm-*.out")
    logs.write("slurm-17.out", TRACEBACK + KILLED)
    logs.write("slurm-17.out", "5: NCCL WARN NET/IB : Got completion with error 12\n")
    logs.write("slurm-17.out", "srun: error: node1: task 6: Out Of Memory\n")

    assert logs.read() == [
        ("cuda-oom", 3, None, None),
        ("exit", None, 3, 812917),
        ("nccl", 5, None, None),
        ("host-oom", 6, None, None),
    ]
    first, killed = logs.events[:2]
    assert first.text == "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert "line 70" in first.data["traceback"]
    assert (killed.data["signal"], killed.data["exit_code"]) == (9, -9)


def test_what_a_file_had_before_is_not_sent(tmp_path: Path) -> None:
    (tmp_path / "slurm-1.out").write_text("RuntimeError: of the job before\n")
    logs = Logs(tmp_path, "slurm-*.out")
    logs.write("slurm-1.out", "Killed\n")

    assert logs.read() == [("killed", None, None, None)]


def test_repeated_errors_of_a_file_are_counted_and_not_sent(tmp_path: Path) -> None:
    logs = Logs(tmp_path, "*.log")
    logs.write("rank-2.log", "NCCL WARN again\n" * 1000)

    assert logs.read() == [("nccl", 2, None, None)] * MAX_EVENTS_A_CLASS
    left_out = Sample(2, "rank-log-errors-left-out", 1000.0 - MAX_EVENTS_A_CLASS)
    assert logs.source.read(2)[2:] == [left_out]


def test_of_a_flood_the_gap_is_counted(tmp_path: Path) -> None:
    logs = Logs(tmp_path, "*.log")
    logs.write("rank-2.log", "step done\n" * MAX_TURN_BYTES)

    logs.read()

    assert logs.source.read(2)[2:] == [Sample(2, "rank-log-gaps", 1.0)]


def test_words_of_a_healthy_log_are_no_errors(tmp_path: Path) -> None:
    logs = Logs(tmp_path, "*.log")
    logs.write(
        "rank0.log",
        "loss 2.3 error rate 0.1\nno errors found\nNCCL INFO Channel 00\ngrad norm nan skipped\n"
        "Using CUBLAS_STATUS_SUCCESS\nKilled 3 old workers\nValueErrorBudget: 5\n",
    )

    assert logs.read() == []


def test_missing_unreadable_and_binary_files_harm_nothing(tmp_path: Path) -> None:
    logs = Logs(tmp_path, "**/*.log")
    (tmp_path / "folder.log").mkdir()
    (tmp_path / "bytes.log").write_bytes(bytes(range(256)) * 5000)
    logs.write("good.log", "Segmentation fault (core dumped)\n")

    assert ("killed", None, None, None) in logs.read()


# Excerpts of public issues, and (class, rank, local rank, process) derived manually.
REAL: dict[str, tuple[str, list[tuple[object, ...]]]] = {
    # With the times of a log collector before each line.
    "QwenLM/Qwen3-Coder#174": (
        (
            "2024-11-20 14:37:16 [rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to"
            " allocate"
            " 132.00 MiB. GPU 3 has a total capacity of 79.10 GiB of which 98.00 MiB is free.\n"
            "2024-11-20 14:37:16 DEBUG:filelock:Attempting to acquire lock 140341412642880\n"
        ),
        [("cuda-oom", 3, None, None)],
    ),
    "LlamaFactory#8261": (
        (
            "  1%|          | 24/1752 [01:08<1:22:56,  2.88s/it][rank5]:[E602 11:17:52.185053341"
            " ProcessGroupNCCL.cpp:632] [Rank 5] Watchdog caught collective operation timeout:"
            " WorkNCCL(SeqNum=86, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600001"
            " milliseconds\n"
        ),
        [("timeout", 5, None, None)],
    ),
    "LlamaFactory#8549": (
        (
            "[rank2]:[E704 13:48:58.260494728 ProcessGroupNCCL.cpp:1746] [PG ID 0 PG GUID"
            " 0(default_pg)"
            " Rank 2] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making"
            " progress\n"
        ),
        [("timeout", 2, None, None)],
    ),
    "tusas#149": (
        (
            "slurmstepd: error: Detected 1 oom_kill event in StepId=440575.0. Some of the step"
            " tasks have"
            " been OOM Killed.\n"
            "srun: error: nid001277: tasks 1-3: Out Of Memory\n"
            "srun: Terminating StepId=440575.0\n"
        ),
        [("host-oom", None, None, None), *(("host-oom", task, None, None) for task in (1, 2, 3))],
    ),
    "HAFS#101": (
        "srun: error: Orion-18-69: task 289: Bus error\nsrun: Terminating job step 3495450.0\n",
        [("exit", 289, None, None)],
    ),
    "ArjunaUsers#52": (
        (
            "/var/spool/slurmd/job00191/slurm_script: line 28:  8156 Killed                 "
            " python3 main.py\n"
            "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=191.batch cgroup.\n"
        ),
        [("killed", None, None, None), ("host-oom", None, None, None)],
    ),
    "CPPO#6": (
        (
            "Root Cause (first observed failure):\n[0]:\n  rank      : 0 (local_rank: 0)\n"
            "  exitcode  : -9 (pid: 14750)\n  error_file: <N/A>\n"
            "  traceback : Signal 9 (SIGKILL) received by PID 14750\n"
        ),
        [("exit", None, None, 14750)],
    ),
    "optuna#5138": (
        (
            'Traceback (most recent call last):\n  File "pytorch_distributed.py", line 67, in'
            " wrapped\n"
            "    return f(*args, **kwargs)\n"
            "json.decoder.JSONDecodeError: Extra data: line 1 column 2 (char 1)\n"
        ),
        [("document", None, None, None)],
    ),
    # Torch raises another exception for those whose constructors take more than a text.
    "a worker of a loader": (
        (
            "[rank1]: RuntimeError: Caught JSONDecodeError in DataLoader worker process 0.\n"
            "[rank1]: Original Traceback (most recent call last):\n"
        ),
        [("document", 1, None, None)],
    ),
}


@pytest.mark.parametrize("issue", REAL)
def test_lines_of_logs_in_public_issues(issue: str, tmp_path: Path) -> None:
    text, events = REAL[issue]
    logs = Logs(tmp_path, "*.out")

    logs.write("slurm-17.out", text)

    assert logs.read() == events
