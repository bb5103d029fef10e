"""Requests in the control files of running ranks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.collector.spool.control import (
    ControlRequest,
    ControlRequestError,
    ControlWriter,
    find_answer,
    read_control_request,
    request_ranks,
)
from rankscope.collector.spool.process import ProcessFiles
from rankscope.tracer.record.control import Request, read_control, read_request
from tests.support.collector.spool_builder import SpoolBuilder

if TYPE_CHECKING:
    from pathlib import Path

DOCUMENT = {
    "run_id": "run", "name": "a1", "level": "profile", "steps": 5, "ranks": [3], "by": "me",
}  # fmt: skip


def processes(spool: Path, *ranks: int, run_id: str = "run") -> list[ProcessFiles]:
    return [ProcessFiles(SpoolBuilder(spool, run_id=run_id, rank=rank).folder) for rank in ranks]


def control_of(files: ProcessFiles) -> dict[str, Any] | None:
    path = files.folder / "control.json"
    return json.loads(path.read_text()) if path.exists() else None


def test_the_concerned_ranks_get_a_request_that_the_tracer_reads(tmp_path: Path) -> None:
    two, three = processes(tmp_path, 2, 3)
    (other_run,) = processes(tmp_path, 3, run_id="other")

    asked = request_ranks([three, two, other_run], read_control_request(DOCUMENT))

    assert asked == [3]
    assert control_of(two) is None
    assert control_of(other_run) is None
    read = read_request(read_control(three.folder / "control.json"), "profile")
    assert read == Request(num_steps=5, label="a1")


def test_other_keys_of_the_control_file_stay(tmp_path: Path) -> None:
    (files,) = processes(tmp_path, 3)
    (files.folder / "control.json").write_text('{"level": "comm", "profile": {"request": "old"}}')

    request_ranks([files], read_control_request(DOCUMENT))

    assert control_of(files) == {"level": "comm", "profile": {"steps": 5, "request": "a1"}}


def test_a_folder_that_became_a_link_is_not_followed(tmp_path: Path) -> None:
    (files,) = processes(tmp_path / "spool", 3)
    elsewhere = tmp_path / "elsewhere"
    files.folder.rename(elsewhere)
    files.folder.symlink_to(elsewhere)
    said: list[str] = []

    ControlWriter(say=said.append).write([files], [read_control_request(DOCUMENT)])

    assert not (elsewhere / "control.json").exists()
    assert len(said) == 1


def test_a_request_is_written_once(tmp_path: Path) -> None:
    (files,) = processes(tmp_path, 3)
    writer = ControlWriter(say=lambda _: None)
    request = read_control_request(DOCUMENT)
    writer.write([files], [request])
    (files.folder / "control.json").unlink()
    writer.write([files], [request])

    assert control_of(files) is None


@pytest.mark.parametrize(
    "change",
    [
        {"level": "all"}, {"steps": 0}, {"steps": 101}, {"steps": True}, {"ranks": [-1]},
        {"ranks": ["3"]}, {"ranks": 3}, {"name": "a b"}, {"name": ""}, {"command": "rm"},
        {"by": 101 * "x"},
    ],
)  # fmt: skip
def test_another_document_is_no_request(change: dict[str, object]) -> None:
    with pytest.raises(ControlRequestError):
        read_control_request({**DOCUMENT, **change})


@pytest.mark.parametrize("document", [None, [], {}, {"run_id": "run"}])
def test_a_document_without_its_keys_is_no_request(document: object) -> None:
    with pytest.raises(ControlRequestError):
        read_control_request(document)


def test_without_ranks_all_are_concerned() -> None:
    request = ControlRequest(run_id="run", name="a", level="full", steps=1)
    assert request.concerns(7)


def test_an_answer_is_an_event_with_the_name_of_the_request() -> None:
    row = {"rank": 3, "text": "done", "data": '{"request": "a1", "state": "done", "steps": [1, 2]}'}
    answer = find_answer(row, "a1")

    assert answer is not None
    assert (answer.rank, answer.state, answer.data["steps"]) == (3, "done", [1, 2])
    assert find_answer(row, "a2") is None
    assert find_answer({**row, "data": "{"}, "a1") is None
    assert find_answer({**row, "data": '{"request": "a1"}'}, "a1") is None


def test_the_file_is_readable_by_the_owner_of_the_folder_only_and_its_group(tmp_path: Path) -> None:
    (files,) = processes(tmp_path, 3)
    request_ranks([files], read_control_request(DOCUMENT))
    status = (files.folder / "control.json").stat()

    assert status.st_mode & 0o137 == 0
    assert status.st_uid == files.folder.stat().st_uid
