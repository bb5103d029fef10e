from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rankscope.tracer.job.profile import offer_profiles
from rankscope.tracer.record.control import Request, RequestError, read_request
from tests.support.tracer.recording import recorder_in, write_control
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from rankscope.tracer.record.recorder import Recorder

pytestmark = [
    pytest.mark.filterwarnings("ignore:Warning. Profiler clears events"),  # torch 2.10
    pytest.mark.slow,
]


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    folder = tmp_path / "run" / "process"
    folder.mkdir(parents=True)
    recorder = recorder_in(folder)
    offer_profiles(recorder)
    recorder.begin_steps()
    yield recorder
    recorder.shutdown()


def read_events(recorder: Recorder) -> list[dict[str, Any]]:
    path = recorder.folder / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["kind"] == "profile"]


def request(recorder: Recorder, **request: object) -> None:
    """Write the run's control file and wait until the process has read it."""
    before = len(read_events(recorder))
    write_control(recorder.folder.parent, {"profile": request})
    wait_until(lambda: len(read_events(recorder)) > before)


def work(recorder: Recorder) -> None:
    torch.ones(8, 8) @ torch.ones(8, 8)
    recorder.step()


def test_a_request_is_read_or_rejected_by_key() -> None:
    assert read_request({"level": "all"}, "profile") is None
    assert read_request({"profile": {}}, "profile") == Request(num_steps=3)
    asked = {"profile": {"steps": 2, "ranks": [4, 0], "first_step": 7, "request": "b"}}
    assert read_request(asked, "profile") == Request(
        num_steps=2, ranks=(4, 0), first_step=7, label="b"
    )
    for bad in ("yes", {"steps": 0}, {"steps": True}, {"ranks": 3}, {"ranks": ["0"]}):
        with pytest.raises(RequestError, match=r"^profile"):
            read_request({"profile": bad}, "profile")


def test_the_requested_steps_are_profiled_and_linked(recorder: Recorder, tmp_path: Path) -> None:
    work(recorder)
    request(recorder, steps=2, ranks=[0], request="why is 0 slow")
    for _ in range(4):
        work(recorder)
    wait_until(lambda: len(read_events(recorder)) == 2)

    event = read_events(recorder)[1]
    assert event["text"] == "steps 2 to 3 profiled"
    assert event["data"]["steps"] == [2, 3]
    assert event["data"]["ranks"] == [0]
    assert event["data"]["request"] == "why is 0 slow"
    assert event["data"]["path"] == "run/process/profile-000000002.json"
    trace = json.loads((tmp_path / event["data"]["path"]).read_text())
    names = [entry.get("name") for entry in trace["traceEvents"]]
    assert names.count("aten::matmul") == 2
    assert not torch._C._autograd._profiler_enabled()


def test_a_profile_is_not_written_through_a_link(recorder: Recorder, tmp_path: Path) -> None:
    # The second is where the profiler itself writes at first.
    for name in (".profile-000000002.json.new", ".profile-000000002.json.new.tmp"):
        (recorder.folder / name).symlink_to(tmp_path / "elsewhere")
    work(recorder)
    request(recorder, steps=1)
    work(recorder)
    work(recorder)
    wait_until(lambda: len(read_events(recorder)) == 2)

    assert not (tmp_path / "elsewhere").exists()
    assert (recorder.folder / "profile-000000002.json").is_file()


def test_a_request_is_answered_once_and_by_its_ranks_only(recorder: Recorder) -> None:
    seen: list[Mapping[str, object]] = []
    recorder.on_control(seen.append)  # called after the profiles' own listener
    request(recorder, steps=1, first_step=2)
    write_control(recorder.folder, {"level": "comm"})  # another change: the request is still there
    for _ in range(6):
        work(recorder)
    wait_until(lambda: len(read_events(recorder)) == 2)
    write_control(recorder.folder.parent, {"profile": {"ranks": [1, 2]}})
    wait_until(lambda: seen[-1].get("profile") == {"ranks": [1, 2]})
    work(recorder)
    work(recorder)
    recorder.shutdown()

    assert [event["text"] for event in read_events(recorder)] == [
        "profile requested for 1 steps",
        "steps 2 to 2 profiled",
    ]


def test_a_running_profiler_of_the_job_is_not_disturbed(recorder: Recorder) -> None:
    with torch.profiler.profile() as its_own:
        request(recorder)
        work(recorder)
        work(recorder)
    wait_until(lambda: len(read_events(recorder)) == 2)

    assert read_events(recorder)[1]["text"] == "refused: another profiler is active"
    assert len([event for event in its_own.events() if event.name == "aten::matmul"]) == 2


def test_a_profiler_that_the_job_starts_ends_the_tracers(recorder: Recorder) -> None:
    prepare = torch.autograd.profiler.profile._prepare_trace
    request(recorder, steps=50)
    work(recorder)
    work(recorder)
    with torch.profiler.profile() as its_own:
        work(recorder)
    wait_until(lambda: len(read_events(recorder)) == 2)

    assert read_events(recorder)[1]["text"] == (
        "steps 1 to 1 profiled; cut short: the job started its own profiler"
    )
    assert len([event for event in its_own.events() if event.name == "aten::matmul"]) == 1
    assert torch.autograd.profiler.profile._prepare_trace is prepare


def test_an_invalid_request_is_reported_and_harmless(recorder: Recorder) -> None:
    request(recorder, steps="many")
    work(recorder)

    assert read_events(recorder)[0]["text"] == (
        "refused: profile.steps must be a whole number from 1 to 100"
    )


def test_a_disk_that_cannot_be_written_is_reported(recorder: Recorder) -> None:
    (recorder.folder / "profile-000000001.json").mkdir()
    request(recorder, steps=1)
    for _ in range(3):
        work(recorder)
    wait_until(lambda: len(read_events(recorder)) == 2)

    assert read_events(recorder)[1]["text"] == "failed"
    assert "IsADirectoryError" in read_events(recorder)[1]["data"]["error"]


def test_shutdown_ends_a_running_profile(recorder: Recorder) -> None:
    request(recorder, steps=50)
    work(recorder)
    work(recorder)
    recorder.shutdown()

    assert read_events(recorder)[1]["text"].endswith("cut short: the tracer was shut down")
    assert not torch._C._autograd._profiler_enabled()
