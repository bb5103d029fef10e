from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from rankscope import tracer
from rankscope.tracer.topology import Coords, Layout
from tests.support.paths import ROOT
from tests.support.tracer.reading import only_folder, read_spans
from tests.support.tracer.recording import run_script

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.tracer.record.interface import Tracer


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANKSCOPE_TRACE", "RANKSCOPE_RUN", "RANKSCOPE_DISABLE", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_folder_nothing_is_recorded() -> None:
    assert tracer.install() is tracer.NOOP_TRACER
    with tracer.span("unrecorded"):
        tracer.begin_steps()
        tracer.microbatch(0)
        tracer.event("note", "unrecorded")
        tracer.step(tokens=1, loss=0.5)
    tracer.shutdown()


def test_a_second_install_returns_the_first_tracer_and_after_shutdown_a_new_one(
    tmp_path: Path,
) -> None:
    first = tracer.install(spool=tmp_path, run="twice")
    assert tracer.install(spool=tmp_path, run="other") is first
    tracer.shutdown()
    tracer.shutdown()
    second = tracer.install(spool=tmp_path, run="twice")
    with tracer.span("again"):
        pass
    tracer.shutdown()

    assert second is not first
    assert len(list((tmp_path / "twice").iterdir())) == 2


def test_threads_that_install_at_once_get_one_tracer_and_one_folder(tmp_path: Path) -> None:
    everyone = threading.Barrier(8)
    got: list[Tracer] = []

    def install() -> None:
        everyone.wait()
        got.append(tracer.install(spool=tmp_path, run="run"))

    threads = [threading.Thread(target=install) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    installed = tracer.current_tracer()
    tracer.shutdown()

    assert installed.enabled
    assert {id(one) for one in got} <= {id(installed), id(tracer.NOOP_TRACER)}
    assert only_folder(tmp_path).is_dir()


def test_a_folder_that_cannot_be_written_leaves_the_job_untraced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")

    assert tracer.install(spool=blocked, run="run") is tracer.NOOP_TRACER
    said = capsys.readouterr().err
    assert said.startswith("rankscope: not tracing this process: ")
    assert said.count("\n") == 1


def test_the_sample_of_the_documents_declares_layout_and_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "11")
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("RANKSCOPE_RUN", "declared")
    text = (ROOT / "docs" / "tracer.md").read_text(encoding="utf-8")
    sample = text.split("\n## Declare the layout\n")[1].split("```python\n")[1].split("```")[0]
    assert "/dev/shm/spool" in sample

    exec(sample.replace("/dev/shm/spool", str(tmp_path)), {})
    tracer.shutdown()

    manifest = json.loads((only_folder(tmp_path) / "manifest.json").read_text())
    assert {name: manifest["layout"][name] for name in ("pp", "dp", "tp")} == {
        "pp": 2,
        "dp": 4,
        "tp": 2,
    }
    assert manifest["coords"] == {"dp": 1, "tp": 1, "pp": 1, "cp": 0, "ep": 0}


def test_the_manifest_contains_what_the_job_declared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    endless: list[object] = []
    endless.append(endless)
    tracer.install(
        spool=tmp_path,
        run="declared",
        layout=Layout(pp=2, dp=2, tp=2),
        coords=Coords(pp=0, dp=1, tp=1),
        model_name="llama-toy",
        flops_per_token=6e9,
        flops_convention="6N",
        device_name="cpu",
        dtype="float32",
        config={"lr": 1e-3, "endless": endless, "object": object()},
        seeds={"weights": 7},
    )
    tracer.shutdown()

    folder = only_folder(tmp_path)
    text = (folder / "manifest.json").read_text()
    manifest = json.loads(text)
    assert folder.name == f"e0-r00003-{manifest['process_uuid'][:12]}"
    assert (manifest["version"], manifest["run_id"], manifest["epoch"]) == (1, "declared", 0)
    assert (manifest["rank"], manifest["world_size"]) == (3, 8)
    assert manifest["layout"] == {"dp": 2, "tp": 2, "pp": 2, "cp": 1, "ep": 1, "dsp": 1, "vpp": 1}
    assert manifest["coords"] == {"dp": 1, "tp": 1, "pp": 0, "cp": 0, "ep": 0}
    assert manifest["device"] == {
        "name": "cpu",
        "uuid": None,
        "dtype": "float32",
        "peak_flops_per_s": None,
    }
    assert manifest["model"] == {
        "name": "llama-toy",
        "num_parameters": None,
        "flops_per_token": 6e9,
        "flops_convention": "6N",
        "recomputed_flops_per_token": None,
        "shape": None,
    }
    assert manifest["paced"] is None
    assert manifest["seeds"] == {"weights": 7}
    assert manifest["config"]["lr"] == 1e-3
    assert manifest["config"]["object"] == "<object>"
    assert manifest["environment"]["NCCL_DEBUG"] == "WARN"
    assert "hush" not in text


