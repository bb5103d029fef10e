"""The launcher: a script runs as without it, and is recorded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from rankscope.tracer.spool import STEP, RecordType
from tests.support.paths import PYTHON_PATH, ROOT
from tests.support.ports import fixed_port
from tests.support.tracer.reading import process_folders, read_rows, read_spans
from tests.tracer.programs import run_python

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")

PROBE = """
import pickle, sys, __main__

class Thing:
    pass

print(sys.argv, __name__, __file__, __spec__, __package__, sys.path[0])
print(__main__.Thing is Thing, type(pickle.loads(pickle.dumps(Thing()))) is Thing)
print("torch" in sys.modules, sorted(set(dir()) - {"__annotations__"}))
"""


INTERRUPTED = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
os.kill(os.getpid(), signal.SIGINT)
input()
"""


def run(
    folder: Path, script: str, *options: str, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run ``folder/script.py``, through the launcher if ``options`` say so."""
    (folder / "script.py").write_text(textwrap.dedent(script))
    environ = {"RANKSCOPE_TRACE": "", "RANKSCOPE_RUN": "run", **environ}
    return run_python(*options, folder / "script.py", "--lr", "1 e-3", **environ)


def run_traced(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run ``folder/script.py`` through the launcher, recording into ``folder/spool``."""
    return run(folder, script, "-m", "rankscope.tracer", RANKSCOPE_TRACE=str(folder / "spool"))


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (PROBE, 0),
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('said at the end')", 1),
        ("def f():\n    raise KeyError('lost')\ntry:\n    f()\nexcept KeyError:\n    1 / 0", 1),
        ("import os; os._exit(3)", 3),
        ("this is no python", 1),
        (INTERRUPTED, -signal.SIGINT),
    ],
)
def test_a_script_prints_and_ends_as_without_the_tracer(
    tmp_path: Path, script: str, code: int
) -> None:
    plain, traced = run(tmp_path, script), run_traced(tmp_path, script)

    assert plain.returncode == code
    assert (traced.returncode, traced.stdout) == (code, plain.stdout)
    assert traced.stderr == plain.stderr
    assert len(process_folders(tmp_path / "spool")) == 1


def test_a_module_is_run_too(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import sys\nprint(__name__, sys.argv[1:], __spec__.name)")
    environ = {"RANKSCOPE_TRACE": str(tmp_path / "spool")}
    traced = run_python("-m", "rankscope.tracer", "-m", "job", "a", cwd=tmp_path, **environ)

    assert (traced.returncode, traced.stdout) == (0, "__main__ ['a'] job\n")
    assert len(process_folders(tmp_path / "spool")) == 1


def test_a_default_folder_is_chosen_and_printed(tmp_path: Path) -> None:
    traced = run(tmp_path, "pass", "-m", "rankscope.tracer", TMPDIR=str(tmp_path))

    folder = tmp_path / f"rankscope-{os.getuid()}"
    assert traced.stderr == (
        f"rankscope: recording into {folder} (set RANKSCOPE_TRACE to choose another folder)\n"
    )
    assert len(process_folders(folder)) == 1


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_explains_each_option_and_exits_with_0(tmp_path: Path, flag: str) -> None:
    done = run_python("-m", "rankscope.tracer", flag, RANKSCOPE_TRACE=str(tmp_path / "spool"))

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: python -m rankscope.tracer SCRIPT [ARGS...]\n")
    for option in ("SCRIPT", "-m MODULE", "--running [SPOOL]", "-h, --help", "RANKSCOPE_TRACE"):
        assert f"\n  {option} " in done.stdout
    assert not (tmp_path / "spool").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no script given; see python -m rankscope.tracer --help"),
        (["-m"], "-m needs the name of a module; see python -m rankscope.tracer --help"),
        (["--runing"], "unknown option '--runing'; see python -m rankscope.tracer --help"),
        (
            ["--running", "a", "b"],
            "--running takes one folder at most; see python -m rankscope.tracer --help",
        ),
        (["no such file.py"], "can't open 'no such file.py': No such file or directory"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    environ = {"RANKSCOPE_TRACE": str(tmp_path / "spool")}
    done = run_python("-m", "rankscope.tracer", *arguments, **environ)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"rankscope: {message}\n"
    assert not (tmp_path / "spool").exists()


ABORTED_AT_EXIT = "terminate called without an active exception"
"""A line that torch prints at times when a process ends on a busy machine, traced or not."""

MOST_ABORTS = 2


@pytest.mark.multiproc
def test_torchrun_traces_a_script_without_an_edit(tmp_path: Path) -> None:
    def job(*options: str) -> tuple[list[str], Path]:
        number = 0
        while True:
            spool = tmp_path / f"spool-{number}"
            script = ROOT / "tests/tracer/jobs/plain_job.py"
            environ = {"RANKSCOPE_TRACE": str(spool)}
            done = run_python(*TORCHRUN, *options, script, "3", cwd=tmp_path, **environ)
            number += 1
            if number > MOST_ABORTS or ABORTED_AT_EXIT not in done.stderr:
                break
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        return sorted(line for line in lines if "peer ranks" not in line), spool  # gloo's line

    (plain, _), (traced, spool) = job(), job("-m", "rankscope.tracer")

    assert traced == plain  # the losses, bit-identical
    assert len(plain) == 6
    folders = process_folders(spool)
    assert sorted(folders) == [0, 1]
    for folder in folders.values():
        steps = [row for row in read_rows(folder) if row.record == RecordType.STEP]
        assert [(row.step, STEP.unpack(row.second)[0]) for row in steps] == [(0, 8), (1, 8), (2, 8)]
        spans = read_spans(folder)
        by_step = [
            sorted({row.kind for row in spans if row.step == step and row.kind != "host"})
            for step in range(3)
        ]
        assert all({"forward", "backward", "optimizer", "data"} <= set(kinds) for kinds in by_step)
        reduced = [row.seq for row in spans if row.name == "all_reduce"]
        assert len(reduced) == 3
        assert "init_process_group" in {row.name for row in spans}


@pytest.mark.multiproc
@pytest.mark.nightly
def test_hosts_without_a_run_id_agree_on_one(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    port = fixed_port()
    kept = {name: value for name, value in os.environ.items() if name != "RANKSCOPE_RUN"}
    agents = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2"),
                *(f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}"),
                *("--nproc-per-node=1", "-m", "rankscope.tracer", str(tmp_path / "script.py")),
            ],
            cwd=tmp_path,
            env={**kept, "PYTHONPATH": PYTHON_PATH, "RANKSCOPE_TRACE": str(tmp_path / "spool")},
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    notices = [agent.communicate(timeout=240)[1] for agent in agents]

    assert [agent.returncode for agent in agents] == [0, 0], notices
    (run_folder,) = (tmp_path / "spool").iterdir()
    assert len(list(run_folder.iterdir())) == 2
    assert f"rankscope: recording run {run_folder.name}\n" in notices[0]
    assert "rankscope" not in notices[1]
