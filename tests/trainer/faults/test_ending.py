from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from rankscope.trainer.errors import PlantedCrashError
from rankscope.trainer.faults.ending import die
from rankscope.trainer.faults.spec import CrashKind


def test_an_exception_names_rank_and_step() -> None:
    with pytest.raises(PlantedCrashError, match="rank 3 was to fail in step 7"):
        die(CrashKind.EXCEPTION, rank=3, step=7)


def test_memory_runs_out_for_real() -> None:
    with pytest.raises(MemoryError):
        die(CrashKind.HOST_OOM, rank=3, step=7)


@pytest.mark.parametrize(
    ("kind", "status"), [(CrashKind.EXIT, 1), (CrashKind.KILL, -signal.SIGKILL)]
)
def test_a_process_goes_without_a_word(kind: CrashKind, status: int) -> None:
    program = (
        "from rankscope.trainer.faults.ending import die;"
        " from rankscope.trainer.faults.spec import CrashKind;"
        f" die(CrashKind({str(kind)!r}), rank=0, step=0)"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)

    assert (done.returncode, done.stderr) == (status, b"")
