"""A restart by torchrun after a rank died: two incarnations of one run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.tracer.spool import PROCESS_FILE, PROCESS_MAGIC, RecordType, read_header
from tests.support.paths import ROOT
from tests.support.tracer.reading import Row, read_rows

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]


WITHIN_S = 240


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the job and return the folder of its run."""
    folder: Path = tmp_path_factory.mktemp("restart")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    where = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=elastic"]
    with subprocess.Popen(
        [*launcher, *where, "--max-restarts=1", "-m", "tests.tracer.jobs.restart_job"],
        cwd=ROOT,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "RANKSCOPE_TRACE": str(folder),
            # In a store that both incarnations share, gloo would find addresses of the first.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            _, problems = process.communicate(timeout=WITHIN_S)
        finally:
            process.terminate()  # torchrun ends its ranks, which have their own sessions
    assert process.returncode == 0, problems
    return folder / "elastic"


def manifests(run: Path) -> dict[tuple[int, int], tuple[Path, dict[str, Any]]]:
    found = {}
    for path in run.glob("*/manifest.json"):
        manifest = json.loads(path.read_text())
        key = manifest["epoch"], manifest["rank"]
        assert key not in found
        found[key] = path.parent, manifest
    return found


def steps_of(folder: Path) -> list[int]:
    return [row.step for row in read_rows(folder) if row.record == RecordType.STEP]


def communications(folder: Path) -> list[Row]:
    return [row for row in read_rows(folder) if row.group_id and row.kind != "wait"]


def test_each_incarnation_is_one_epoch_on_all_ranks(run: Path) -> None:
    found = manifests(run)

    assert sorted(found) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {manifest["run_id"] for _, manifest in found.values()} == {"elastic"}
    uuids = set()
    for (epoch, rank), (folder, _) in found.items():
        data = (folder / PROCESS_FILE).read_bytes()
        header = read_header(data, magic=PROCESS_MAGIC, path=folder)
        assert (header.epoch, header.rank) == (epoch, rank)
        uuids.add(header.process_uuid)
    assert len(uuids) == 4


def test_the_old_incarnation_keeps_its_records_and_has_no_exit_record(run: Path) -> None:
    found = manifests(run)

    for rank in (0, 1):
        assert steps_of(found[0, rank][0]) == [0, 1]
    # Rank 0 was ended by torchrun or by the broken connection, whichever came first.
    dead, survivor = (found[0, rank][0] / "exit.json" for rank in (1, 0))
    assert not dead.exists()
    assert not survivor.exists() or json.loads(survivor.read_text())["state"] == "failed"
    for rank in (0, 1):
        folder, _ = found[1, rank]
        assert steps_of(folder) == [0, 1, 2]
        assert json.loads((folder / "exit.json").read_text())["state"] == "ended"


def test_numbers_of_communications_restart_and_agree_in_each_epoch(run: Path) -> None:
    found = manifests(run)

    for epoch, finished in ((0, 2), (1, 3)):
        by_rank = []
        for rank in (0, 1):
            rows = communications(found[epoch, rank][0])
            by_rank.append([(row.group_id, row.seq) for row in rows if row.step < finished])
        assert [seq for _, seq in by_rank[0]] == list(range(finished))
        assert by_rank[0] == by_rank[1]
