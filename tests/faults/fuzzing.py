"""Fuzzing of the files in the spool of a process, which the agent of its host reads.

`ProcessFolder.try_file` tries one input; an error that it raises is a finding.
``python -m tests.faults.fuzzing --seconds 600`` searches with atheris, guided by coverage; `make
fuzz` installs it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import resource
import shutil
import socket
import struct
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankscope.collector.errors import WireError
from rankscope.collector.host.heartbeat import HeartbeatSource
from rankscope.collector.ingest.rows import parse_rows
from rankscope.collector.ingest.screening import screen
from rankscope.collector.spool.cut import Placement, Resume
from rankscope.collector.spool.tail import SegmentPolicy, SpoolTail
from rankscope.collector.wire.codec import WireLimits, decode_batch, encode_cuts
from rankscope.collector.wire.schema import SCHEMA_VERSION
from rankscope.tracer.spool import DropReason
from tests.support.collector.spool_builder import SpoolBuilder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankscope.collector.host.heartbeat import Heartbeat
    from rankscope.collector.identity import Row
    from rankscope.collector.spool.cut import Cut, ProcessFacts
    from rankscope.collector.wire.codec import CutBatch

MIB = 1 << 20
LIMITS = WireLimits(max_wire_bytes=MIB, max_inflated_bytes=16 * MIB, max_rows=20_000)
REFUSALS = {413, 422}
MOST_MEMORY = 8 << 30
MAX_INPUT = 64 << 10
TIMEOUT_S = 20
NOW_NS = 1_700_000_001_000_000_000
WORDS = (0, 1, 2, 0x7F, 0x80, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
LONG_WORDS = (-1, 1 << 31, 1 << 40, 1 << 62, (1 << 63) - 1, -(1 << 63), -2)


def decoded(body: bytes) -> CutBatch | None:
    """Return the decoded body, as the service decodes it; None if it is refused.

    Raises:
        Exception: The service would answer 500.
    """
    try:
        return screen(decode_batch(body, limits=LIMITS))
    except WireError as refusal:
        if refusal.status not in REFUSALS:
            raise
        return None


def _with_forged_word(data: bytes, chooser: random.Random) -> bytes:
    """Return the bytes with one forged word at an aligned position."""
    if len(data) < 8:
        return data + bytes(chooser.randrange(256) for _ in range(8))
    broken = bytearray(data)
    if chooser.random() < 0.5:
        place = chooser.randrange(0, len(data) - 3, 2)
        word = chooser.choice(WORDS) if chooser.random() < 0.8 else chooser.getrandbits(32)
        struct.pack_into("<I", broken, place, word)
    else:
        place = chooser.randrange(0, len(data) - 7, 4)
        struct.pack_into("<q", broken, place, chooser.choice(LONG_WORDS))
    return bytes(broken)


class _Collector:
    """A collector that decodes and refuses as the real one does."""

    def __init__(self) -> None:
        self.num_rows = 0

    def place(self, processes: Sequence[ProcessFacts]) -> list[Placement | None]:
        return [Placement(run_id=one.run_id, epoch=one.epoch) for one in processes]

    def resume(self, run_id: str) -> Resume:
        return Resume()

    def clocks(self) -> list[Row]:
        return []

    def hear(self, beats: Sequence[Heartbeat]) -> None:
        self.upsert("heartbeats", [asdict(beat) for beat in beats])

    def upsert(self, table: str, rows: Sequence[Row]) -> None:
        if rows:
            document = {"schema": SCHEMA_VERSION, "rows": list(rows)}
            parse_rows(table, json.dumps(document).encode())

    def ingest(self, cuts: Sequence[Cut]) -> None:
        batch = decoded(encode_cuts(cuts))
        assert batch is not None, "what the agent read would be parked"
        for place, cut in enumerate(cuts):
            stored = batch.cut(place)
            assert stored.key == cut.key
            tables = (stored.rows.spans, stored.rows.steps, stored.rows.microbatches)
            num_reported = sum(table.num_rows for table in (*tables, stored.rows.bad_rows))
            assert num_reported + stored.num_torn == cut.key.end_row - cut.key.first_row, cut.key
        self.num_rows += sum(cut.key.end_row - cut.key.first_row for cut in cuts)


class ProcessFolder:
    """The folder of an ended process, in which one file is changed."""

    def __init__(self, spool: Path) -> None:
        built = SpoolBuilder(spool, run_id="run", capacity=4, host=socket.gethostname())
        built.span("a", start_ns=100, step=1, comm=(7, 0, 0, 1, 64, 0))
        built.step(1, start_ns=100, duration_ns=50, loss=2.5, num_tokens=64)
        built.microbatch(0, step=1, num_tokens=64, sum_squared_lengths=64)
        built.open_span(0, "all_reduce", start_ns=200, step=1, group_id=7, seq=3)
        built.group(7, kind="dp", name="data", members=[0, 1])
        built.event("checkpoint", "saved", at_ns=1_700_000_000_000_000_000, data={"path": "x"})
        built.drop(DropReason.NO_SEGMENT, 3)
        built.fail("ValueError", "no", at_ns=1_700_000_000_000_000_000)
        self._spool = spool
        self._folder = built.folder
        self._whole = {path.name: path.read_bytes() for path in built.folder.iterdir()}
        self.names = sorted(self._whole)

    def seeds(self) -> list[bytes]:
        """Return each unchanged file after the byte that selects it."""
        return [
            bytes([number]) + self._whole[name][: MAX_INPUT - 1]
            for number, name in enumerate(self.names)
        ]

    def try_file(self, data: bytes) -> int:
        """Read the folder with one changed file and return the number of rows.

        Args:
            data: Number and content of the file.

        Raises:
            Exception: A finding: no file of a process may crash the agent of its host, and the
                collector must accept every row that the agent reads.
        """
        if not data:
            return 0
        changed = self.names[data[0] % len(self.names)]
        whole = self._whole[changed]
        for name, content in self._whole.items():
            (self._folder / name).write_bytes(content)
        (self._folder / changed).write_bytes(data[1:] + whole[MAX_INPUT - 1 :])
        collector = _Collector()
        HeartbeatSource(self._spool, sink=collector.hear, address="").read(NOW_NS)
        tail = SpoolTail(self._spool, collector, segment_policy=SegmentPolicy.DELETE, grace_ns=0)
        for _ in range(3):
            tail.poll()
        tail.close()
        return collector.num_rows


def mutated_file(data: bytes, chooser: random.Random) -> bytes:
    """Return an input of `ProcessFolder.try_file` with a forged word or number."""
    if chooser.random() < 0.5:
        return data[:1] + _with_forged_word(data[1:], chooser)
    texts = [b"-1", b"1e999", b"NaN", b"[]", b"{}", b'"\\ud800"', b"null", b"9" * 30, b'""', b"\n"]
    digits = [at for at in range(1, len(data)) if data[at : at + 1] in b'0123456789"' and data[at]]
    place = chooser.choice(digits) if digits else 1
    return data[:place] + chooser.choice(texts) + data[place + 1 :]


def main() -> None:
    """Search for a finding until the time is over; its input is kept in ``--keep``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, default=Path(), help="folder for what is found")
    options = parser.parse_args()
    atheris: Any = importlib.import_module("atheris")
    for name in [name for name in sys.modules if name.startswith(("collector", "tracer."))]:
        for thing in list(vars(sys.modules[name]).values()):
            _instrument(thing, name, atheris.instrument_func)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # As from the kernel.
    work = Path(tempfile.mkdtemp(dir=memory))
    folder = ProcessFolder(work / "spool")
    corpus = work / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(folder.seeds()):
        (corpus / str(number)).write_bytes(seed)

    def mutator(data: bytes, max_size: int, seed: int) -> bytes:
        chooser = random.Random(seed)
        if chooser.random() < 0.4:
            changed: bytes = atheris.Mutate(data, max_size)
            return changed
        return mutated_file(data, chooser)[:max_size]

    flags = [f"-max_total_time={options.seconds}", f"-seed={options.seed}"]
    flags += [f"-max_len={MAX_INPUT}", f"-timeout={TIMEOUT_S}", "-rss_limit_mb=0"]
    flags += [f"-artifact_prefix={options.keep}/", "-len_control=0", "-reduce_inputs=0"]
    atheris.Setup([sys.argv[0], *flags, str(corpus)], folder.try_file, custom_mutator=mutator)
    try:
        atheris.Fuzz()
    finally:
        shutil.rmtree(work)


def _instrument(thing: Any, module: str, change: Callable[[Any], object]) -> None:  # noqa: ANN401
    """Instrument a function, or the functions of a class, for coverage."""
    if getattr(thing, "__module__", None) != module:
        return
    for one in list(vars(thing).values()) if isinstance(thing, type) else [thing]:
        if callable(one) and hasattr(one, "__code__"):
            change(one)


if __name__ == "__main__":
    main()
