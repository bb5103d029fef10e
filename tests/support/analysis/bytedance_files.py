"""Traces in the ByteDance format: as files, and as the tables that analysis reads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from rankscope.analysis.readers.bytedance.format import TraceColumns
from rankscope.analysis.trace.rows import make_span_table
from rankscope.analysis.trace.tables import RankInfo, SpanTable, StepTable
from rankscope.tracer.topology import Coords, Layout
from tests.support.analysis.cluster import Source
from tests.support.analysis.tables import one_epoch, table_of
from tests.support.traces import TRACES, require_traces

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from rankscope.analysis.trace.tables import RunInfo
    from tests.support.analysis.bytedance_jobs import Job, Row

NARROW = {
    "dp_rank": pa.int8(), "stage": pa.int8(), "rank": pa.int16(), "step": pa.int64(),
    "seq_id": pa.int32(), "mc": pa.int8(), "mb_id": pa.int8(), "gmc": pa.int16(),
}  # fmt: skip
ROW_KEYS = {"dp_rank": "dp", "seq_id": "seq", "mb_id": "mb", "optype": "type"}


def write_trace(
    path: Path, rows: Sequence[Row], *, rng: random.Random | None = None, seconds: float = 1e-9
) -> Path:
    """Write rows as parquet, with ``rng`` in a random valid form.

    Args:
        path: The file.
        rows: Rows of `tests.support.analysis.bytedance_jobs.Job.rows`.
        rng: Chooses types, encodings and sizes of row groups; None for those of the published
            traces.
        seconds: The unit of the rows' times.
    """
    wide = rng is not None and rng.random() < 0.5
    columns: dict[str, pa.Array[Any]] = {}
    for name, narrow in NARROW.items():
        values = [row[ROW_KEYS.get(name, name)] for row in rows]
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
    duration = np.array([row["end"] - row["start"] for row in rows]) * seconds
    columns["start_ts"] = pa.array(start).cast(floats)
    columns["duration"] = pa.array(duration).cast(floats)
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
    document |= {"trial_name": "generated", "run_id": 0}
    path.write_text(json.dumps(document) if as_json else yaml.safe_dump(document))
    return path


def source_of(
    run: RunInfo, columns: TraceColumns, *, microbatch: NDArray[np.int32] | None = None
) -> Source:
    """Return a trace's columns as a source of spans."""
    num = len(columns.step)
    spans = make_span_table(
        epoch=np.zeros(num, np.int32),
        step=columns.step.astype(np.int32),
        rank=columns.rank.astype(np.int32),
        kind=np.zeros(num, np.int8),
        name=columns.name.astype(np.int32),
        track=np.zeros(num, np.int32),
        start_ns=columns.start_ns,
        duration_ns=columns.duration_ns,
        seq=columns.seq.astype(np.int64),
        **({} if microbatch is None else {"microbatch": microbatch}),
        chunk=columns.chunk.astype(np.int32),
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
    return table_of(StepTable, step=pairs[0], rank=pairs[1], start_ns=start, end_ns=end)


def published(name: str) -> tuple[Source, dict[str, Any], float, float]:
    """Read a published trace directly from its file, without the importer."""
    require_traces()
    meta = yaml.safe_load((TRACES / f"meta-{name}.yaml").read_text())
    table = pq.read_table(TRACES / f"trace-{name}.parquet")
    column = {key: table[key].to_numpy() for key in table.column_names if key != "optype"}
    optype: Any = table["optype"].combine_chunks()

    def ns(seconds: np.ndarray) -> np.ndarray:
        return np.rint(seconds.astype(np.float64) * 1e9).astype(np.int64)

    columns = TraceColumns(
        step=column["step"],
        rank=column["rank"],
        name=optype.indices.to_numpy(),
        # Steps a day after each other: each begins at 0 in the file.
        start_ns=ns(column["start_ts"]) + column["step"] * 86_400_000_000_000,
        duration_ns=ns(column["duration"]),
        seq=column["seq_id"],
        chunk=column["mc"],
        names=tuple(optype.dictionary.to_pylist()),
    )
    places = (column[key].tolist() for key in ("rank", "dp_rank", "stage"))
    positions = set(zip(*places, strict=True))
    ranks = [RankInfo(rank=r, coords=Coords(dp=d, pp=s)) for r, d, s in sorted(positions)]
    layout = Layout(dp=meta["dp_size"], pp=meta["pp_size"], tp=meta["tp_size"])
    sizes = {"source_format": "bytedance", "world_size": meta["world_size"]}
    info = one_epoch(name, layout, ranks, **sizes)
    result = json.loads((TRACES / f"result-{name}.json").read_text())
    m_w = json.loads((TRACES / f"mw-{name}.json").read_text())["rem"]
    m_s = json.loads((TRACES / f"ms-{name}.json").read_text())["rem"]
    return source_of(info, columns), result, m_w, m_s
