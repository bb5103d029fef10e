"""Faults of a traced process: rows A1, A2, A7, A12 and A16 to A18 of the fault matrix."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from rankscope.tracer.spool import RecordType
from tests.support.paths import ROOT
from tests.support.tracer.reading import count_dropped, only_folder, read_rows, read_spans
from tests.support.tracer.recording import run_script
from tests.support.waiting import wait_until
from tests.tracer.programs import run_python

if TYPE_CHECKING:
    from pathlib import Path


# -- A1, A2: the process dies ---------------------------------------------------


def test_all_records_before_a_kill_are_readable(tmp_path: Path) -> None:
    script = """
        import mmap, sys
        from rankscope import tracer
        tracer.install()
        with open(sys.argv[1], "r+b") as file:
            published = mmap.mmap(file.fileno(), 8)
        for number in range(1, 10**9):
            with tracer.span("x"):
                pass
            published[:] = number.to_bytes(8, "little")
        """
    counter = tmp_path / "published"
    counter.write_bytes(bytes(8))

    def num_published() -> int:
        return int(struct.unpack("<Q", counter.read_bytes())[0])

    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(counter)],
        cwd=ROOT,
        env={**os.environ, "RANKSCOPE_TRACE": str(tmp_path / "spool"), "RANKSCOPE_RUN": "run"},
    )
    wait_until(lambda: num_published() > 1000)
    child.kill()
    child.wait()

    folder = only_folder(tmp_path / "spool")
    assert len(read_spans(folder)) + count_dropped(folder) >= num_published() - 1


def test_a_crash_in_c_keeps_what_was_recorded(tmp_path: Path) -> None:
    done = run_script(
        """
        import ctypes
        from rankscope import tracer
        tracer.install()
        for _ in range(100):
            with tracer.span("x"):
                pass
        ctypes.string_at(0)
        """,
        tmp_path,
    )

    assert done.returncode == -signal.SIGSEGV
    assert len(read_spans(only_folder(tmp_path))) == 100


# -- A7: workers of a data loader -----------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "num_workers"),
    [
        ("fork", 0),
        ("fork", 2),
        ("spawn", 2),
        pytest.param("forkserver", 2, marks=pytest.mark.nightly),
    ],
)
def test_data_loader_workers_do_not_touch_the_records_of_the_parent(
    tmp_path: Path, method: str, num_workers: int
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import torch
            from rankscope import tracer

            class Numbers(torch.utils.data.Dataset):
                def __len__(self):
                    return 16

                def __getitem__(self, index):
                    with tracer.span("item"):
                        return torch.tensor(index)

            if __name__ == "__main__":
                tracer.install()
                loader = torch.utils.data.DataLoader(
                    Numbers(),
                    batch_size=4,
                    num_workers={num_workers},
                    multiprocessing_context={method!r} if {num_workers} else None,
                    persistent_workers={num_workers} > 0,
                )
                tracer.begin_steps()
                for _ in range(2):
                    for batch in loader:
                        with tracer.span("train"):
                            print(batch.tolist())
                    tracer.step()
            """
        )
    )
    environ = {"RANKSCOPE_TRACE": str(tmp_path / "spool"), "RANKSCOPE_RUN": "run"}
    done = run_python(program, **environ)

    assert done.returncode == 0, done.stderr
    assert "rankscope" not in done.stderr
    assert sum(map(len, map(eval, done.stdout.splitlines()))) == 32
    folder = only_folder(tmp_path / "spool")
    names = [row.name for row in read_spans(folder)]
    assert names.count("train") == 8
    assert names.count("item") == (0 if num_workers else 32)
    assert count_dropped(folder) == 0


# -- A12: the end -----------------------------------------------------------------------------


def test_a_process_that_exits_within_a_span_beside_a_busy_thread_ends_in_time(
    tmp_path: Path,
) -> None:
    done = run_script(
        """
        import threading
        from rankscope import tracer
        tracer.install()

        def work():
            while True:
                with tracer.span("beside"):
                    pass

        threading.Thread(target=work, daemon=True).start()
        with tracer.span("around"):
            raise SystemExit(3)
        """,
        tmp_path,
    )

    assert done.returncode == 3
    assert "around" in {row.name for row in read_spans(only_folder(tmp_path))}


# -- A16, A17: turned off, and without the libraries --------------------------------------------


def test_the_off_switch_makes_no_folder_and_one_shared_span(tmp_path: Path) -> None:
    done = run_script(
        """
        from rankscope import tracer
        assert not tracer.install().enabled
        assert tracer.span("x") is tracer.span("y") is tracer.span("z", microbatch=3)
        """,
        tmp_path,
        RANKSCOPE_DISABLE="1",
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []


def test_without_torch_numpy_and_arrow_spans_and_steps_are_recorded(tmp_path: Path) -> None:
    done = run_script(
        """
        import sys
        for name in ("torch", "numpy", "pyarrow"):
            sys.modules[name] = None
        from rankscope import tracer
        assert tracer.install().enabled
        tracer.begin_steps()
        with tracer.span("x"):
            pass
        tracer.step(tokens=4, loss=0.5)
        try:
            import torch
        except ImportError as problem:
            print(problem)
        """,
        tmp_path,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "import of torch halted; None in sys.modules\n"
    folder = only_folder(tmp_path)
    assert not (folder / "events.jsonl").exists()
    assert [row.name for row in read_spans(folder)] == ["x"]
    assert [row.record for row in read_rows(folder)].count(RecordType.STEP) == 1


# -- A18: restarts -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_restarted_rank_writes_into_a_folder_of_its_own(tmp_path: Path) -> None:
    script = """
        import os, signal, sys
        from rankscope import tracer
        tracer.install()
        with tracer.span(os.environ["TORCHELASTIC_RESTART_COUNT"]):
            pass
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        """
    for count, world_size in (("0", "4"), ("1", "2")):
        run_script(
            script,
            tmp_path,
            TORCHELASTIC_RESTART_COUNT=count,
            RANK="1",
            WORLD_SIZE=world_size,
            TORCHELASTIC_RUN_ID="job",
        )

    first, second = sorted((tmp_path / "run").iterdir())
    assert (first.name[:9], second.name[:9]) == ("e0-r00001", "e1-r00001")
    assert not (first / "exit.json").exists()
    assert (second / "exit.json").exists()
    assert [row.name for row in read_spans(first)] == ["0"]
    assert [row.name for row in read_spans(second)] == ["1"]
