"""The scripts of `examples/` under `rankscope run`: the report names their slow rank.

Those of DeepSpeed and Ray Train need packages that are no dependencies of the tests.
"""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest

from rankscope.commands.analyze import AnalyzeOptions, analyze_stored
from tests.integration.programs import COMMAND, job_environment
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.nightly,  # test_run_command.py runs the first example in each run of the tests
    pytest.mark.slow,
    pytest.mark.multiproc,
    pytest.mark.timeout(600),
]

EXAMPLES = ROOT / "examples"
NUM_RANKS, SLOW_RANK = 4, 1
SLOW_S = 0.2
"""By which a forward of the slow rank is longer; `tiny_gpt.be_slow` sleeps."""

TORCHRUN = ("torchrun", "--standalone", f"--nproc-per-node={NUM_RANKS}")


@pytest.mark.parametrize(
    ("name", "launcher", "num_forwards"),
    [
        ("torchrun_ddp", TORCHRUN, 1),
        ("lightning_fit", ("python",), 1),
        (
            "accelerate_loop",
            ("accelerate", "launch", "--multi_gpu", f"--num_processes={NUM_RANKS}"),
            2,
        ),
        ("hf_trainer", TORCHRUN, 1),
        ("megatron_core", TORCHRUN, 2),
    ],
)
def test_the_slow_rank_of_an_example_is_named(
    tmp_path: Path, name: str, launcher: tuple[str, ...], num_forwards: int
) -> None:
    environ = job_environment(
        tmp_path,
        GLOO_SOCKET_IFNAME="lo",
        ACCELERATE_USE_CPU="true",
        SLOW_RANK=str(SLOW_RANK),
    )

    done = subprocess.run(
        [*COMMAND, "run", "--name", name, *launcher, str(EXAMPLES / f"{name}.py")],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert f"rankscope: Rank {SLOW_RANK} " in done.stderr, done.stderr
    options = AnalyzeOptions(run_id=name, as_json=True, store_url=environ["RANKSCOPE_STORE"])
    report = json.loads(analyze_stored(options))
    found = report["findings"][0]
    assert (found["cause"], found["ranks"]) == ("slow-compute", [SLOW_RANK])
    assert report["world_size"] == NUM_RANKS
    # The other ranks wait for it; on a busy machine they are slow at times, too.
    assert 0.5 < found["saved_s"] / (num_forwards * SLOW_S) < 1.3
