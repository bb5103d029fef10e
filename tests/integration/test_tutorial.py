"""The tutorial, command by command: the slow rank, its cause, and what the fix gained."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.integration.programs import job_environment
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.multiproc]

PAGE = ROOT / "docs" / "tutorial.md"
FENCE = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMANDS = "".join(FENCE.findall(PAGE.read_text(encoding="utf-8"))).splitlines()
INSTALLING = ("python3 -m venv", "source ", "pip install", "cp -r examples", "cd ")
"""What the test has done already; `tests/installed` installs."""


@pytest.mark.timeout(900)
def test_the_tutorial_leads_from_the_slow_job_to_its_fix(tmp_path: Path) -> None:
    # GIVEN a copy of its scripts, and the commands of this checkout
    folder = tmp_path / "tutorial"
    shutil.copytree(ROOT / "examples" / "tutorial", folder)
    variables = job_environment(tmp_path)

    def run(command: str) -> str:
        done = subprocess.run(
            command,
            shell=True,
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    # WHEN they are typed in the order of the page
    assert "rankscope serve" in COMMANDS  # it ends at Ctrl-C: `test_serve.py` has it
    output = {
        command: " ".join(run(command).split())
        for command in COMMANDS
        if command != "rankscope serve" and not command.startswith(INSTALLING)
    }

    # THEN the verdict names the rank and its cause, and the fix makes the step faster
    (slow, fixed) = (said for command, said in output.items() if " run --name" in command)
    assert "Rank 2 (dp 2, stage 0) waits for input" in slow
    assert "Rank 2 (dp 2, stage 0) waits for input" not in fixed
    assert "shard-2.bin.xz" in output["ls -l data"]
    assert "rank 2 (dp 2, stage 0" in output["rankscope analyze slow --rank 2"]
    assert re.match(r"fixed against slow: a step is \d+ % faster", output[COMMANDS[-1]])
    document = json.loads(run("rankscope compare slow fixed --json"))
    assert document["step_change"]["ratio"] < 0.8
