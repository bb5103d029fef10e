"""Files for hosts: systemd units, Slurm scripts, the Helm chart."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
import typer.main
import yaml

from rankscope.commands.app import app
from tests.deploy.files import DEPLOY
from tests.support.missing_tools import skip_for_missing

if TYPE_CHECKING:
    from pathlib import Path

CHART = DEPLOY / "helm" / "rankscope"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


def flags_of(command: str) -> set[str]:
    known = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    return {option for parameter in known.params for option in parameter.opts}


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_is_valid_and_its_command_and_variables_exist(unit: Path, tmp_path: Path) -> None:
    text = unit.read_text(encoding="utf-8")
    (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    program, command, *arguments = shlex.split(line)
    (listed,) = re.findall(r"^EnvironmentFile=/etc/rankscope/(\S+)$", text, re.MULTILINE)
    variables = re.findall(r"^(\w+)=", (unit.parent / listed).read_text(), re.MULTILINE)

    assert {flag for flag in arguments if flag.startswith("--")} <= flags_of(command)
    assert set(re.findall(r"\$\{?(\w+)", line)) <= set(variables)
    if shutil.which("systemd-analyze") is None:
        skip_for_missing("there is no systemd-analyze: install systemd")
    # It checks that programs exist: those of an installation are in another place here.
    copy = tmp_path / unit.name
    copy.write_text(text.replace(program, "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"], "SYSTEMD_LOG_LEVEL": "warning"},
    )
    assert [line for line in done.stderr.splitlines() if unit.name in line] == []


def run_script(name: str, **variables: str) -> int:
    command = ["bash", str(DEPLOY / "slurm" / name)]
    environment = {"PATH": os.environ["PATH"], **variables}
    return subprocess.run(command, env=environment, check=False, timeout=60).returncode


@pytest.mark.multiproc
@pytest.mark.parametrize(("answer", "status"), [(0, 0), (1, 1), (2, 0), (124, 0)])
def test_the_prolog_makes_the_spool_and_drains_a_host_with_an_error_only(
    answer: int, status: int, tmp_path: Path
) -> None:
    command = tmp_path / "rankscope"
    command.write_text(f'#!/bin/sh\n[ "$*" = "doctor --before-job" ] && exit {answer}\nexit 77\n')
    command.chmod(0o755)
    spools = tmp_path / "spools"

    done = run_script("prolog.sh", RANKSCOPE_COMMAND=str(command), RANKSCOPE_SPOOLS=str(spools))

    assert done == status
    assert spools.stat().st_mode & 0o7777 == 0o1777


@pytest.mark.multiproc
@pytest.mark.parametrize("is_sent", [True, False])
def test_the_epilog_removes_the_spool_of_its_job_once_all_is_sent(
    is_sent: bool,  # noqa: FBT001  # a parameter of the test
    tmp_path: Path,
) -> None:
    for run in ("12", "13"):
        process = tmp_path / run / "e0-r00000-0"
        process.mkdir(parents=True)
        (process / "names.rsp").touch()
    if not is_sent:
        (tmp_path / "12" / "e0-r00000-0" / "seg-00000000.rsp").touch()

    status = run_script(
        "epilog.sh", SLURM_JOB_ID="12", RANKSCOPE_SPOOLS=str(tmp_path), RANKSCOPE_EPILOG_TRIES="1"
    )

    assert status == 0
    assert (tmp_path / "12").exists() != is_sent
    assert (tmp_path / "13").exists()


def test_the_job_script_is_bash() -> None:
    done = subprocess.run(["bash", "-n", str(DEPLOY / "slurm" / "train.sbatch")], check=False)
    assert done.returncode == 0


def test_the_charts_templates_read_values_that_exist_and_pass_flags_that_exist() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    templates = {path.stem: path.read_text() for path in (CHART / "templates").iterdir()}

    for text in templates.values():
        for name in set(re.findall(r"\.Values\.([\w.]+)", text)):
            place = values
            for key in name.split("."):
                assert key in place, name
                place = place[key]
    for stem, command in (("agent", "agent"), ("collector", "serve"), ("dashboard", "serve")):
        assert set(re.findall(r"^ +- (--[\w-]+)", templates[stem], re.MULTILINE)) <= flags_of(
            command
        )
