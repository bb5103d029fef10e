"""Read a trace in the ByteDance format straight into the analysis, past the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

from analysis.source import EpochInfo, RankInfo, RunInfo, SpanTable
from collector.importers.bytedance import EPOCH, SOURCE_FORMAT
from collector.importers.bytedance_meta import read_meta
from collector.importers.bytedance_rows import KIND_OF_OPTYPE, read_trace
from tracer.span import KIND_CODES, NONE, SpanKind
from tracer.topology import Coords

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from collector.importers.bytedance_rows import TraceRows

T = TypeVar("T", bound=np.generic)


def read_trace_file(path: Path, meta: Path) -> tuple[RunInfo, SpanTable]:
    """Read a trace as `analysis.source.SpanSource` would hand it over after an import.

    The spans are in the file's order.

    Args:
        path: The parquet file.
        meta: YAML with the job's sizes.

    Raises:
        MetaError: ``meta`` is unreadable, incomplete, or contradicts the trace.
        TraceError: The file is no such trace.
    """
    sizes = read_meta(meta, trace=path)
    rows = read_trace(path, meta=sizes)
    ranks = tuple(RankInfo(rank=rank, coords=Coords(dp=dp, pp=pp)) for rank, dp, pp in rows.workers)
    run = RunInfo(
        run_id=path.stem,
        source_format=SOURCE_FORMAT,
        layout=sizes.layout,
        world_size=sizes.layout.world_size,
        epochs=(EpochInfo(epoch=EPOCH, ranks=ranks),),
    )
    return run, _span_table(rows)


def _span_table(rows: TraceRows) -> SpanTable:
    """Return the rows as spans. Columns that the format lacks take no memory."""
    num = len(rows.start_ns)
    held = rows.columns
    kinds = [SpanKind(KIND_OF_OPTYPE.get(optype, "other")) for optype in rows.optypes]
    codes = np.array([KIND_CODES[kind] for kind in kinds], dtype=np.int8)

    def all_rows(value: T) -> NDArray[T]:
        return np.broadcast_to(np.asarray(value), num)

    return SpanTable(
        epoch=all_rows(np.int32(EPOCH)),
        step=held["step"].astype(np.int32, copy=False),
        rank=held["rank"].astype(np.int32, copy=False),
        kind=codes[rows.optype],
        name=rows.optype,
        track=all_rows(np.int32(0)),
        start_ns=rows.start_ns,
        duration_ns=rows.duration_ns,
        launch_ns=all_rows(np.int64(NONE)),
        group_id=all_rows(np.uint64(0)),
        seq=held["seq_id"].astype(np.int64, copy=False),
        src_rank=all_rows(np.int32(NONE)),
        dst_rank=all_rows(np.int32(NONE)),
        microbatch=held["mb_id"].astype(np.int32, copy=False),
        chunk=held["mc"].astype(np.int32, copy=False),
        num_bytes=all_rows(np.int64(NONE)),
        interval_id=all_rows(np.int64(0)),
        flags=all_rows(np.uint16(0)),
        depth=all_rows(np.int16(0)),
        names=rows.optypes,
        tracks=("",),
    )
