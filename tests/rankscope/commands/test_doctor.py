"""`rankscope doctor`: the installation, the output, the exit status, the store."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from rankscope.collector.read.host_checks import read_newest_checks
from rankscope.collector.store.store import open_store
from rankscope.commands.app import app
from rankscope.doctor.checks.installation import KNOWN_VARIABLES
from rankscope.doctor.checks.table import CHECKS, Section
from rankscope.doctor.host import Host
from rankscope.doctor.places import file_system
from rankscope.doctor.result import State
from tests.support.paths import ROOT
from tests.support.rankscope.recorded_host import RecordedHost, gpu_report

if TYPE_CHECKING:
    from pathlib import Path


def problems(store: Path, **environment: str) -> list[str]:
    """Return the problems that do not depend on this machine: its disk, its C compiler."""
    host = Host(store_url=f"chdb://{store}", environment=environment)
    return [
        f"{outcome.state} {check.name}: {outcome.reason}"
        for check in CHECKS
        if check.section is Section.INSTALLATION and check.name not in {"packages", "extensions"}
        for outcome in check.run(host)
        if outcome.is_deviation and " are free at " not in outcome.reason
    ]


def run(*arguments: str) -> Any:  # noqa: ANN401  # typer's result
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_the_variables_are_those_that_the_sources_read() -> None:
    folders = [ROOT / name for name in ("src", "tracer", "collector", "analysis", "trainer")]
    files = {path.resolve() for folder in folders for path in folder.rglob("*.py")}
    found = {
        name
        for path in files
        if path.name != "installation.py"
        for name in re.findall(r"\bRANKSCOPE_[A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8"))
    }
    assert found | {"RANKSCOPE_TRACE_DIR"} == KNOWN_VARIABLES


def test_a_mistyped_variable_and_a_disabled_tracer_are_named(tmp_path: Path) -> None:
    assert problems(tmp_path / "none") == []

    found = problems(tmp_path / "none", RANKSCOPE_TRACES="/x", RANKSCOPE_DISABLE="1", HOME="/root")

    assert found == [
        "warning variables: RANKSCOPE_DISABLE=1: no job of this environment is traced",
        "warning variables: nothing reads RANKSCOPE_TRACES",
    ]
    assert not (tmp_path / "none").exists()


def test_a_spool_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    (found,) = problems(tmp_path / "none", RANKSCOPE_TRACE=str(tmp_path / "file"))

    assert found.startswith("error spool: ")
    assert found.endswith("is no folder, so nothing is traced")


def test_the_file_system_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    shared = tmp_path / "a b"
    (shared / "deep").mkdir(parents=True)
    mounts = tmp_path / "mounts"
    point = str(shared).replace(" ", r"\040")
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/x {point} nfs4 rw 0 0\n")

    assert file_system(shared / "deep", mounts) == "nfs4"
    assert file_system(tmp_path, mounts) == "ext4"
    assert file_system(tmp_path, tmp_path / "missing") == ""


@pytest.mark.slow
def test_a_store_is_opened_and_one_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    with open_store(f"chdb://{tmp_path}/store"):
        pass
    assert problems(tmp_path / "store") == []

    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "mine.txt").write_text("no store")
    (found,) = problems(tmp_path / "broken")
    assert found.startswith("error store: ")


def test_before_a_job_an_error_drains_the_host(tmp_path: Path) -> None:
    recorded = RecordedHost(tmp_path)
    recorded.output("nvidia-smi -q -x", gpu_report(8))
    arguments = ("--before-job", "--root", str(tmp_path), "--host-name", "gpu07")
    healthy = run(*arguments)
    changes = {3: {"<dram_uncorrectable>0": "<dram_uncorrectable>5"}}
    recorded.output("nvidia-smi -q -x", gpu_report(8, changes=changes))

    drained = run(*arguments)

    assert (healthy.exit_code, healthy.output) == (0, "")
    assert drained.exit_code == 1
    assert drained.stdout == ""
    assert drained.stderr == (
        "gpu07: gpu-ecc, GPU 3: 5 uncorrectable memory errors since the driver was loaded\n"
    )


def test_only_deviations_are_listed_unless_all_are_wanted(tmp_path: Path) -> None:
    recorded = RecordedHost(tmp_path)
    changes = {3: {"failure>No": "failure>Yes"}}
    recorded.output("nvidia-smi -q -x", gpu_report(8, changes=changes))
    arguments = ("--root", str(tmp_path), "--store", f"chdb://{tmp_path}/none", "--host-name", "n")

    short, full = (run(*arguments[:2], *more) for more in ((), ("--verbose",)))

    assert short.exit_code == 1
    assert "gpu-row-remap, GPU 3" in short.stdout
    assert "-> replace the GPU" in short.stdout
    assert "gpu-ecc" not in short.stdout
    assert "gpu-ecc" in full.stdout
    assert all(len(line) <= 120 for line in full.stdout.splitlines() if "://" not in line)


@pytest.mark.slow
def test_results_are_printed_as_one_document_and_stored(tmp_path: Path) -> None:
    recorded = RecordedHost(tmp_path / "root")
    recorded.output("nvidia-smi -q -x", gpu_report(8))
    url = f"chdb://{tmp_path}/store"

    done = run("--json", "--root", str(tmp_path / "root"), "--host-name", "gpu07", "--store", url)

    document = json.loads(done.stdout)
    assert (document["schema"], document["host"]) == (1, "gpu07")
    assert document["num"]["error"] == sum(c["state"] == "error" for c in document["checks"])
    with open_store(url) as store:
        stored = read_newest_checks(store, since_ns=0)
    assert {check.host for check in stored} == {"gpu07"}
    assert len(stored) == len(document["checks"])
    (gpus,) = (check for check in stored if check.name == "gpu-count")
    assert (gpus.state, gpus.value) == (State.HEALTHY, "8 x NVIDIA H100 80GB HBM3")


@pytest.mark.slow
def test_a_driver_that_no_other_host_has_is_a_warning(tmp_path: Path) -> None:
    url = f"chdb://{tmp_path}/store"
    for host in ("gpu06", "gpu07", "gpu08"):
        recorded = RecordedHost(tmp_path / host)
        report = gpu_report(2)
        recorded.output(
            "nvidia-smi -q -x", report.replace("550.54.15", "535.1") if host == "gpu08" else report
        )
        done = run("--root", str(tmp_path / host), "--host-name", host, "--store", url)
        assert ("535.1 here, and 550.54.15 on 2 of 3 hosts" in done.stdout) == (host == "gpu08")
