from __future__ import annotations

import os
import re
import subprocess
import sys
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.tracer.job.identity import RUN_ID, clean_run_id, read_identity


@pytest.mark.parametrize("run_id", ["a", "run-7", "2026.01_x", "A" * 63])
def test_a_valid_run_id_is_unchanged(run_id: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert clean_run_id(run_id) == run_id
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "run_id", ["../../etc", "a/b", ".hidden", "-x", "A" * 64, "run\n", "a\0b", "ünder", " "]
)
def test_an_invalid_run_id_is_cleaned_with_a_notice(
    run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cleaned = clean_run_id(run_id)

    assert RUN_ID.fullmatch(cleaned)
    said = capsys.readouterr().err
    assert repr(cleaned) in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("run_id", [4711, UUID(int=7)])
def test_a_run_id_that_is_no_text_is_converted(run_id: object) -> None:
    assert clean_run_id(run_id) == str(run_id)


@pytest.mark.slow
@given(st.text(), st.text())
def test_cleaning_keeps_different_names_different(one: str, other: str) -> None:
    assert RUN_ID.fullmatch(clean_run_id(one))
    assert (clean_run_id(one) == clean_run_id(other)) == (one == other)


@pytest.mark.parametrize(
    ("environ", "run_id"),
    [
        ({"RANKSCOPE_RUN": "mine", "TORCHELASTIC_RUN_ID": "theirs"}, "mine"),
        ({"TORCHELASTIC_RUN_ID": "elastic", "SLURM_JOB_ID": "77"}, "elastic"),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "77"}, "77"),
    ],
)
def test_the_more_specific_run_name_takes_precedence(environ: dict[str, str], run_id: str) -> None:
    identity = read_identity(None, environ)

    assert (identity.run_id, identity.is_generated) == (run_id, False)


def test_the_jobs_run_name_takes_precedence_over_the_environment() -> None:
    assert read_identity("here", {"RANKSCOPE_RUN": "there"}).run_id == "here"


@pytest.mark.parametrize(
    ("environ", "epoch"),
    [
        ({}, 0),
        ({"TORCHELASTIC_RESTART_COUNT": "2"}, 2),
        ({"TORCHELASTIC_RESTART_COUNT": "2", "RANKSCOPE_EPOCH": "5"}, 5),
        ({"RANKSCOPE_EPOCH": "nonsense"}, 0),
    ],
)
def test_the_epoch_is_the_restart_count(environ: dict[str, str], epoch: int) -> None:
    assert read_identity("run", environ).epoch == epoch


def test_rank_and_world_come_from_the_launcher() -> None:
    identity = read_identity("run", {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"})

    assert (identity.rank, identity.world_size, identity.local_rank) == (5, 8, 1)
    assert identity.pid == os.getpid()


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ("SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=8 SLURM_LOCALID=1 SLURM_NTASKS=8", (5, 8, 1)),
        ("OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1", (5, 8, 1)),
        # A batch script, which no srun started; torchrun under srun.
        ("SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_LOCALID=0", (0, 1, 0)),
        ("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 RANK=5 WORLD_SIZE=8 LOCAL_RANK=1", (5, 8, 1)),
    ],
)
def test_ranks_of_other_launchers_are_read(environ: str, place: tuple[int, int, int]) -> None:
    identity = read_identity("run", dict(pair.split("=") for pair in environ.split()))

    assert (identity.rank, identity.world_size, identity.local_rank) == place


def test_processes_of_one_launcher_generate_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/me/train.py", "--lr", "1"])
    names = {
        read_identity(None, {"RANK": str(rank), "WORLD_SIZE": "4"}).run_id for rank in range(4)
    }

    (name,) = names
    assert RUN_ID.fullmatch(name)
    assert re.fullmatch(r"train-[0-9]{8}-[0-9]{4}", name)


GENERATED = {"TORCHELASTIC_RUN_ID": str(uuid4()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "run_id"),
    [
        (GENERATED, "train-"),
        ({**GENERATED, "SLURM_JOB_ID": "77"}, "77"),
        ({**GENERATED, "TORCHELASTIC_RUN_ID": "101"}, "101"),
        ({**GENERATED, "WORLD_SIZE": "4"}, GENERATED["TORCHELASTIC_RUN_ID"]),  # all hosts have it
    ],
    ids=["generated", "slurm", "given", "given to several hosts"],
)
def test_an_id_that_torchrun_generated_is_no_name(
    environ: dict[str, str], run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])

    assert read_identity(None, environ).run_id.startswith(run_id)


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["/opt/my jobs/fine tune.py"], "fine-tune"),
        (["/opt/pretrain/__main__.py", "x"], "pretrain"),
        (["/usr/lib/ipykernel_launcher.py", "-f"], "notebook"),
        (["-c"], "run"),
        ([""], "run"),
        ([], "run"),
    ],
)
def test_a_generated_name_is_that_of_the_script(
    argv: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", argv)

    assert re.fullmatch(rf"{name}-[0-9]{{8}}-[0-9]{{4}}", read_identity(None, {}).run_id)


def test_a_shell_between_torchrun_and_its_ranks_changes_neither_name_nor_key() -> None:
    code = (
        "import os; from rankscope.tracer.job.identity import read_identity as r;"
        " i = r(None, os.environ); print(i.run_id, i.job)"
    )
    command = [sys.executable, "-c", code]
    environ = {**os.environ, **GENERATED, "RANK": "1"}

    outputs = {
        subprocess.check_output(each, env=environ, text=True)
        for each in (command, ["sh", "-c", '"$@"; true', "sh", *command])
    }

    assert len(outputs) == 1


def launch(rank: int, **more: str) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "RANKSCOPE_RUN": "fixed", **more}


def test_ranks_of_one_torchrun_have_the_same_key_of_their_launch() -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "101", "LOCAL_WORLD_SIZE": "2"}
    jobs = {read_identity(None, launch(rank, **torchrun)).job for rank in range(2)}

    (job,) = jobs
    assert job


def test_each_slurm_step_and_each_requeue_is_a_launch_of_its_own() -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}

    assert [
        read_identity(None, launch(0, **step)).job,
        read_identity(None, launch(1, **step)).job,
        read_identity(None, launch(0, **step, SLURM_RESTART_COUNT="1")).job,
    ] == ["slurm-7.0.0", "slurm-7.0.0", "slurm-7.0.1"]


def test_ranks_that_cannot_agree_have_no_key() -> None:
    assert read_identity(None, launch(0)).job == ""


def test_hosts_of_one_torchrun_agree_through_its_store() -> None:
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torchrun = {
        "TORCHELASTIC_RUN_ID": "101",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }

    jobs = {read_identity(None, launch(rank, **torchrun)).job for rank in range(2)}

    assert jobs == {store.get("rankscope/job").decode()}
