"""A spool in memory, decoded as by the collector and not stored, for fast runs by the hundred."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa

from rankscope.analysis.trace.context import MicrobatchTable, RunContext, SampleTable, empty_samples
from rankscope.analysis.trace.tables import (
    EpochInfo,
    GroupInfo,
    RankInfo,
    RunInfo,
    SpanTable,
    StepTable,
)
from rankscope.collector.clock.map import ClockMap
from rankscope.collector.spool.cut import CutKey
from rankscope.collector.spool.records import RECORD, Part, decode
from rankscope.sources.arrow_tables import microbatch_table, span_table, step_table
from rankscope.tracer.spool import HEADER_BYTES, SEGMENT_MAGIC, read_header, read_names, sealed_rows
from rankscope.tracer.topology import Coords, Layout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

ORDER: list[tuple[str, Literal["ascending", "descending"]]] = [
    (column, "ascending") for column in ("epoch", "step", "rank", "start_ns")
]


@dataclass
class _Names:
    known: Mapping[int, str]

    def texts(self, ids: Sequence[int]) -> list[str]:
        return [self.known[each] for each in ids]


@dataclass
class MemorySource:
    """One run in memory."""

    info: RunInfo
    span_rows: SpanTable
    step_rows: StepTable
    around: RunContext = field(default_factory=RunContext)

    def runs(self) -> tuple[()]:
        """Return no runs."""
        return ()

    def run_info(self, run_id: str) -> RunInfo:
        """Return the run from its manifests."""
        assert run_id == self.info.run_id
        return self.info

    def spans(self, run_id: str, *, first: int | None = None, last: int | None = None) -> SpanTable:
        """Return all spans."""
        assert (first, last) == (None, None)
        del run_id
        return self.span_rows

    def steps(self, run_id: str, *, first: int | None = None, last: int | None = None) -> StepTable:
        """Return all steps."""
        assert (first, last) == (None, None)
        del run_id
        return self.step_rows

    def context(
        self, run_id: str, *, first: int | None = None, last: int | None = None
    ) -> RunContext:
        """Return lengths and samples."""
        del run_id, first, last
        return self.around


def read_spool(
    folder: Path, *, clock_error_ns: int | None, samples: Sequence[Mapping[str, object]] = ()
) -> MemorySource:
    """Read the folder of a run whose ranks have all ended."""
    tables: dict[str, list[pa.Table]] = {"spans": [], "steps": [], "microbatches": []}
    ranks, groups = [], {}
    layout, run_id = Layout(), folder.name
    for number, process in enumerate(sorted(folder.iterdir())):
        manifest = json.loads((process / "manifest.json").read_text())
        layout = Layout(**manifest["layout"])
        ranks.append(
            RankInfo(
                rank=manifest["rank"], coords=Coords(**manifest["coords"]),
                host=manifest["host"], local_rank=manifest["local_rank"], exit_state="ended",
            )
        )  # fmt: skip
        for line in (process / "groups.jsonl").read_text().splitlines():
            row = json.loads(line)
            group_id = int(row["group_id"], 16)
            groups[group_id] = GroupInfo(
                group_id=group_id, kind=row["kind"], name=row["name"],
                members=tuple(row["members"]),
            )  # fmt: skip
        names = _Names(read_names((process / "process.rsp").read_bytes()))
        for part, segment in enumerate(sorted(process.glob("seg-*.rsp"))):
            data = segment.read_bytes()
            head = read_header(data, magic=SEGMENT_MAGIC, path=segment)
            num = sealed_rows(data) or 0
            records = np.frombuffer(data, dtype=RECORD, offset=HEADER_BYTES, count=num)
            key = CutKey(
                run_id=run_id, epoch=0, rank=head.rank, process="", segment=2 * number + part,
                first_row=0, end_row=num,
            )  # fmt: skip
            clock = ClockMap.fixed(head.anchor_unix_ns - head.anchor_monotonic_ns)
            rows = np.arange(num, dtype=np.uint32)
            (found,) = decode([Part(key=key, records=records, rows=rows, names=names, clock=clock)])
            for name, stored in tables.items():
                stored.append(getattr(found, name))
    whole = {name: pa.concat_tables(rows).sort_by(ORDER[:3]) for name, rows in tables.items()}
    spans = whole["spans"].filter(pa.compute.greater_equal(whole["spans"]["step"], pa.scalar(0)))
    hosts = {info.host for info in ranks}
    info = RunInfo(
        run_id=run_id, source_format="rankscope", layout=layout, world_size=len(ranks),
        epochs=(EpochInfo(epoch=0, ranks=tuple(ranks), groups=tuple(groups.values())),),
        clock_error_ns=0 if len(hosts) == 1 else clock_error_ns,
    )  # fmt: skip
    context = RunContext(
        microbatches=_microbatches(whole["microbatches"]), samples=_samples(samples)
    )
    return MemorySource(info, span_table(spans.sort_by(ORDER)), step_table(whole["steps"]), context)


def _microbatches(rows: pa.Table) -> MicrobatchTable:
    return microbatch_table(rows)


def _samples(rows: Sequence[Mapping[str, object]]) -> SampleTable:
    if not rows:
        return empty_samples()
    table = pa.Table.from_pylist([dict(row) for row in rows])
    table = table.sort_by([("host", "ascending"), ("device", "ascending"), ("at_ns", "ascending")])
    hosts = sorted({str(each) for each in table["host"].to_pylist()})
    return SampleTable(
        host=np.array(
            [hosts.index(str(each)) for each in table["host"].to_pylist()], dtype=np.int32
        ),
        device=table["device"].to_numpy().astype(np.int32),
        at_ns=table["at_ns"].to_numpy(),
        name=np.zeros(table.num_rows, dtype=np.int32),
        value=table["value"].to_numpy(),
        hosts=tuple(hosts),
        names=("gpu-clock-hz",),
    )