def test_events_are_written_with_plain_data(tmp_path: Path) -> None:
    tracer.install(spool=tmp_path, run="events")
    tracer.event("checkpoint", "saved", num_bytes=12, loss=float("nan"), thing={1, 2})
    tracer.shutdown()

    folder = only_folder(tmp_path)
    (line,) = (folder / "events.jsonl").read_text().splitlines()
    event = json.loads(line)
    assert (event["kind"], event["text"]) == ("checkpoint", "saved")
    assert event["data"] == {"num_bytes": 12, "loss": "nan", "thing": [1, 2]}


def test_a_generated_run_name_is_printed_once(tmp_path: Path) -> None:
    done = run_script(
        "from rankscope import tracer; print(tracer.install().run_id)", tmp_path, RANKSCOPE_RUN=""
    )

    assert done.stderr == f"rankscope: recording run {done.stdout}"


@pytest.mark.slow
def test_captures_start_if_the_job_imports_torch_after_the_tracer(tmp_path: Path) -> None:
    done = run_script(
        """
        import sys
        from rankscope import tracer
        tracer.install(count_steps=True)
        finders = len(sys.meta_path)
        import torch
        assert len(sys.meta_path) == finders - 1
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight])
        for _ in range(2):
            weight.sum().backward()
            optimizer.step()
        """,
        tmp_path,
    )

    assert (done.returncode, done.stderr) == (0, "")
    folder = only_folder(tmp_path)
    kinds = [(row.kind, row.step) for row in read_spans(folder)]
    assert [about for about in kinds if about[0] in ("backward", "optimizer")] == [
        ("backward", 0),
        ("optimizer", 0),
        ("backward", 1),
        ("optimizer", 1),
    ]


@pytest.mark.parametrize(
    "lose",
    ["sys.stderr = None", "sys.stderr.close()", "os.dup2(os.open('/dev/full', os.O_WRONLY), 2)"],
)
@pytest.mark.parametrize("spool", ["", "/dev/null"])
def test_a_job_without_stderr_runs_as_usual(tmp_path: Path, lose: str, spool: str) -> None:
    done = run_script(
        f"""
        import os, sys
        from rankscope import tracer
        {lose}
        installed = tracer.install(spool={spool!r} or None, run="a name that is cleaned")
        with tracer.span("x"):
            pass
        print(installed.enabled)
        """,
        tmp_path,
    )

    assert (done.returncode, done.stdout) == (0, f"{not spool}\n")


@pytest.mark.parametrize("argument", ["spool", "run", "model", "config"])
def test_no_argument_makes_install_raise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argument: str
) -> None:
    class Hostile:
        def fail(self, *_: object) -> NoReturn:
            raise HostileError

        __bool__ = __str__ = __fspath__ = keys = __iter__ = parameters = fail

    class HostileError(Exception):
        def __repr__(self) -> str:
            raise RuntimeError

    arguments: dict[str, Any] = {"spool": tmp_path, "run": "run", argument: Hostile()}
    installed = tracer.install(**arguments)
    tracer.shutdown()

    said = capsys.readouterr().err
    assert installed.enabled == (argument == "model")
    assert ("not tracing this process: HostileError" in said) == (argument != "model")


def test_a_failed_installation_is_undone_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = threading.active_count()
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr("rankscope.tracer.job.profile.offer_profiles", None)
        assert tracer.install(spool=tmp_path, run="run") is tracer.NOOP_TRACER
    assert "not tracing this process: TypeError" in capsys.readouterr().err
    assert tracer.current_tracer() is tracer.NOOP_TRACER
    assert threading.active_count() == threads
    assert (only_folder(tmp_path) / "exit.json").exists()

    assert tracer.install(spool=tmp_path, run="next").enabled
    tracer.shutdown()


def test_a_child_forked_while_another_thread_installs_may_install_itself(tmp_path: Path) -> None:
    done = run_script(
        """
        import os, sys, threading
        from rankscope import tracer
        begun, ended, forked = threading.Event(), threading.Event(), threading.Event()

        def pause_within_install(frame, event, argument):
            if threading.current_thread() is installing and tracer.current_tracer().enabled:
                sys.setprofile(None)  # once
                begun.set()
                forked.wait()

        def install():
            tracer.install()
            ended.set()
            begun.set()  # or else the wait for it would not end

        installing = threading.Thread(target=install)
        threading.setprofile(pause_within_install)  # calls it at each call and return
        installing.start()
        begun.wait()
        assert not ended.is_set()
        child = os.fork()
        if child == 0:
            with tracer.span("of the child, before"):
                pass
            print(tracer.install(run="child").enabled)
            with tracer.span("of the child"):
                pass
            tracer.shutdown()
        else:
            forked.set()  # not in the child, where a lock of it may be held for ever
            os.waitpid(child, 0)
            installing.join()
            with tracer.span("of the parent"):
                pass
        """,
        tmp_path,
    )

    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    names = {run: {row.name for row in read_spans(only_folder(tmp_path / run))} for run in RUNS}
    assert names == {"run": {"of the parent"}, "child": {"of the child"}}


RUNS = ("run", "child")
