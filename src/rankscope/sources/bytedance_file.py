"""Trace files in the ByteDance format, analysed without a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.analysis.readers.bytedance.format import TraceColumns
from rankscope.analysis.readers.bytedance.what_if import what_if_trace
from rankscope.analysis.trace.tables import EpochInfo, RankInfo, RunInfo
from rankscope.collector.importers.bytedance import EPOCH, SOURCE_FORMAT
from rankscope.collector.importers.bytedance_meta import read_meta
from rankscope.collector.importers.bytedance_trace import read_trace
from rankscope.tracer.topology import Coords

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.analysis.readers.bytedance.what_if import TraceWhatIf


def what_if_file(path: Path, meta: Path) -> TraceWhatIf:
    """Return S, S_X, exact S_w, M_W and M_S of a trace file; see `what_if_trace`.

    Args:
        meta: YAML file with the sizes of the job.

    Raises:
        MetaError: ``meta`` cannot be read, is incomplete, or contradicts the trace.
        TraceError: The file is not a trace in this format.
    """
    return what_if_trace(*read_trace_file(path, meta))


def read_trace_file(path: Path, meta: Path) -> tuple[RunInfo, TraceColumns]:
    """Read a trace file for `what_if_trace`; arguments and errors are those of `what_if_file`."""
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
    return run, TraceColumns(
        step=rows.columns["step"],
        rank=rows.columns["rank"],
        name=rows.optype,
        start_ns=rows.start_ns,
        duration_ns=rows.duration_ns,
        seq=rows.columns["seq_id"],
        chunk=rows.columns["mc"],
        names=rows.optypes,
    )
