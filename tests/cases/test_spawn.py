"""Ranks that a script starts itself, and names of runs of torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from rankscope.commands.check_spool import check_text
from tests.cases.reports import CASES, analyze_spool
from tests.support.ports import fixed_port

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

LAUNCHER = (sys.executable, "-m", "rankscope.tracer")


def run(folder: Path, *command: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command that records into a spool."""
    return subprocess.run(
        command,
        env={**os.environ, "RANKSCOPE_TRACE": str(folder / "spool"), **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def sums(output: str) -> list[str]:
    return sorted(re.findall(r"sum (\S+)", output))


@pytest.mark.nightly
def test_ranks_of_mp_spawn_are_traced_and_their_loader_workers_are_none(tmp_path: Path) -> None:
    script = CASES / "jobs" / "d_spawn.py"
    port = {"MP": str(fixed_port())}

    plain = run(tmp_path, sys.executable, script, RANKSCOPE_DISABLE="1", **port)
    traced = run(tmp_path, *LAUNCHER, script, RANKSCOPE_RUN="spawned", **port)

    assert (traced.returncode, sums(traced.stdout)) == (0, sums(plain.stdout)), traced.stderr
    spool = tmp_path / "spool"
    folders = sorted(path.name[:9] for path in (spool / "spawned").iterdir())
    assert folders == ["e0-r00000", "e1-r00000", "e1-r00001"]
    report = analyze_spool(tmp_path, spool, "spawned")
    assert (report.world_size, report.layout.dp) == (2, 2)
    assert sorted((*report.steps, *report.warmup_steps)) == list(range(16))
    assert not check_text(spool, run_id=None, as_json=False)[1]


PROCESSES = """
import multiprocessing, sys, torch
from torch.distributed import init_process_group, barrier, destroy_process_group
def train(rank, port):
    address = f"tcp://127.0.0.1:{port}"
    init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight])
    for step in range(6):
        barrier()
        weight.sum().backward()
        optimizer.step()
    if rank == 1 and "fail" in sys.argv:
        raise ValueError("bad batch")
    barrier()
    destroy_process_group()
if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    ranks = [context.Process(target=train, args=(rank, sys.argv[2])) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    sys.exit(max(each.exitcode for each in ranks))
"""


# The exception of a spawned rank is traced below.
@pytest.mark.parametrize(
    "method",
    ["fork", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("spawn", "forkserver"))],
)
def test_ranks_of_multiprocessing_are_traced(tmp_path: Path, method: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROCESSES)

    done = run(tmp_path, *LAUNCHER, script, method, str(fixed_port()), RANKSCOPE_RUN="job")

    assert done.returncode == 0, done.stderr
    report = analyze_spool(tmp_path, tmp_path / "spool", "job")
    assert (report.world_size, len((*report.steps, *report.warmup_steps))) == (2, 6)


def test_the_exception_of_a_spawned_rank_is_the_crash(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROCESSES)

    done = run(tmp_path, *LAUNCHER, script, "spawn", str(fixed_port()), "fail", RANKSCOPE_RUN="job")

    assert done.returncode == 1
    top = analyze_spool(tmp_path, tmp_path / "spool", "job").top_finding
    assert (top.cause, top.ranks) == ("crash", (1,))
    assert "bad batch" in top.evidence


TORCHRUN = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weight])
for step in range(3):
    dist.barrier()
    weight.sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--standalone"], r"fine-tune-[0-9]{8}-[0-9]{4}"),
        pytest.param(
            ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-id=mine"],
            "mine",
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["without a name", "named"],
)
def test_a_run_of_torchrun_is_called_after_its_script_and_printed_once(
    tmp_path: Path, options: list[str], name: str
) -> None:
    script = tmp_path / "fine-tune.py"
    script.write_text(TORCHRUN)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *options)

    done = run(tmp_path, *torchrun, "-m", "rankscope.tracer", script)

    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "spool").iterdir()
    assert re.fullmatch(name, folder.name)
    assert len(list(folder.iterdir())) == 2
    notices = re.findall(r"rankscope: recording run (\S+)", done.stderr)
    assert notices == ([] if name == "mine" else [folder.name])
