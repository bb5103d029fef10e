"""Traces that are read in pieces."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.errors import NotATraceError, TraceError
from rankscope.collector.importers import event_stream
from rankscope.collector.importers.event_stream import EventStream

if TYPE_CHECKING:
    from pathlib import Path

EVENTS = [{"name": f"€ {number}", "args": {"x": [number, {}]}, "ts": -1.5} for number in range(99)]
DOCUMENT = {"rank": 12345, "traceEvents": EVENTS, "after": {"rank": [1]}, "last": 7}


@pytest.mark.parametrize("piece_bytes", [1, 7, 100, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_the_pieces_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int, indent: int | None
) -> None:
    monkeypatch.setattr(event_stream, "PIECE_BYTES", piece_bytes)
    path = tmp_path / "trace"
    text = json.dumps(DOCUMENT, indent=indent, ensure_ascii=False).encode()
    for content in (text, gzip.compress(text)):
        path.write_bytes(content)
        shares: list[float] = []
        stream = EventStream(path, show=shares.append)

        assert list(stream) == EVENTS
        assert stream.members == {name: DOCUMENT[name] for name in ("rank", "after", "last")}
        assert shares == sorted(shares)
        assert shares[-1] == 1.0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"traceEvents": [{"a": 1}, {"b"', "no JSON file"),
        ('{"traceEvents": [{"a": 1}', "no comma"),
        ('{"traceEvents": [{"a": 1} {}]}', "no comma"),
        ('{"traceEvents": [{"a": 1}]', "cut off"),
        ('{"traceEvents": [' + "[" * 5000 + "]}", "nested too deeply"),
        ('{"a" 1}', "':' is missing"),
    ],
)
def test_a_broken_file_is_refused_with_the_reason(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)

    with pytest.raises(TraceError, match=reason):
        list(EventStream(path))


def test_the_memory_is_that_of_a_piece(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    event = json.dumps({"name": "x" * 100, "args": dict.fromkeys("abcdef", 1)})
    with path.open("w") as file:
        file.write('{"traceEvents": [')
        file.writelines(f"{event}," for _ in range(200_000))
        file.write(f"{event}]}}")

    tracemalloc.start()
    num = sum(1 for _ in EventStream(path))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert num == 200_001
    assert path.stat().st_size > 30_000_000
    assert peak_bytes < 8_000_000


FOREIGN: dict[str, tuple[str, bytes, str]] = {
    "pickle": ("dump", b"\x80\x04\x95", "--format flight-recorder"),
    "parquet": ("x", b"PAR1", "--format bytedance"),
    "sqlite": ("report.sqlite", b"SQLite format 3\0", "Nsight Systems"),
    "nsys": ("report.nsys-rep", b"\x01\x02", "report of Nsight Systems"),
    "xplane": ("host.xplane.pb", b"\x0a\x05", "xplane"),
    "packed pickle": ("x.gz", gzip.compress(b"\x80\x04\x95"), "packed as gzip, a pickle"),
    "list": ("x.json", b"  [{}]", "--format chrome"),
    "lfs": ("x.json", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "empty": ("x.json", b"", "empty"),
    "zstd": ("x.json.zst", b"\x28\xb5\x2f\xfd\x00", "decompress it"),
    "unknown": ("x", b"hello", "it begins with 'hello'"),
}


@pytest.mark.parametrize(("name", "content", "reason"), FOREIGN.values(), ids=FOREIGN)
def test_another_format_is_named_with_what_can_be_done(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)

    with pytest.raises(NotATraceError, match=reason):
        list(EventStream(path))
