"""FIFOs, devices, folders and links in a spool: any user who trains can create them there."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.host.heartbeat import newest_step
from rankscope.collector.spool.process import JsonLines
from rankscope.collector.spool.segment import SegmentReader, read_open_spans

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(params=["fifo", "device", "folder"])
def special_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "seg-000000.rsp"
    if request.param == "fifo":
        os.mkfifo(path)
    elif request.param == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    return path


def test_a_segment_that_is_no_regular_file_is_an_error_and_does_not_block(
    special_file: Path,
) -> None:
    with pytest.raises(OSError, match=r"regular file|symbolic links"):
        SegmentReader(special_file, grace_ns=0)

    assert read_open_spans(special_file) == []
    assert newest_step(special_file.parent) == -1


def test_a_symbolic_link_does_not_make_the_agent_publish_a_private_file(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text('{"password": "x"}\n')
    events = tmp_path / "events.jsonl"
    events.write_text('{"kind": "gc"}\n')
    assert JsonLines(events).read() == [(0, {"kind": "gc"})]

    events.unlink()
    events.symlink_to(tmp_path / "secret.json")
    with pytest.raises(OSError, match="symbolic links"):
        JsonLines(events).read()
