"""Logs of ranks in the forms of torchrun, srun and Slurm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.collector.host.rank_logs import MAX_EVENTS_A_CLASS, RankLogSource

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
        ("exit", 6, None, None),
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
    assert logs.source.num_events_left_out == 1000 - MAX_EVENTS_A_CLASS


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
