"""The scripts of `examples/` under `rankscope run`: the report names their slow rank.

Those of DeepSpeed and Ray Train need packages that are no dependencies of the tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.programs import COMMAND, environment
from tests.support.paths import PYTHON_PATH, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.multiproc, pytest.mark.timeout(600)]

EXAMPLES = ROOT / "examples"
NUM_RANKS, SLOW_RANK = 4, 1
SLOW_S = 0.2
"""By which a forward of the slow rank is longer; `tiny_gpt.be_slow` sleeps."""

TORCHRUN = ("torchrun", "--standalone", f"--nproc-per-node={NUM_RANKS}")


@pytest.mark.parametrize(
    ("name", "launcher", "num_forwards"),
    [
        ("torchrun_ddp", TORCHRUN, 1),
        pytest.param("lightning_fit", ("python",), 1, marks=pytest.mark.nightly),
        pytest.param(
            "accelerate_loop",
            ("accelerate", "launch", "--multi_gpu", f"--num_processes={NUM_RANKS}"),
            2,
            marks=pytest.mark.nightly,
        ),
        pytest.param("hf_trainer", TORCHRUN, 1, marks=pytest.mark.nightly),
        pytest.param("megatron_core", TORCHRUN, 2, marks=pytest.mark.nightly),
    ],
)
def test_the_slow_rank_of_an_example_is_named(
    tmp_path: Path, name: str, launcher: tuple[str, ...], num_forwards: int
) -> None:
    environ = environment(
        tmp_path / "store",
        PYTHONPATH=PYTHON_PATH,
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        XDG_DATA_HOME=str(tmp_path / "data"),
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        ACCELERATE_USE_CPU="true",
        SLOW_RANK=str(SLOW_RANK),
    )
    job = (*launcher, str(EXAMPLES / f"{name}.py"))

    done = subprocess.run(
        [*COMMAND, "run", "--name", name, *job],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert f"rankscope: Rank {SLOW_RANK} " in done.stderr, done.stderr
    report = json.loads(subprocess.check_output([*COMMAND, "analyze", name, "--json"], env=environ))
    found = report["findings"][0]
    assert (found["cause"], found["ranks"]) == ("slow-compute", [SLOW_RANK])
    assert report["world_size"] == NUM_RANKS
    # The other ranks wait for it; on a busy machine they are slow at times, too.
    assert 0.5 < found["saved_s"] / (num_forwards * SLOW_S) < 1.3
