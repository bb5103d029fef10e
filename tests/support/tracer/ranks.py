"""Ranks of a gloo job, each a process; their common imports are done once.

``python -m tests.support.tracer.ranks MODULE NUM_RANKS FOLDER ...`` imports the module, forks its
ranks, and fails as soon as one of them does.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.support.paths import ROOT

WITHIN_S = 300


def run_ranks(module: str, num_ranks: int, folder: Path, *arguments: str, **environ: str) -> None:
    """Run ``module.main(rank, num_ranks, folder, arguments)`` for each rank; all must end well."""
    parent = subprocess.Popen(
        [sys.executable, "-m", __name__, module, str(num_ranks), str(folder), *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = parent.communicate(timeout=WITHIN_S)
        assert parent.returncode == 0, output
    finally:
        with suppress(ProcessLookupError):  # the whole session is gone
            os.killpg(parent.pid, signal.SIGKILL)


def main(module: str, num_ranks: int, folder: Path, arguments: list[str]) -> None:
    """Fork the ranks and wait for them; in each, run its part and exit as a program does."""
    job = importlib.import_module(module)  # starts no thread, which a fork would lose
    gc.freeze()  # else the first garbage collection of each rank copies the pages that it shares
    ranks: dict[int, int] = {}
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            job.main(rank, num_ranks, folder, arguments)
            return
        ranks[pid] = rank
    while ranks:
        pid, status = os.wait()
        rank = ranks.pop(pid)
        if status != 0:
            sys.exit(f"rank {rank} ended with {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
