"""Rows of the ByteDance format as the files of a trace, and as the tables that analysis reads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from rankscope.analysis.trace.tables import SpanTable, StepTable
from rankscope.tracer.span import NONE
from tests.support.analysis.cluster import Source

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence
    from pathlib import Path

    from rankscope.analysis.readers.bytedance.format import TraceColumns
    from rankscope.analysis.trace.tables import RunInfo
    from tests.support.analysis.bytedance_jobs import Job, Row

NARROW = {
    "dp_rank": pa.int8(), "stage": pa.int8(), "rank": pa.int16(), "step": pa.int64(),
    "seq_id": pa.int32(), "mc": pa.int8(), "mb_id": pa.int8(), "gmc": pa.int16(),
}  # fmt: skip
COLUMN_OF = {"dp_rank": "dp", "seq_id": "seq", "mb_id": "mb", "optype": "type"}


def write_trace(
    path: Path, rows: Sequence[Row], *, rng: random.Random | None = None, seconds: float = 1e-9
) -> Path:
    """Write rows as parquet; with ``rng`` in one of the many ways to write the same.

    Args:
        path: The file.
        rows: As `tests.support.analysis.bytedance_jobs.Job.rows` has them.
        rng: Chooses types, encodings, and sizes of row groups; None: as the published traces.
        seconds: How many seconds a unit of the rows' times is.
    """
    wide = rng is not None and rng.random() < 0.5
    columns: dict[str, pa.Array[Any]] = {}
    for name, narrow in NARROW.items():
        values = [row[COLUMN_OF.get(name, name)] for row in rows]
        columns[name] = pa.array(values, pa.int64() if wide else narrow)
    texts = pa.array([row["type"] for row in rows])
    form = rng.choice(["dictionary", "string", "large"]) if rng else "dictionary"
    columns["optype"] = {
        "dictionary": texts.dictionary_encode,
        "string": lambda: texts,
        "large": lambda: texts.cast(pa.large_string()),
    }[form]()
    floats = pa.float32() if rng is None else rng.choice([pa.float32(), pa.float64()])
    start = np.array([row["start"] for row in rows]) * seconds
    taken = np.array([row["end"] - row["start"] for row in rows]) * seconds
    columns["start_ts"] = pa.array(start).cast(floats)
    columns["duration"] = pa.array(taken).cast(floats)
    names = list(columns)
    if rng:
        rng.shuffle(names)
    table = pa.table({name: columns[name] for name in names})
    pq.write_table(table, path, row_group_size=rng.randint(50, 5_000) if rng else None)
    return path


def write_meta(path: Path, job: Job, *, as_json: bool = False) -> Path:
    sizes = {name: getattr(job, name) for name in ("dp", "dsp", "pp", "tp", "vpp")}
    document: dict[str, object] = {f"{name}_size": size for name, size in sizes.items()}
    document["world_size"] = job.dp * job.dsp * job.pp * job.tp
    document |= {"trial_name": "made up", "run_id": 0}
    path.write_text(json.dumps(document) if as_json else yaml.safe_dump(document))
    return path


def source_of(run: RunInfo, columns: TraceColumns) -> Source:
    """Return a trace's columns as the store would hand them out."""
    num = len(columns.step)
    none32, none64 = np.full(num, NONE, np.int32), np.full(num, NONE, np.int64)
    spans = SpanTable(
        epoch=np.zeros(num, np.int32),
        step=columns.step.astype(np.int32),
        rank=columns.rank.astype(np.int32),
        kind=np.zeros(num, np.int8),
        name=columns.name.astype(np.int32),
        track=np.zeros(num, np.int32),
        start_ns=columns.start_ns,
        duration_ns=columns.duration_ns,
        launch_ns=none64,
        group_id=np.zeros(num, np.uint64),
        seq=columns.seq.astype(np.int64),
        src_rank=none32,
        dst_rank=none32,
        microbatch=none32,
        chunk=columns.chunk.astype(np.int32),
        num_bytes=none64,
        interval_id=np.zeros(num, np.int64),
        flags=np.zeros(num, np.uint16),
        depth=np.zeros(num, np.int16),
        names=columns.names,
        tracks=("",),
    )
    return Source(run, spans, _steps_of(spans))


def _steps_of(spans: SpanTable) -> StepTable:
    pairs, index = np.unique(np.stack((spans.step, spans.rank)), axis=1, return_inverse=True)
    num = pairs.shape[1]
    start, end = np.full(num, np.iinfo(np.int64).max), np.full(num, np.iinfo(np.int64).min)
    np.minimum.at(start, index.ravel(), spans.start_ns)
    np.maximum.at(end, index.ravel(), spans.start_ns + spans.duration_ns)
    return StepTable(
        epoch=np.zeros(num, np.int32),
        step=pairs[0],
        rank=pairs[1],
        start_ns=start,
        end_ns=end,
        num_tokens=np.full(num, NONE, np.int64),
        loss=np.full(num, np.nan),
        left_out=np.zeros(num, np.uint32),
    )
