"""Records of a job that a framework ran."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from rankscope import tracer
from rankscope.tracer.spool import MICROBATCH, STEP, RecordType
from tests.support.tracer.reading import Row, process_folders, read_rows

if TYPE_CHECKING:
    from pathlib import Path


class Recorded:
    """The records of one rank of a spool, read after its shutdown."""

    def __init__(self, spool: Path, *, rank: int = 0) -> None:
        tracer.shutdown()
        self.folder = process_folders(spool)[rank]
        self.rows: list[Row] = read_rows(self.folder)
        self.manifest: dict[str, Any] = json.loads((self.folder / "manifest.json").read_text())

    def steps(self) -> list[tuple[int, int, float | None]]:
        """Return (step, tokens, loss) of each step."""
        found = []
        for row in self.rows:
            if row.record == RecordType.STEP:
                tokens, loss, *_ = STEP.unpack(row.second)
                found.append((row.step, tokens, None if math.isnan(loss) else loss))
        return found

    def tokens(self) -> list[tuple[int, int]]:
        """Return (step, tokens) of each step."""
        return [(step, tokens) for step, tokens, _ in self.steps()]

    def microbatches(self) -> list[tuple[int, int, int, int]]:
        """Return (step, micro-batch, tokens, sum of squared lengths)."""
        return [
            (row.step, row.microbatch, *MICROBATCH.unpack(row.second)[:2])
            for row in self.rows
            if row.record == RecordType.MICROBATCH
        ]

    def spans(self, kind: str) -> list[tuple[int, int]]:
        """Return (step, micro-batch) of the spans of a kind."""
        return [
            (row.step, row.microbatch)
            for row in self.rows
            if row.record == RecordType.SPAN and row.kind == kind
        ]

    def events(self, kind: str) -> list[str]:
        """Return the texts of the events of a kind."""
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [line["text"] for line in map(json.loads, lines) if line["kind"] == kind]
