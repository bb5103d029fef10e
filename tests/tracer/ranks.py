"""Run the ranks of a gloo job, each a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.tracer.recording import ROOT

if TYPE_CHECKING:
    from pathlib import Path

WITHIN_S = 300


def run_ranks(module: str, num_ranks: int, folder: Path, *arguments: str, **environ: str) -> None:
    """Run ``python -m module RANK NUM_RANKS FOLDER ARGUMENTS`` for each rank; all must end well."""
    command = [sys.executable, "-m", module]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(num_ranks), str(folder), *arguments],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        for rank, process in enumerate(ranks):
            output, _ = process.communicate(timeout=WITHIN_S)
            assert process.returncode == 0, f"rank {rank}:\n{output}"
    finally:
        for process in ranks:
            process.kill()
