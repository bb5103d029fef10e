"""Permissions of what the tracer writes, and places that another user has prepared."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from rankscope.tracer.install import create_process_folder
from rankscope.tracer.record.exit_record import ended_record, write_exit, write_json
from tests.support.tracer.reading import process_folders
from tests.support.tracer.recording import recorder_in, run_script
from tests.tracer.programs import run_python

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

OTHER_USER = 65_534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")


@pytest.fixture(autouse=True)
def _open_umask() -> Iterator[None]:
    """The mask of a job that would let others write."""
    before = os.umask(0)
    yield
    os.umask(before)


def launch(folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a script through the launcher, without RANKSCOPE_TRACE."""
    script = folder / "script.py"
    script.write_text("print('the job runs')")
    own = {"RANKSCOPE_TRACE": "", "RANKSCOPE_RUN": "run", "TMPDIR": str(folder)}
    return run_python("-m", "rankscope.tracer", script, **own, **environ)


def make_for_another_user(folder: Path) -> None:
    folder.mkdir()
    os.chown(folder, OTHER_USER, OTHER_USER)


def modes(folder: Path) -> dict[str, int]:
    """Return the permissions of a folder and of all that is in it, by path."""
    paths = [folder, *folder.rglob("*")]
    return {str(path.relative_to(folder)): path.stat().st_mode & 0o7777 for path in paths}


def test_only_the_user_can_open_the_folders_and_no_other_user_a_file(tmp_path: Path) -> None:
    done = run_script(
        "from rankscope import tracer\ntracer.install()\ntracer.event('note', 'x')\n"
        "with tracer.span('a'):\n    pass",
        tmp_path / "spool",
    )
    assert done.returncode == 0, done.stderr

    found = modes(tmp_path / "spool")

    assert {"manifest.json", "process.rsp", "events.jsonl", "exit.json"} <= {
        path.rpartition("/")[2] for path in found
    }
    folders = [mode for path, mode in found.items() if path.count("/") < 2]
    assert folders == [0o700] * 3
    assert {mode for path, mode in found.items() if path.count("/") == 2} == {0o440, 0o640}


def test_the_group_of_a_shared_spool_can_read_and_delete(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    spool.mkdir()
    spool.chmod(0o2770)
    os.umask(0o077)

    folder = create_process_folder(spool, "run", "process")

    assert modes(folder.parent) == {".": 0o2770, "process": 0o2770}
    assert folder.stat().st_gid == spool.stat().st_gid


def test_a_default_folder_that_others_could_write_is_made_private(tmp_path: Path) -> None:
    folder = tmp_path / f"rankscope-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)

    assert "recording into" in launch(tmp_path).stderr

    assert folder.stat().st_mode & 0o7777 == 0o700
    assert len(process_folders(folder)) == 1


@pytest.mark.parametrize(
    "prepare",
    [
        lambda folder: folder.symlink_to(folder.with_name("elsewhere")),
        lambda folder: folder.symlink_to("missing"),
        lambda folder: folder.touch(),
        pytest.param(make_for_another_user, marks=as_root),
    ],
    ids=["link", "dangling link", "file", "folder of another user"],
)
def test_a_default_folder_that_another_user_may_have_made_is_not_used(
    tmp_path: Path, prepare: Callable[[Path], object]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    prepare(tmp_path / f"rankscope-{os.getuid()}")

    first, second = launch(tmp_path), launch(tmp_path, LOCAL_RANK="1")

    for done in (first, second):
        assert (done.returncode, done.stdout) == (0, "the job runs\n")
    (line,) = first.stderr.splitlines()
    assert line.startswith("rankscope: not tracing: ")
    assert line.endswith("set RANKSCOPE_TRACE to choose another folder")
    assert second.stderr == ""
    assert not (tmp_path / "missing").exists()
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize(
    "prepare",
    [
        lambda run: run.symlink_to(run.with_name("elsewhere")),
        pytest.param(make_for_another_user, marks=as_root),
    ],
    ids=["link", "folder of another user"],
)
def test_the_folder_of_a_run_that_another_user_made_is_not_used(
    tmp_path: Path, prepare: Callable[[Path], object]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    prepare(tmp_path / "run")

    done = run_script("from rankscope import tracer\ntracer.install()", tmp_path)

    assert done.returncode == 0
    assert "another user: choose another folder or run name" in done.stderr
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_file_is_not_written_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in (".manifest.json.new", ".exit.json.new", "events.jsonl"):
        (folder / name).symlink_to(victim)

    with pytest.raises(OSError, match="symbolic links"):
        write_json(folder / "manifest.json", {})
    write_exit(folder, ended_record(1))
    recorder = recorder_in(folder)
    recorder.event("note", "text", {})
    recorder.shutdown()

    assert victim.read_text() == "precious"
