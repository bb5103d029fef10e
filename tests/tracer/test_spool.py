"""The layout of docs/spool-format.md, written by offsets alone, and the opening of files."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

import pytest

from rankscope.tracer.span import SpanFlag, SpanKind
from rankscope.tracer.spool import (
    SEGMENT_MAGIC,
    RecordType,
    open_regular_file,
    read_header,
    read_regular_file,
    sealed_rows,
)
from tests.support.tracer.reading import read_rows
from tests.support.tracer.recording import recorder_in


def put(data: bytearray, offset: int, form: str, *values: object) -> None:
    struct.pack_into("<" + form, data, offset, *values)


def header(magic: bytes, capacity: int) -> bytearray:
    data = bytearray(4096)
    put(data, 0, "8s", magic)
    put(data, 8, "I", 2)
    put(data, 12, "I", 4096)
    put(data, 16, "I", 128)
    put(data, 20, "I", capacity)
    put(data, 24, "I", 6)
    put(data, 28, "I", 2)
    put(data, 32, "I", 5)
    put(data, 36, "I", 8)
    put(data, 40, "I", 1)
    put(data, 44, "I", 4242)
    data[48:64] = bytes(range(16))
    data[64:80] = bytes(range(16, 32))
    data[80:86] = b"node-7"
    data[144:149] = b"run-x"
    put(data, 208, "q", 1_000)
    put(data, 216, "q", 1_700_000_000_000_000_000)
    put(data, 224, "q", 40)
    return data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A spool folder of three records, as another program would write it."""
    process = header(b"RSCPPRC\0", 4096) + bytearray(4096 * 256)
    for number, name in enumerate((b"__other__", b"all_reduce", b"comm tp")):
        at = 4096 + 256 * number
        process[at + 2 : at + 2 + len(name)] = name
        put(process, at, "H", len(name))
    (tmp_path / "process.rsp").write_bytes(process)

    segment = header(b"RSCPSEG\0", 4) + bytearray(4 * 128)
    put(segment, 256, "Q", 1 + 4)

    at = 4096  # row 0: a communication
    put(segment, at + 0, "B", 1)
    put(segment, at + 1, "B", 3)
    put(segment, at + 2, "H", 32768 + 128 + 16 + 1)
    put(segment, at + 4, "I", 1)
    put(segment, at + 8, "i", 12)
    put(segment, at + 12, "i", 3)
    put(segment, at + 16, "i", -1)
    put(segment, at + 20, "I", 2)
    put(segment, at + 24, "q", 5_000)
    put(segment, at + 32, "q", 5_070)
    put(segment, at + 40, "B", 0)
    put(segment, at + 56, "q", 4_990)
    put(segment, at + 64, "Q", 2**64 - 5)
    put(segment, at + 72, "q", 9)
    put(segment, at + 80, "i", 5)
    put(segment, at + 84, "i", 6)
    put(segment, at + 88, "q", 4096)
    put(segment, at + 96, "Q", 77)
    put(segment, at + 48, "Q", at)

    at = 4096 + 128  # row 1: claimed, never committed
    put(segment, at + 0, "B", 1)

    at = 4096 + 2 * 128  # row 2: a step
    put(segment, at + 0, "B", 2)
    put(segment, at + 8, "i", 12)
    put(segment, at + 24, "q", 4_000)
    put(segment, at + 32, "q", 6_000)
    put(segment, at + 64, "q", 512)
    put(segment, at + 72, "d", 2.5)
    put(segment, at + 80, "q", -1)
    put(segment, at + 48, "Q", at)
    (tmp_path / "seg-000006.rsp").write_bytes(segment)
    return tmp_path


def test_a_spool_written_by_the_documented_layout_is_read(folder: Path) -> None:
    step, communication = read_rows(folder)

    assert communication.record == RecordType.SPAN
    assert communication.kind == SpanKind.TP_COMM
    assert (communication.name, communication.track) == ("all_reduce", "comm tp")
    assert communication.flags == SpanFlag.ASYNC | SpanFlag.HOST_CLOCK | SpanFlag.END_BOUND
    assert (communication.start_ns, communication.duration_ns) == (5_000, 70)
    assert (communication.step, communication.microbatch, communication.chunk) == (12, 3, -1)
    assert (communication.group_id, communication.seq) == (2**64 - 5, 9)
    assert (communication.src_rank, communication.dst_rank) == (5, 6)
    assert (communication.num_bytes, communication.interval_id) == (4096, 77)
    assert step.record == RecordType.STEP
    assert (step.step, step.start_ns, step.end_ns) == (12, 4_000, 6_000)
    assert struct.unpack_from("<qdq", step.second) == (512, 2.5, -1)


def test_the_header_has_the_documented_layout(folder: Path) -> None:
    path = folder / "seg-000006.rsp"
    data = path.read_bytes()
    identity = read_header(data, magic=SEGMENT_MAGIC, path=path)

    assert (identity.capacity, identity.segment, identity.lane) == (4, 6, 2)
    assert (identity.rank, identity.world_size, identity.epoch, identity.pid) == (5, 8, 1, 4242)
    assert identity.process_uuid == bytes(range(16))
    assert identity.boot_id == bytes(range(16, 32))
    assert (identity.host, identity.run_id) == ("node-7", "run-x")
    assert identity.anchor_monotonic_ns == 1_000
    assert identity.anchor_unix_ns == 1_700_000_000_000_000_000
    assert identity.anchor_error_ns == 40
    assert sealed_rows(data) == 4


def test_the_tracer_writes_the_documented_layout(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path, segment_bytes=4096 + 4 * 128)
    recorder.begin_steps(12)
    with recorder.span("load", kind=SpanKind.DATA, microbatch=3, chunk=1):
        pass
    recorder.shutdown()

    (path,) = tmp_path.glob("seg-*.rsp")
    data = path.read_bytes()
    assert len(data) == 4096 + 4 * 128
    assert struct.unpack_from("<8sIIIIII", data)[:5] == (b"RSCPSEG\0", 2, 4096, 128, 4)
    assert struct.unpack_from("<Q", data, 256) == (1 + 1,)
    record = data[4096 : 4096 + 128]
    assert record[0:1] + record[1:2] == b"\x01\x0b"
    assert struct.unpack_from("<H", record, 2) == (16,)
    assert struct.unpack_from("<iii", record, 8) == (12, 3, 1)
    start_ns, end_ns = struct.unpack_from("<qq", record, 24)
    assert 0 < start_ns <= end_ns
    assert record[40:48] == bytes(8)
    assert struct.unpack_from("<Q", record, 48) == (4096,)
    assert record[56:64] == bytes(8)
    assert record[64:] == bytes(64)
    assert data[4096 + 128 :] == bytes(3 * 128)

    names = (tmp_path / "process.rsp").read_bytes()
    (name,) = struct.unpack_from("<I", record, 4)
    (track,) = struct.unpack_from("<I", record, 20)
    assert names[4096 + 256 * name :][:6] == b"\x04\x00load"
    assert names[4096 + 256 * track :][:6] == b"\x04\x00main"
    assert names[4096:][:11] == b"\x09\x00__other__"
    assert len(names) == 4096 + 4096 * 256
    produced, written, at_ns, own_cpu_ns, lag_ns = struct.unpack_from("<QQqqq", names, 392)
    assert (produced, written, lag_ns) == (1, 1, -1)
    assert at_ns > 0
    assert own_cpu_ns > 0


def test_a_regular_file_is_read_up_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")

    assert read_regular_file(path, max_bytes=5) == b"12345"
    with pytest.raises(OSError, match="longer than 4 bytes"):
        read_regular_file(path, max_bytes=4)


def test_a_fifo_a_device_a_socket_and_a_folder_are_rejected_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "socket"))
    paths = [tmp_path / "fifo", Path("/dev/zero"), tmp_path / "socket", tmp_path]
    before = num_held(paths)

    for path in paths:
        with pytest.raises(OSError):  # noqa: PT011  # the message for a socket is the system's
            open_regular_file(path)

    assert num_held(paths) == before
    listening.close()


def num_held(paths: list[Path]) -> int:
    """Return how many descriptors of this process refer to one of these paths."""
    num = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            num += descriptor.readlink() in paths
    return num


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "real")

    os.close(open_regular_file(tmp_path / "link"))
